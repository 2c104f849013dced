"""Tries an attention kernel at set-up: a few tokens, forward and backward, with results that are known beforehand."""

from __future__ import annotations

import itertools
import warnings

import torch
from torch import Tensor

from megatron.kernels.ops.attention import AttentionKernel
from megatron.kernels.ops.attention_lse import BlockKernel
from megatron.kernels.ops.attention_rule import Rule
from megatron.kernels.ops.attention_scores import Scores
from megatron.kernels.ops.attention_segments import with_lengths

_TOKENS, _WINDOW = 128, 16
_TOLERANCE = 0.02  # results are rounded to half precision; those of a broken kernel are not close


def try_attention(
    kernel: AttentionKernel,
    device: torch.device,
    dtype: torch.dtype,
    *,
    qk_dim: int,
    v_dim: int,
    queries: int,
    windowed: bool,
    dropout: float,
    softcap: float | None = None,
    documents: bool = True,
) -> None:
    """Raises RuntimeError if the kernel cannot run, or gives wrong results.

    `qk_dim` is the number of channels of a query's head, `v_dim` that of a value's, `queries` that of query heads per
    key head. `windowed`: also with a sliding window; `documents`: also with three documents. Leaves the generators of
    random numbers as they are.
    """
    cuda = [device] if device.type == "cuda" else []
    with warnings.catch_warnings(), torch.random.fork_rng(cuda):
        warnings.simplefilter("ignore")  # torch warns of each kernel that cannot run, before it raises
        three = with_lengths(torch.arange(_TOKENS, device=device).unsqueeze(0) // 50, (50, 50, _TOKENS - 100))
        windows, packed = (None, _WINDOW) if windowed else (None,), (None, three) if documents else (None,)
        for window, segments in itertools.product(windows, packed):
            q, k, v = (x.requires_grad_() for x in _inputs(device, dtype, qk_dim, v_dim, queries))
            out = kernel(
                q, k, v, scores=Scores(qk_dim**-0.5, softcap), segments=segments, window=window, dropout=dropout
            )
            out.backward(torch.ones_like(out))
            assert q.grad is not None and k.grad is not None and v.grad is not None
            _check(out, q.grad, k.grad, v.grad, queries, exact=dropout == 0.0)


def try_blocks(
    kernel: BlockKernel,
    device: torch.device,
    dtype: torch.dtype,
    *,
    qk_dim: int,
    v_dim: int,
    queries: int,
    windowed: bool,
    softcap: float | None = None,
) -> None:
    """As `try_attention`, for attention of blocks: all keys, causal, and with the rules of a window's blocks."""
    scores = Scores(qk_dim**-0.5, softcap)
    rules = [Rule(scores), Rule(scores, 0)]
    if windowed:
        rules += [Rule(scores, 0, _WINDOW), Rule(scores, _TOKENS // 2, _TOKENS // 2 + 1)]
    for rule in rules:
        q, k, v = _inputs(device, dtype, qk_dim, v_dim, queries)
        out, lse = kernel.forward(q, k, v, rule)
        _check(
            out,
            *kernel.backward(torch.ones_like(out, dtype=dtype), q, k, v, out.to(dtype), lse, rule),
            queries,
            exact=True,
        )


def _inputs(
    device: torch.device, dtype: torch.dtype, qk_dim: int, v_dim: int, queries: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns q [s, 1, n, d], k [s, 1, 1, d], v [s, 1, 1, v]. All values are one, and so is each mean of them."""
    q = torch.full((_TOKENS, 1, queries, qk_dim), 0.5, device=device, dtype=dtype)
    k = torch.full((_TOKENS, 1, 1, qk_dim), 0.5, device=device, dtype=dtype)
    return q, k, torch.ones((_TOKENS, 1, 1, v_dim), device=device, dtype=dtype)


def _check(out: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, queries: int, *, exact: bool) -> None:
    """Checks the results for an upstream gradient of ones. `exact`: without dropout, when outputs are one, equal scores
    have no gradient, and the probabilities of a query, which sum to one, become the gradient of the values.
    """
    results = [x.float() for x in (out, dq, dk, dv.sum(0, dtype=torch.float32) / (_TOKENS * queries))]
    if any(bool(x.isfinite().logical_not().any()) for x in results):
        raise RuntimeError("its results are not finite")
    pairs = zip(results, (1, 0, 0, 1), strict=True)
    if exact and any(bool((x - expected).abs().max() > _TOLERANCE) for x, expected in pairs):
        raise RuntimeError("its results are wrong")
