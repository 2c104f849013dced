"""all_gather: every rank gathers all keys and values and attends its own two chunks to all keys before them.

After Megatron-Kwai's balanced context parallelism (Yuan et al., USENIX ATC 2024). Let M be the bytes of a rank's keys
and values, s / size * b * g * (d + v) * itemsize. A rank sends, per layer:
  forward: (size - 1) * M, an all-gather.
  backward: 2 * (size - 1) * M: the all-gather again, and a reduce-scatter of the gradients.
Kept for the backward: q, this rank's keys and values, the output, and its log-sum-exp. All keys and values, size * M,
are held during the attention only; while they are put into the sequence's order, twice.

[Note: overlap of the gathers]
1 / size of a rank's attention is between its own queries and its own keys, for which nothing is communicated.
  forward: `prefetch` starts the gather as soon as keys and values are there; it is overlapped with the norm and
    rotation of the queries and with the attention to the own keys, then the other keys are attended.
  backward: `gather_early` marks a place later in the forward, which the backward comes to earlier: at the end of a
    layer, the gather is overlapped with the gradients of the MLP and of the output projection, as in Megatron-Kwai.
    The other keys come first here, and the reduction of their gradients starts. It is overlapped with the own keys'
    part and with the gradients of rotation and norm of the queries; the gradient of `prefetch` waits for it.
"""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.core.comm.collectives import Handle, all_gather_async, reduce_scatter_async
from megatron.core.context_parallel import layout
from megatron.core.context_parallel.block_plan import Block, other_blocks, own_blocks
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

_Part = tuple[list[Block], Rule]  # blocks to attend, and the rule of all of their queries and keys


class AllGatherAttention:
    """An `AttentionKernel` for this rank's part of the sequence, in the balanced layout of `group`.

    A layer may also start the gathers early: `prefetch` before the call, `gather_early` after it. Both belong to one
    call, in the same forward of the layer.
    """

    def __init__(self, group: Group, kernel: BlockKernel, trace: Trace = UNTRACED) -> None:
        self._group, self._kernel, self._trace = group, kernel, trace
        self._prefetched: _Gathering | None = None  # for the next call
        # By the last call, for `gather_early`; of each thread, because the layer may run twice in turns: as a forward,
        # and again in another microbatch's backward.
        self._attended: dict[int, _Gathering | None] = {}

    def prefetch(self, k: Tensor, v: Tensor) -> None:
        """Start to gather k [s / size, b, g, d] and v [.., g, v] for the next call, which must be given the same
        two."""
        self._prefetched = self._start(k, v)

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
        gathering, self._prefetched = self._prefetched, None
        self._attended[threading.get_ident()] = gathering
        exchange, kv = gathering or self._start(k, v)
        seed = draw_seed(dropout, q.device)
        shape, of_keys = PairShape.of(k, v), scores.of_keys
        out: Tensor = _Attend.apply(q, kv, scores.sinks, shape, exchange, of_keys, segments, window, dropout, seed)
        return out.flatten(2)

    def gather_early(self, x: Tensor) -> Tensor:
        """x itself; where the backward comes to it, the gather of the last call's backward starts. See the note
        above."""
        gathering = self._attended.pop(threading.get_ident(), None)
        if gathering is None or not gathering.kv.requires_grad:
            return x
        marked: Tensor = _GatherEarly.apply(x, gathering.kv.detach(), gathering.exchange)
        return marked

    def _start(self, k: Tensor, v: Tensor) -> _Gathering:
        exchange = _Exchange(self._group, self._kernel, self._trace)
        return _Gathering(exchange, _Start.apply(k, v, exchange))


class _Gathering(NamedTuple):
    """The keys and values of one forward, whose gather has started."""

    exchange: _Exchange
    kv: Tensor  # this rank's, [s / size, b, g (d + v)]


