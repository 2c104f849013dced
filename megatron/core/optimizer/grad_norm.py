"""The global gradient norm: every parameter of the model counted exactly once, on whichever ranks it lies."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.comm.collectives import all_reduce
from megatron.core.groups import Groups
from megatron.spec.buckets import NORM_ROW


def global_norm(tensors: Iterable[Tensor], groups: Groups, device: torch.device) -> float:
    """2-norm over the model of flat tensors that this rank counts: `ParamInfo.held_first`.

    Rows of 64 elements are summed in fp32, rows in fp64, and the norm is rounded to fp32. Which rows follow one another
    depends on the sharding, but their order moves the sixteenth digit of the sum, and the norm keeps seven. So the norm
    does not depend on buckets and slices, and clipping is bit-identical under every sharding. `device`: where communication
    takes place. Communication: see `_over_model`. Synchronises the host with the device.
    """
    squares = [_square_sum(tensor).to(device) for tensor in tensors]
    local = torch.stack(squares).sum().view(1) if squares else torch.zeros(1, dtype=torch.float64, device=device)
    total, copies = _over_model(local, groups)
    return float((total / copies).sqrt().float())


def global_zeros(tensors: Iterable[Tensor], groups: Groups, device: torch.device) -> int:
    """Number of zero elements over the model, counted as `global_norm` does."""
    counts = [tensor.numel() - tensor.count_nonzero() for tensor in tensors]
    total = torch.stack(counts).sum().view(1) if counts else torch.zeros(1, dtype=torch.int64, device=device)
    total, copies = _over_model(total, groups)
    return int(total) // copies  # exact: divided as a tensor it would become fp32


def _square_sum(tensor: Tensor) -> Tensor:
    if short := -tensor.numel() % NORM_ROW:
        tensor = F.pad(tensor, (0, short))
    return torch.linalg.vector_norm(tensor.view(-1, NORM_ROW), dim=1).double().square_().sum()


def _over_model(local: Tensor, groups: Groups) -> tuple[Tensor, int]:
    """Sum of one number over tp x pp and, if ranks own slices, over those; and how often it counts every element.

    Each instance of a sharded optimizer counts the whole model.

    Communication: one all-reduce of a number over tp x pp or over the world.
    """
    if groups.shard.size == 1:
        return all_reduce(local, groups.model), 1
    return all_reduce(local, groups.world), groups.replicas.size
