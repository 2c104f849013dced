"""Attention of whole sequences by a kernel of blocks, and by the one in plain torch, some queries at a time: for scores
and sinks that no fused kernel of whole sequences computes.

It keeps for its backward what fused kernels keep: its arguments, the output, and one number per query and head. In plain
torch the probabilities are computed again in backward, and are never all there at once (see `attention_lse.by_rows`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron.kernels.ops.attention_lse import BlockKernel, by_rows
from megatron.kernels.ops.attention_rule import Drop, Rule, draw_seed
from megatron.kernels.ops.attention_scores import Scores
from megatron.kernels.ops.attention_segments import Segments, ids_of
from megatron.kernels.ops.attention_sinks import add_sinks_, gradient_of_sinks


def of_blocks(kernel: BlockKernel) -> Callable[..., Tensor]:
    """Returns the AttentionKernel that computes a sequence as one block. Dropout, if `kernel` has it, takes its seed
    from the current generator."""

    def attention(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scores: Scores,
        segments: Segments | None,
        window: int | None,
        dropout: float,
    ) -> Tensor:
        k, v, ids = within_window(len(q), k, v, ids_of(segments), window)
        seed = draw_seed(dropout, q.device)
        out: Tensor = _Attend.apply(q, k, v, scores.sinks, kernel, scores.of_keys, ids, window, dropout, seed)
        return out.flatten(2)

    return attention


attention = of_blocks(by_rows)


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
    """q [s, b, n, d]; k [t, b, g, d]; v [t, b, g, v]; sinks [n] -> [s, b, n, v]."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        kernel: BlockKernel,
        scores: Scores,
        ids: Tensor | None,
        window: int | None,
        dropout: float,
        seed: Tensor | None,
    ) -> Tensor:
        out, lse = kernel.forward(q, k, v, _rule(len(q), len(k), scores, ids, window, dropout, seed))
        if sinks is not None:
            out = out.to(lse.dtype)
            add_sinks_(out, lse, sinks)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, sinks, out, lse, ids, seed)
        ctx.kernel, ctx.scores, ctx.window, ctx.dropout = kernel, scores, window, dropout
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, lse, ids, seed = ctx.saved_tensors
        of_sinks = gradient_of_sinks(grad, out, lse, sinks) if ctx.needs_input_grad[3] else None
        rule = _rule(len(q), len(k), ctx.scores, ids, ctx.window, ctx.dropout, seed)
        gradients = ctx.kernel.backward(grad, q, k, v, out, lse, rule)
        dq, dk, dv = (gradient.to(q.dtype) for gradient in gradients)
        return dq, dk, dv, of_sinks, None, None, None, None, None, None


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
        if s == 1 and (window is None or t <= window):
            return Rule(scores, segments=segments)  # a single query sees every key of its document
        return Rule(scores, t - s, window, segments)
    places = torch.arange(t, dtype=torch.int32, device=seed.device)
    return Rule(scores, t - s, window, segments, Drop(dropout, seed, places[-s:], places))
