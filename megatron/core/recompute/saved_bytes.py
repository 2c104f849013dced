"""Counts the bytes that a forward saves for its backward."""

from collections.abc import Callable, Iterable

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


def saved_bytes(forward: Callable[[], object], apart_from: Iterable[Tensor] = ()) -> int:
    """Bytes of the distinct storages that `forward` saves for its backward.

    Storages of `apart_from` (parameters, tables that layers share) are not counted. The result of `forward` must hold
    the graph: while it lives, no storage replaces another. Tensors that hooks inside of `forward` handle (recompute,
    offload) are not counted, because autograd does not save them.
    """
    excluded = {tensor.untyped_storage()._cdata for tensor in apart_from}
    sizes: dict[int, int] = {}

    def count(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in excluded:
            sizes[storage._cdata] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(count, lambda tensor: tensor):
        out = forward()
    del out
    return sum(sizes.values())
