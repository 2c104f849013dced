"""Computes the global gradient norm, in which every parameter of the model counts exactly once."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from megatron.core.comm.collectives import all_reduce
from megatron.core.groups import Groups
from megatron.kernels.ops.square_sum import SquareSum, square_sum

# A flat tensor that this rank counts (`ParamInfo.held_first`), after the name of its parameters' view.
Counted = tuple[str, Tensor]


def global_norm(
    counted: Iterable[Counted],
    groups: Groups,
    device: torch.device,
    on_device: SquareSum = square_sum,
    copies: Iterable[Counted] = (),
) -> Tensor:
    """Returns the 2-norm over the model, fp32 [], on `device`, where communication takes place. The host does not wait.

    The elements of a row of 64 are summed in fp32 and the rows in fp64, and the norm is rounded to fp32. The order of
    the rows depends on the sharding, but it changes only the sixteenth digit of the sum, and the norm keeps seven. So
    the norm does not depend on buckets and slices, and clipping is bit-identical under every sharding. on_device: the
    kernel for tensors on `device`. copies: tensors that another rank counts; the norm is NaN if one of their elements
    is not finite. Communication: see `_over_world`.
    """

    def square(tensor: Tensor) -> Tensor:
        return (on_device if tensor.device == device else square_sum)(tensor).to(device)

    squares = [(view, square(tensor)) for view, tensor in counted]
    squares += [(view, 0.0 * square(tensor)) for view, tensor in copies]
    sums = _over_world(squares, groups, torch.float64, device)
    return torch.stack([total / copies for total, copies in sums]).sum().sqrt().float()


def global_zeros(counted: Iterable[Counted], groups: Groups, device: torch.device) -> Tensor:
    """Returns the number of zero elements over the model, int64 [], like `global_norm`."""
    zeros = [(view, tensor.numel() - tensor.count_nonzero()) for view, tensor in counted]
    sums = _over_world(zeros, groups, torch.int64, device)
    return torch.stack([total // copies for total, copies in sums]).sum()


def _over_world(
    counted: list[Counted], groups: Groups, dtype: torch.dtype, device: torch.device
) -> list[tuple[Tensor, int]]:
    """Returns for each view the sum of its numbers over all ranks, [], and how often that counts every element.

    The ranks of an instance of the optimizer hold each element of the model once, and every instance holds it again.
    One number for all ranks decides alike on all of them, also where one has computed something else than its copies:
    none applies a step that another leaves out.

    Communication: one all-reduce of a number per view over the world.
    """
    sums = torch.zeros(len(groups.views), dtype=dtype, device=device)
    for index, name in enumerate(groups.views):
        numbers = [number for view, number in counted if view == name]
        if numbers:
            sums[index] = torch.stack(numbers).sum()
    totals = all_reduce(sums, groups.world).unbind()
    return [(total, view.replicas.size) for total, view in zip(totals, groups.views.values(), strict=True)]