class _Exchange:
    """The collectives of one forward and its backward, each started early and waited for late."""

    def __init__(self, group: Group, kernel: BlockKernel, trace: Trace) -> None:
        self.group, self.kernel, self._trace = group, kernel, trace
        self._gather: tuple[Tensor, Handle] | None = None
        self._reduction: tuple[Tensor, Handle] | None = None

    def gather(self, kv: Tensor) -> None:
        """Start to gather every rank's [s, b, g (d + v)], unless that was done."""
        if self._gather is None:
            self._gather = self._trace("all-gather of keys and values", lambda: all_gather_async(kv, self.group))

    def take_gathered(self) -> Tensor:
        """All ranks' keys and values in natural order, [size * s, b, g (d + v)]."""
        assert self._gather is not None
        (gathered, handle), self._gather = self._gather, None
        handle.wait()
        return layout.to_natural_order(gathered, 0, self.group.size)

    def reduce(self, dkv: Tensor) -> None:
        """Start to sum the gradient of all keys and values, [size * s, b, g (d + v)]."""
        pieces = layout.to_rank_order(dkv, 0, self.group.size)
        self._reduction = self._trace(
            "reduce-scatter of their gradient", lambda: reduce_scatter_async(pieces, self.group)
        )

    def take_reduced(self) -> Tensor:
        """This rank's part of the sum, [s, b, g (d + v)]."""
        assert self._reduction is not None
        (total, handle), self._reduction = self._reduction, None
        handle.wait()
        return total

    def parts(self, length: int, rule: Rule, window: int | None, segments: Segments | None) -> tuple[_Part, _Part]:
        """The blocks of its own keys that `length` queries of this rank attend, and those of all others. `rule`,
        `segments`: of the whole sequence."""
        rank, size = self.group.rank, self.group.size
        local_blocks, remote_blocks = (plan(rank, size, length // 2, window) for plan in (own_blocks, other_blocks))
        local_blocks = blocks_of(local_blocks, segments, rank, rank, size, length)
        remote_blocks = blocks_of(remote_blocks, segments, rank, None, size, length)
        return (local_blocks, rule_of_rank(rule, rank, rank, size)), (
            remote_blocks,
            rule_of_rank(rule, rank, None, size),
        )


class _Start(torch.autograd.Function):
    """k [s, b, g, d], v [s, b, g, v] -> [s, b, g (d + v)], whose gather starts. Backward: adds the gradients of other
    ranks' queries."""

    @staticmethod
    def forward(ctx: Any, k: Tensor, v: Tensor, exchange: _Exchange) -> Tensor:
        ctx.exchange, ctx.shape = exchange, PairShape.of(k, v)
        kv = joined(k, v)
        exchange.gather(kv)
        return kv

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, local: Tensor) -> tuple[Tensor, Tensor, None]:
        wide = torch.promote_types(local.dtype, torch.float32)
        dk, dv = ctx.shape.apart((local.to(wide) + ctx.exchange.take_reduced()).to(local.dtype))
        return dk, dv, None


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        kv: Tensor,
        sinks: Tensor | None,
        shape: PairShape,
        exchange: _Exchange,
        scores: Scores,
        segments: Segments | None,
        window: int | None,
        dropout: float,
        seed: Tensor | None,
    ) -> Tensor:
        whole = rule_of_all(scores, dropout, seed, len(q) * exchange.group.size)
        local, remote = exchange.parts(len(q), whole, window, segments)
        exchange.gather(kv)  # under way since `_Start`, unless this is done again by a recomputation
        attention = Attention(exchange.kernel, q, shape)
        attention.add(kv, *local)
        attention.add(exchange.take_gathered(), *remote)
        attention.add_sinks(sinks)
        out = attention.out.to(q.dtype)
        ctx.save_for_backward(q, kv, sinks, out, attention.lse, seed)
        ctx.exchange, ctx.scores, ctx.segments, ctx.window, ctx.dropout = exchange, scores, segments, window, dropout
        ctx.shape = shape
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, kv, sinks, out, lse, seed = ctx.saved_tensors
        exchange: _Exchange = ctx.exchange
        whole = rule_of_all(ctx.scores, ctx.dropout, seed, len(q) * exchange.group.size)
        local, remote = exchange.parts(len(q), whole, ctx.window, ctx.segments)
        gradient = Gradient(exchange.kernel, grad.contiguous(), q, out, lse, ctx.shape)
        of_sinks = gradient.of_sinks(sinks)
        exchange.gather(kv)
        full = exchange.take_gathered()
        dfull = zeros_like(full)
        gradient.add(full, dfull, *remote)
        del full
        if ctx.needs_input_grad[1]:
            exchange.reduce(dfull.to(kv.dtype))
        del dfull
        dkv = zeros_like(kv)
        gradient.add(kv, dkv, *local)
        return gradient.dq.to(q.dtype), dkv.to(kv.dtype), of_sinks, None, None, None, None, None, None, None


class _GatherEarly(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, kv: Tensor, exchange: _Exchange) -> Tensor:
        ctx.save_for_backward(kv)  # saved as the attention saves it, so that offload of saved tensors sees both
        ctx.exchange = exchange
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (kv,) = ctx.saved_tensors
        ctx.exchange.gather(kv)
        return grad, None, None
