"""Attention in plain torch, some queries at a time: for scores that no fused kernel computes.

It keeps for its backward what fused kernels keep: its arguments, the output, and one number per query and head. The
probabilities are computed again in backward, and are never all there at once (see `attention_lse.by_rows`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron.kernels.ops.attention_lse import by_rows
from megatron.kernels.ops.attention_rule import Drop, Rule, draw_seed
from megatron.kernels.ops.attention_scores import Scores
from megatron.kernels.ops.attention_segments import Segments, ids_of


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, scores: Scores, segments: Segments | None, window: int | None, dropout: float
) -> Tensor:
    """See AttentionKernel. Dropout takes its seed from the current generator."""
    k, v, ids = within_window(len(q), k, v, ids_of(segments), window)
    out: Tensor = _Attend.apply(q, k, v, scores, ids, window, dropout, draw_seed(dropout, q.device))
    return out.flatten(2)


def within_window(
    s: int, k: Tensor, v: Tensor, ids: Tensor | None, window: int | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns keys, values and their ids without the oldest ones of a long cache, which none of the last s queries
    sees."""
    if window is None:
        return k, v, ids
    reach = window + s - 1
    return k[-reach:], v[-reach:], None if ids is None else ids[:, -reach:]


class _Attend(torch.autograd.Function):
    """q [s, b, n, d]; k, v [t, b, g, d] -> [s, b, n, d]."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scores: Scores,
        ids: Tensor | None,
        window: int | None,
        dropout: float,
        seed: Tensor | None,
    ) -> Tensor:
        wide, lse = by_rows.forward(q, k, v, _rule(len(q), len(k), scores, ids, window, dropout, seed))
        out = wide.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse, ids, seed)
        ctx.scores, ctx.window, ctx.dropout = scores, window, dropout
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, ids, seed = ctx.saved_tensors
        rule = _rule(len(q), len(k), ctx.scores, ids, ctx.window, ctx.dropout, seed)
        gradients = by_rows.backward(grad, q, k, v, out, lse, rule)
        dq, dk, dv = (gradient.to(q.dtype) for gradient in gradients)
        return dq, dk, dv, None, None, None, None, None


def _rule(
    s: int,
    t: int,
    scores: Scores,
    ids: Tensor | None,
    window: int | None,
    dropout: float,
    seed: Tensor | None,
) -> Rule:
    """The rule of the last s of t positions."""
    segments = None if ids is None else (ids[:, -s:], ids)
    if seed is None:
        return Rule(scores, t - s, window, segments)
    places = torch.arange(t, dtype=torch.int32, device=seed.device)
    return Rule(scores, t - s, window, segments, Drop(dropout, seed, places[-s:], places))
