"""Autograd functions at the borders of tensor-parallel regions. Each docstring is its contract.

Names say where the tensor comes from and goes to: *replicated* over tp, *partial* (to be summed over tp), or *sharded*
along the sequence (the leading dim). The linear layers hold their own fused versions in `tensor_parallel/linear.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron.core.comm.collectives import all_gather, all_reduce, reduce_scatter
from megatron.core.groups import Group

Reduce = Callable[[Tensor, Group], Tensor]  # returns the sum over a group; may overwrite its argument


class _PartialToReplicated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, reduce: Reduce) -> Tensor:
        return reduce(x.clone() if group.size > 1 else x.view_as(x), group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad, None, None


class _PartialToSequenceShard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return reduce_scatter(x, group) if group.size > 1 else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_gather(grad, ctx.group), None


class _ToShards(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, sequence_parallel: bool) -> Tensor:
        ctx.group, ctx.sequence_parallel = group, sequence_parallel
        return all_gather(x, group) if sequence_parallel and group.size > 1 else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        if ctx.sequence_parallel:
            return reduce_scatter(grad, ctx.group), None, None
        return all_reduce(grad.clone() if ctx.group.size > 1 else grad, ctx.group), None, None


def to_shards(x: Tensor, group: Group, sequence_parallel: bool) -> Tensor:
    """[s/tp, ...] with sequence parallelism, else [s, ...] replicated -> [s, ...], for layers that are sharded over tp.

    Forward: all-gather, or nothing. Backward: reduce-scatter, or all-reduce (the gradient is partial).
    """
    result: Tensor = _ToShards.apply(x, group, sequence_parallel)
    return result


def sum_partial(x: Tensor, group: Group, reduce: Reduce = all_reduce) -> Tensor:
    """Forward: all-reduce, by `reduce`. Backward: nothing (the gradient is replicated)."""
    result: Tensor = _PartialToReplicated.apply(x, group, reduce)
    return result


def sum_partial_to_sequence_shard(x: Tensor, group: Group) -> Tensor:
    """[s, ...] -> [s/tp, ...]. Forward: reduce-scatter. Backward: all-gather."""
    result: Tensor = _PartialToSequenceShard.apply(x, group)
    return result
