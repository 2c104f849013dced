"""The global gradient norm: every parameter of the model counted exactly once, wherever its copies and pieces lie."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from megatron.core.comm.collectives import all_reduce
from megatron.core.groups import Groups
from megatron.core.parameter import Parameter


def counted_here(parameter: Parameter, groups: Groups) -> bool:
    """A parameter replicated over tp is counted by tp rank 0 only; a sharded one by every rank, each its own piece."""
    return parameter.info.tp_dim is not None or groups.tp.rank == 0


def global_norm(tensors: Iterable[Tensor], groups: Groups) -> float:
    """2-norm over the model of tensors that are counted here (see `counted_here`).

    Communication: one sum all-reduce of one number over tp x pp. Synchronises the host with the device.
    """
    kept = list(tensors)
    local = torch.nn.utils.get_total_norm(kept) if kept else torch.zeros(())
    square = local.to(kept[0].device if kept else "cpu", torch.float64).square().view(1)
    return float(all_reduce(square, groups.model).sqrt())


def global_zeros(tensors: Iterable[Tensor], groups: Groups) -> int:
    """Number of zero elements over the model, counted as `global_norm` does."""
    kept = list(tensors)
    counts = [tensor.numel() - tensor.count_nonzero() for tensor in kept]
    total = torch.stack(counts).sum().view(1) if counts else torch.zeros(1, dtype=torch.int64)
    return int(all_reduce(total, groups.model))
