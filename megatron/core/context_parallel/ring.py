"""p2p: keys and values are sent round a ring of ranks while each attends those it holds (Liu et al., arXiv 2310.01889).

Balanced layout, so every rank has the same work at every step. Let M be the bytes of a rank's keys and values,
s / size * b * g * (d + v) * itemsize. A rank sends, per layer:
  forward: (size - 1) * M, in size - 1 messages.
  backward: 2 * (size - 1) * M: keys and values again, and as much of their gradients.
Kept for the backward: q, this rank's keys and values, the output, and its log-sum-exp. Two more M are in flight.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron.core.comm.collectives import Handle
from megatron.core.comm.p2p import shift_async
from megatron.core.context_parallel.block_plan import Block, own_in_two, ring_blocks
from megatron.core.context_parallel.blocks import (
    Attention,
    Gradient,
    PairShape,
    blocks_of,
    joined,
    rule_of_all,
    rule_of_rank,
    zeros_like,
)
from megatron.core.context_parallel.transfer_trace import UNTRACED, Trace
from megatron.core.groups import Group
from megatron.kernels.ops.attention_lse import BlockKernel
from megatron.kernels.ops.attention_rule import Rule, draw_seed
from megatron.kernels.ops.attention_scores import Scores
from megatron.kernels.ops.attention_segments import Segments

_KEYS, _GRADIENTS = 1, 2  # tags of messages in flight at the same time
_NAMES = {_KEYS: "keys and values", _GRADIENTS: "their gradient"}


class RingAttention:
    """An `AttentionKernel` for this rank's part of the sequence, in the balanced layout of `group`."""

    def __init__(self, group: Group, kernel: BlockKernel, trace: Trace = UNTRACED) -> None:
        self.group, self.kernel, self._trace = group, kernel, trace

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

        Dropout takes its seed from the current generator.
        """
        seed = draw_seed(dropout, q.device)
        out: Tensor = _Ring.apply(q, k, v, scores.sinks, self, scores.of_keys, segments, window, dropout, seed)
        return out.flatten(2)

    def shift(self, tensor: Tensor, tag: int) -> tuple[Tensor, Handle]:
        """Start to send `tensor` to the next rank, and to receive that of the rank before."""
        return self._trace(_NAMES[tag], lambda: shift_async(tensor, self.group, tag))

    def steps(
        self, length: int, rule: Rule, window: int | None, segments: Segments | None
    ) -> list[tuple[list[Block], Rule]]:
        """(blocks, their rule) of each step, for `length` tokens per rank; `rule` and `segments` are those of the
        sequence. At step i the keys of rank - i are here."""
        rank, size = self.group.rank, self.group.size
        assert length % 2 == 0, f"a rank's part has two equal chunks, got {length} tokens"
        steps = []
        for step in range(size):
            source = (rank - step) % size
            blocks = ring_blocks(rank, source, size, length // 2, window)
            blocks = blocks_of(blocks, segments, rank, source, size, length)
            steps.append((blocks, rule_of_rank(rule, rank, source, size)))
        return steps


class _Ring(torch.autograd.Function):
    """One node for the whole ring: no tape of its blocks."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        ring: RingAttention,
        scores: Scores,
        segments: Segments | None,
        window: int | None,
        dropout: float,
        seed: Tensor | None,
    ) -> Tensor:
        kv, shape = joined(k, v), PairShape.of(k, v)
        attention, current = Attention(ring.kernel, q, shape), kv
        steps = ring.steps(len(q), rule_of_all(scores, dropout, seed, len(q) * ring.group.size), window, segments)
        for step, (blocks, rule) in enumerate(steps, start=1):
            # Posted before the attention of this step, waited for after it.
            coming = ring.shift(current, _KEYS) if step < len(steps) else None
            attention.add(current, blocks, rule)
            if coming is not None:
                current, coming = _arrived(coming), None  # what was sent is freed before the next message is received
        attention.add_sinks(sinks)
        out = attention.out.to(q.dtype)
        ctx.save_for_backward(q, kv, sinks, out, attention.lse, seed)
        ctx.ring, ctx.scores, ctx.segments, ctx.window, ctx.dropout = ring, scores, segments, window, dropout
        ctx.shape = shape
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of keys and values follow them, one step behind: they are sent on while the next keys are attended.

        The gradient of this rank's keys is not sent: half of it is computed during the first message, half during the
        last.
        """
        q, kv, sinks, out, lse, seed = ctx.saved_tensors
        ring: RingAttention = ctx.ring
        gradient, current = Gradient(ring.kernel, grad.contiguous(), q, out, lse, ctx.shape), kv
        of_sinks = gradient.of_sinks(sinks)
        local, late = zeros_like(kv), None
        whole = rule_of_all(ctx.scores, ctx.dropout, seed, len(q) * ring.group.size)
        (_, local_rule), *steps = ring.steps(len(q), whole, ctx.window, ctx.segments)
        rank, size = ring.group.rank, ring.group.size
        first, last = (
            blocks_of(blocks, ctx.segments, rank, rank, size, len(q))
            for blocks in own_in_two(rank, size, len(q) // 2, ctx.window)
        )
        coming = ring.shift(current, _KEYS) if steps else None
        gradient.add(kv, local, first, local_rule)
        for left, (blocks, rule) in zip(reversed(range(len(steps))), steps, strict=True):
            assert coming is not None
            current, coming = _arrived(coming), None
            if left:
                coming = ring.shift(current, _KEYS)
            dkv = zeros_like(kv)
            gradient.add(current, dkv, blocks, rule)
            if late is not None:  # the sum of the ranks before this one, for these keys
                dkv += _arrived(late)
                late = None
            late = ring.shift(dkv.to(kv.dtype), _GRADIENTS)
        gradient.add(kv, local, last, local_rule)
        if late is not None:
            local += _arrived(late)
        dk, dv = ctx.shape.apart(local.to(kv.dtype))
        return gradient.dq.to(q.dtype), dk, dv, of_sinks, None, None, None, None, None, None


def _arrived(coming: tuple[Tensor, Handle]) -> Tensor:
    tensor, handle = coming
    handle.wait()
    return tensor
