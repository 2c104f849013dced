"""Attention between its projections, run again in backward (core_attn of --recompute-modules).

Queries, keys and values are kept; output, log-sum-exp, or without a fused kernel the probabilities, are not. Korthikanti et
al., arXiv 2205.05198, section 5: many bytes for little work. The output projection keeps the output for its own gradient.
"""

from __future__ import annotations

import contextlib
import functools

from torch import Tensor

from megatron.core.context_parallel.steps import Keys, LayerAttention
from megatron.core.memory.checkpoint import checkpoint
from megatron.core.tensor_parallel.random import RngTracker


class RecomputedAttention:
    """A LayerAttention that does what `attention` does, twice."""

    def __init__(self, attention: LayerAttention, rng: RngTracker) -> None:
        self._attention, self._rng = attention, rng

    def start(self, k: Tensor, v: Tensor) -> Keys:
        """See LayerAttention."""
        return _Recomputed(self._attention, self._rng, k, v)


class _Recomputed:
    def __init__(self, attention: LayerAttention, rng: RngTracker, k: Tensor, v: Tensor) -> None:
        self._attention, self._rng, self._k, self._v = attention, rng, k, v
        self._keys = attention.start(k, v)

    def attend(self, q: Tensor, *, segments: Tensor | None, window: int | None, dropout: float) -> Tensor:
        once = functools.partial(_attend, segments=segments, window=window, dropout=dropout)
        started = [self._keys]
        attention, rng = self._attention, self._rng  # the region must not hold keys and values, which may move

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if started:
                return once(started.pop(), q)
            # The layer calls from within this stream, which a second run has to enter by itself.
            with rng.stream("sharded") if dropout else contextlib.nullcontext():
                return once(attention.start(k, v), q)

        return checkpoint(attend, [q, self._k, self._v], rng)

    def gather_early(self, x: Tensor) -> Tensor:
        return self._keys.gather_early(x)


def _attend(keys: Keys, q: Tensor, *, segments: Tensor | None, window: int | None, dropout: float) -> Tensor:
    return keys.attend(q, segments=segments, window=window, dropout=dropout)
