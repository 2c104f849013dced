"""Softmax cross entropy of one shard of the vocabulary: the interface of ops/cross_entropy.py.

Statistics read each logit once, with the largest so far and the sum relative to it (Milakov and Gimelshein, arXiv
1805.02867); the gradient reads each logit and overwrites it. There is no fp32 copy.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.kernels.backends.triton.rows import as_rows

BLOCK, WARPS = 8192, 8  # logits and warps of a program of the statistics, which goes through a row
PART, PART_WARPS = 2048, 4  # of one of the gradient, which has a part of a row


@triton.jit
def _statistics(logits_ptr, targets_ptr, result_ptr, n, v, stride, first, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    largest = tl.full((), float("-inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    for start in range(0, v, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + row * stride + columns, mask=columns < v, other=float("-inf")).to(tl.float32)
        before = largest
        largest = tl.maximum(before, tl.max(x, 0))
        base = tl.where(largest == float("-inf"), 0.0, largest)  # -inf - -inf would be NaN
        total = total * tl.exp(before - base) + tl.sum(tl.exp(x - base), 0)
    local = tl.load(targets_ptr + row) - first
    inside = (local >= 0) & (local < v)
    target = tl.load(logits_ptr + row * stride + tl.where(inside, local, 0), mask=inside, other=0.0)
    tl.store(result_ptr + row, largest)
    tl.store(result_ptr + n + row, total)
    tl.store(result_ptr + 2 * n + row, target.to(tl.float32))


@triton.jit
def _gradient(
    logits_ptr, targets_ptr, log_sum_exp_ptr, grad_ptr, v, stride, first, cap,
    CAPPED: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * PART + tl.arange(0, PART)
    place = logits_ptr + row * stride + columns
    x = tl.load(place, mask=columns < v, other=0.0).to(tl.float32)
    grad = tl.load(grad_ptr + row)
    result = tl.exp(x - tl.load(log_sum_exp_ptr + row)) * grad
    result = tl.where(columns == tl.load(targets_ptr + row) - first, result - grad, result)
    if CAPPED:
        ratio = x / cap
        result *= 1.0 - ratio * ratio
    tl.store(place, result.to(logits_ptr.dtype.element_ty), mask=columns < v)


def local_statistics(logits: Tensor, targets: Tensor, first: int) -> Tensor:
    """Returns maximum, sum of exponentials and target logit of each row of this rank's shard. See
    CrossEntropyKernel."""
    n, v = logits.shape
    result = torch.empty(3, n, dtype=torch.float32, device=logits.device)
    if v == 0:
        result.zero_()[0] = float("-inf")
    elif n:
        rows = as_rows(logits, v)
        _statistics[(n,)](rows, targets.contiguous(), result, n, v, rows.stride(0), first, BLOCK, num_warps=WARPS)
    return result


def gradient_(
    logits: Tensor, targets: Tensor, first: int, log_sum_exp: Tensor, grad: Tensor, softcap: float | None = None
) -> Tensor:
    """Overwrites logits, whose rows must be contiguous, with the gradient of the loss. See CrossEntropyKernel."""
    n, v = logits.shape
    assert v == 0 or logits.stride(1) == 1, logits.stride()
    if logits.numel():
        _gradient[(n, triton.cdiv(v, PART))](
            logits, targets.contiguous(), log_sum_exp.contiguous(), grad.float().contiguous(), v, logits.stride(0),
            first, 1.0 if softcap is None else softcap, softcap is not None, PART, num_warps=PART_WARPS,
        )  # fmt: skip
    return logits
