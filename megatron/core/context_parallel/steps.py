"""Attention in two steps, so that what a layer does between them runs beside communication.

keys = attention.start(k, v)
...  # norm and rotation of the queries
out = keys.attend(q, ...)
...  # output projection, MLP
x = keys.gather_early(x)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from megatron.core.context_parallel.all_gather import AllGatherAttention
from megatron.kernels.ops.attention import AttentionKernel


class Keys(Protocol):
    """Keys and values of one forward: here, or on their way."""

    def attend(self, q: Tensor, *, segments: Tensor | None, window: int | None, dropout: float) -> Tensor:
        """As an `AttentionKernel` with the k and v that were given to `start`."""
        ...

    def gather_early(self, x: Tensor) -> Tensor:
        """x itself; where the backward comes to it, what `attend` will need in its own begins to travel."""
        ...


class LayerAttention(Protocol):
    """What a layer attends with."""

    def start(self, k: Tensor, v: Tensor) -> Keys:
        """k, v [s, b, g, d], of this rank. Must be followed by one `attend`."""
        ...


class InOne:
    """A kernel, or what communicates inside `attend` alone, as a `LayerAttention`."""

    def __init__(self, kernel: AttentionKernel) -> None:
        self.kernel = kernel

    def start(self, k: Tensor, v: Tensor) -> Keys:
        """See LayerAttention."""
        return _Here(self.kernel, k, v)


@dataclass(frozen=True)
class _Here:
    kernel: AttentionKernel
    k: Tensor
    v: Tensor

    def attend(self, q: Tensor, *, segments: Tensor | None, window: int | None, dropout: float) -> Tensor:
        return self.kernel(q, self.k, self.v, segments=segments, window=window, dropout=dropout)

    def gather_early(self, x: Tensor) -> Tensor:
        return x


class InTwo:
    """AllGatherAttention as a `LayerAttention`."""

    def __init__(self, attention: AllGatherAttention) -> None:
        self._attention = attention

    def start(self, k: Tensor, v: Tensor) -> Keys:
        """See LayerAttention."""
        self._attention.prefetch(k, v)
        return _Prefetched(self._attention, k, v)


@dataclass(frozen=True)
class _Prefetched:
    attention: AllGatherAttention
    k: Tensor
    v: Tensor

    def attend(self, q: Tensor, *, segments: Tensor | None, window: int | None, dropout: float) -> Tensor:
        return self.attention(q, self.k, self.v, segments=segments, window=window, dropout=dropout)

    def gather_early(self, x: Tensor) -> Tensor:
        return self.attention.gather_early(x)
