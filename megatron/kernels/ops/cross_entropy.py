"""Softmax cross entropy of one shard of the vocabulary: local statistics, and the gradient in place of the logits.

Rows are processed in blocks, so that the fp32 copy of half-precision logits is a block and not a second [n, V] tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.kernels.ops.softcap import slope
from megatron.spec.work_space import CROSS_ENTROPY_BLOCK


class CrossEntropyKernel(NamedTuple):
    """The functions of this file, or others with their contract."""

    local_statistics: Callable[[Tensor, Tensor, int], Tensor]
    gradient_: Callable[[Tensor, Tensor, int, Tensor, Tensor, float | None], Tensor]


def local_statistics(logits: Tensor, targets: Tensor, first: int) -> Tensor:
    """Returns fp32 [3, n] for logits [n, v] of vocabulary ids first .. first + v - 1 and targets [n].

    The rows are the largest logit, the sum of exp(logit - largest), and the target's logit (0 if it is on another
    shard).
    """
    n, v = logits.shape
    result = torch.zeros(3, n, dtype=torch.float32, device=logits.device)
    if v == 0:
        result[0] = float("-inf")
        return result
    local, inside = local_targets(targets, first, v)
    for rows in _blocks(logits):
        block = logits[rows].float()
        largest = block.amax(dim=1)
        target = block.gather(1, local[rows, None]).squeeze(1)
        result[0, rows] = largest
        # `block` may be the logits themselves if they are fp32, so it must not be changed in place.
        result[1, rows] = (block - largest[:, None]).exp_().sum(dim=1)
        result[2, rows] = torch.where(inside[rows], target, 0.0)
    return result


def gradient_(
    logits: Tensor, targets: Tensor, first: int, log_sum_exp: Tensor, grad: Tensor, softcap: float | None = None
) -> Tensor:
    """Overwrites logits [n, v] with d loss / d logits = (softmax - one-hot) * grad [n], and returns them.

    softcap: the logits were capped at it, and the gradient is that of the logits before that.
    """
    if logits.shape[1] == 0:
        return logits
    local, inside = local_targets(targets, first, logits.shape[1])
    for rows in _blocks(logits):
        block = logits[rows].float()  # the logits' own memory if they are fp32
        factor = None if softcap is None else slope(block, softcap)
        block.sub_(log_sum_exp[rows, None]).exp_().mul_(grad[rows, None])
        block.scatter_add_(1, local[rows, None], torch.where(inside[rows], -grad[rows], 0.0)[:, None])
        if factor is not None:
            block.mul_(factor)
            del factor  # before the rounded copy
        if block.dtype != logits.dtype:
            logits[rows] = block.to(logits.dtype)
            del block  # before the next one
    return logits


def local_targets(targets: Tensor, first: int, v: int) -> tuple[Tensor, Tensor]:
    """targets [n] -> their columns on the shard of ids first .. first + v - 1, and whether they are there; 0 where
    not."""
    local = targets - first
    inside = (local >= 0) & (local < v)
    return torch.where(inside, local, 0), inside


def _blocks(logits: Tensor) -> Iterator[slice]:
    n, v = logits.shape
    rows = max(1, CROSS_ENTROPY_BLOCK.get(logits.device.type, 1 << 22) // v)
    return (slice(start, min(start + rows, n)) for start in range(0, n, rows))


separate = CrossEntropyKernel(local_statistics, gradient_)
