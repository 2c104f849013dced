"""Attention between its projections, run again in backward (core_attn of --recompute-modules).

Queries, keys and values are kept; output, log-sum-exp, or without a fused kernel the probabilities, are not.
Korthikanti et al., arXiv 2205.05198, section 5: it frees many bytes for little work. The output projection keeps the
output for its own gradient.
"""

from __future__ import annotations

import contextlib

from torch import Tensor

from megatron.core.recompute.rerun import checkpoint
from megatron.core.tensor_parallel.random import RngTracker
from megatron.kernels.ops.attention import AttentionKernel
from megatron.kernels.ops.attention_scores import Scores
from megatron.kernels.ops.attention_segments import Segments


class RecomputedAttention:
    """An AttentionKernel that computes what `kernel` computes, twice."""

    def __init__(self, kernel: AttentionKernel, rng: RngTracker) -> None:
        self._kernel, self._rng = kernel, rng

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scores: Scores,
        segments: Segments | None,
        window: int | None,
        dropout: float,
    ) -> Tensor:
        """See AttentionKernel."""
        kernel, rng = self._kernel, self._rng

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return kernel(q, k, v, scores=scores, segments=segments, window=window, dropout=dropout)

        def again(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            # The layer calls from within this stream, which a second run has to enter by itself.
            with rng.stream("sharded") if dropout else contextlib.nullcontext():
                return attend(q, k, v)

        return checkpoint(attend, [q, k, v], rng, again=again)
