"""Computes the global gradient norm, in which every parameter of the model counts exactly once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from megatron.core.comm.collectives import all_reduce
from megatron.core.groups import Groups
from megatron.kernels.ops.square_sum import SquareSum, square_sum

# A flat tensor that this rank counts (`ParamInfo.held_first`), after the name of its parameters' view.
Counted = tuple[str, Tensor]


def global_norm(
    counted: Iterable[Counted], groups: Groups, device: torch.device, on_device: SquareSum = square_sum
) -> Tensor:
    """Returns the 2-norm over the model, fp32 [], on `device`, where communication takes place. The host does not wait.

    The elements of a row of 64 are summed in fp32 and the rows in fp64, and the norm is rounded to fp32. The order of the
    rows depends on the sharding, but it changes only the sixteenth digit of the sum, and the norm keeps seven. So the norm
    does not depend on buckets and slices, and clipping is bit-identical under every sharding. on_device: the kernel for
    tensors on `device`. Communication: see `_over_model`.
    """
    squares = [
        (view, (on_device if tensor.device == device else square_sum)(tensor).to(device)) for view, tensor in counted
    ]
    sums = _over_model(squares, groups, torch.zeros(1, dtype=torch.float64, device=device))
    return torch.cat([total / copies for total, copies in sums]).sum().sqrt().float()


def global_zeros(counted: Iterable[Counted], groups: Groups, device: torch.device) -> Tensor:
    """Returns the number of zero elements over the model, int64 [], like `global_norm`."""
    zeros = [(view, tensor.numel() - tensor.count_nonzero()) for view, tensor in counted]
    sums = _over_model(zeros, groups, torch.zeros(1, dtype=torch.int64, device=device))
    return torch.cat([total // copies for total, copies in sums]).sum()


def _over_model(counted: list[Counted], groups: Groups, nothing: Tensor) -> Iterator[tuple[Tensor, int]]:
    """For each view the sum of its numbers over the model [1], and how often that counts every element.

    Without shards the ranks of `View.model` hold each element once. Where ranks own slices, the slices of each instance of
    the optimizer are the whole model.

    Communication: for each view one all-reduce of a number over `View.model` or over the world.
    """
    for view in groups.views.values():
        own = [number for name, number in counted if name == view.name]
        local = torch.stack(own).sum().view(1) if own else nothing.clone()
        if view.shard.size == 1:
            yield all_reduce(local, view.model), 1
        else:
            yield all_reduce(local, groups.world), view.replicas.size
