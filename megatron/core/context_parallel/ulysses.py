"""a2a: an all-to-all turns a part of the sequence with all heads into all of the sequence with a part of the heads.

DeepSpeed-Ulysses (Jacobs et al., arXiv 2309.14509). Any attention kernel then works on whole sequences, dropout
included. Let Q = s / size * b * n * d * itemsize be the bytes of a rank's queries, and M those of its keys and values,
s / size * b * max(g, size) * (d + v) * itemsize, and O those of its output. A rank sends, per layer:
  forward: (size - 1) / size * (Q + M + O), in two messages: queries, keys and values; the output.
  backward: the same.
Kept for the backward: the tensors that the kernel keeps, of n / size heads and all tokens: as many bytes as without
context parallelism on 1 / size of the tokens.

`attention` may itself be sharded over other ranks: a2a+p2p is this with a `RingAttention` between groups of neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron.config.context_parallel import copies_of_keys
from megatron.core.comm.all_to_all import all_to_all_async
from megatron.core.context_parallel import layout
from megatron.core.context_parallel.transfer_trace import UNTRACED, Trace
from megatron.core.groups import Group
from megatron.kernels.ops.attention import AttentionKernel
from megatron.kernels.ops.attention_scores import Scores
from megatron.kernels.ops.attention_segments import Segments


class UlyssesAttention:
    """An `AttentionKernel` for this rank's part of the sequence, in the balanced layout of `group`.

    `attention` gets queries [s, b, n / size, d], s being the tokens of `group` in natural order.
    """

    def __init__(self, group: Group, attention: AttentionKernel, trace: Trace = UNTRACED) -> None:
        self._group, self._attention, self._trace = group, attention, trace

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
        """q [s / size, b, n, d]; k [.., g, d]; v [.., g, v] -> [s / size, b, n * v]. segments: of the whole sequence.

        Raises ConfigError when the heads cannot be shared out. Dropout draws from the current generator, which has to
        differ between ranks as between the shards of a tensor-parallel layer.
        """
        size, heads_of_rank = self._group.size, q.shape[2] // self._group.size
        scores = scores.of_heads(slice(self._group.rank * heads_of_rank, (self._group.rank + 1) * heads_of_rank))
        copies = copies_of_keys(q.shape[2], k.shape[2], size)
        q, k, v = to_heads([q, _repeated(k, copies), _repeated(v, copies)], self._group, self._trace)
        out = self._attention(q, k, v, scores=scores, segments=segments, window=window, dropout=dropout)
        return to_sequence(out, self._group, self._trace)


def to_heads(tensors: Sequence[Tensor], group: Group, trace: Trace) -> list[Tensor]:
    """[s / size, b, heads, d] of this rank's tokens in the balanced layout -> [s, b, heads / size, d] of all tokens in
    natural order, for each of the tensors. Forward and backward: an all-to-all, one message for all tensors."""
    # A rank's share of all in one message: [size, s / size, b, sum of heads * d / size].
    parts = [_by_rank(x, group.size) for x in tensors]
    heads: Tensor = _ToHeads.apply(torch.cat(parts, dim=3), group, trace)
    shares = heads.split([x.shape[3] for x in parts], dim=2)
    return [share.unflatten(2, (-1, x.shape[3])) for share, x in zip(shares, tensors, strict=True)]


def to_sequence(x: Tensor, group: Group, trace: Trace) -> Tensor:
    """The inverse of `to_heads`, of channels [s, b, c / size] -> [s / size, b, c]."""
    sequence: Tensor = _ToSequence.apply(x, group, trace)
    return sequence.permute(1, 2, 0, 3).flatten(2)


def _by_rank(x: Tensor, size: int) -> Tensor:
    """[s, b, heads, d] -> [size, s, b, heads / size * d], a view."""
    return x.flatten(2).unflatten(2, (size, -1)).permute(2, 0, 1, 3)


def _repeated(x: Tensor, copies: int) -> Tensor:
    """[s, b, g, d] -> [s, b, g * copies, d]; the gradient of the copies is summed."""
    return x if copies == 1 else x.unsqueeze(3).expand(-1, -1, -1, copies, -1).flatten(2, 3)


class _ToHeads(torch.autograd.Function):
    """[size, s / size, b, width] -> [s, b, width]. Forward and backward: an all-to-all."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, trace: Trace) -> Tensor:
        ctx.group, ctx.trace = group, trace
        return _to_heads(x, group, trace)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _to_sequence(grad, ctx.group, ctx.trace), None, None


class _ToSequence(torch.autograd.Function):
    """[s, b, width] -> [size, s / size, b, width]. Forward and backward: an all-to-all."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, trace: Trace) -> Tensor:
        ctx.group, ctx.trace = group, trace
        return _to_sequence(x, group, trace)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _to_heads(grad, ctx.group, ctx.trace), None, None


def _to_heads(x: Tensor, group: Group, trace: Trace) -> Tensor:
    return layout.to_natural_order(_exchanged(x, group, trace).flatten(0, 1), 0, group.size)


def _to_sequence(x: Tensor, group: Group, trace: Trace) -> Tensor:
    return _exchanged(layout.to_rank_order(x, 0, group.size).unflatten(0, (group.size, -1)), group, trace)


def _exchanged(x: Tensor, group: Group, trace: Trace) -> Tensor:
    received, handle = trace("tokens for heads", lambda: all_to_all_async(x, group))
    handle.wait()
    return received
