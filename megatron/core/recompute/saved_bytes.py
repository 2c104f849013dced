"""How much memory autograd keeps of a forward."""

from collections.abc import Callable, Iterable

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


def saved_bytes(forward: Callable[[], object], apart_from: Iterable[Tensor] = ()) -> int:
    """Bytes of the distinct storages that `forward` saves for its backward.

    Storages of `apart_from` (parameters, tables that layers share) are not counted. What `forward` returns must hold
    the graph: while it lives, no address is used twice. Hooks that are entered inside (recompute, offload) take
    their tensors out of the count, as they take them out of autograd's hands.
    """
    known = {tensor.untyped_storage().data_ptr() for tensor in apart_from}
    sizes: dict[int, int] = {}

    def count(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(count, lambda tensor: tensor):
        out = forward()
    del out
    return sum(sizes.values())
