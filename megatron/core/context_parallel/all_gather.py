"""all_gather: every rank gathers all keys and values and attends its own two chunks to what comes before them.

After Megatron-Kwai's balanced context parallelism (Yuan et al., USENIX ATC 2024). Let M be the bytes of a rank's keys
and values, 2 * s / size * b * g * d * itemsize. A rank sends, a layer:
  forward: (size - 1) * M, an all-gather.
  backward: 2 * (size - 1) * M: the all-gather again, and a reduce-scatter of the gradients.
Kept for the backward: q, this rank's keys and values, the output, and its log-sum-exp. All keys and values, size * M, are
there during the attention only; while they are put into the sequence's order, twice.

[Note: what runs beside it]
1 / size of a rank's attention is of its own queries to its own keys, for which nothing is communicated.
  forward: `start` begins the gather as soon as keys and values are there; the norm and rotation of the queries and
    the attention to the own keys run beside it, then the other keys are attended.
  backward: `gather_early` marks a place later in the forward whose gradient comes earlier in the backward: put behind a
    layer's MLP, the gather runs beside the gradients of the MLP and of the output projection, as in Megatron-Kwai.
    The other keys come first here, and their gradients leave. The own keys' part and the gradients of rotation and norm
    of the queries run beside that; the gradient of `start` waits for it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron.core.comm.collectives import Handle, all_gather_async, reduce_scatter_async
from megatron.core.context_parallel import layout
from megatron.core.context_parallel.blocks import Attention, Gradient, draw_seed, rule_of_all, rule_of_rank, zeros_like
from megatron.core.context_parallel.plan import Block, other_blocks, own_blocks
from megatron.core.context_parallel.watch import UNWATCHED, Watch
from megatron.core.groups import Group
from megatron.kernels.ops.attention_lse import BlockKernel
from megatron.kernels.ops.attention_rule import Rule

_Part = tuple[list[Block], Rule]  # blocks to attend, and what holds for all of their queries and keys


class AllGatherAttention:
    """A `LayerAttention` (see steps.py) for this rank's part of the sequence, in the balanced layout of `group`."""

    def __init__(self, group: Group, kernel: BlockKernel, watch: Watch = UNWATCHED) -> None:
        self._group, self._kernel, self._watch = group, kernel, watch

    def start(self, k: Tensor, v: Tensor) -> GatheredKeys:
        """Begin to gather k, v [s / size, b, g, d]. Must be followed by one `attend`."""
        exchange = _Exchange(self._group, self._kernel, self._watch)
        return GatheredKeys(exchange, _Start.apply(k, v, exchange))


class GatheredKeys:
    """The keys and values of one forward on their way: see `Keys`."""

    def __init__(self, exchange: _Exchange, kv: Tensor) -> None:
        """kv: this rank's, [2, s / size, b, g, d]."""
        self._exchange, self._kv = exchange, kv

    def attend(self, q: Tensor, *, segments: Tensor | None, window: int | None, dropout: float) -> Tensor:
        """q [s / size, b, n, d] -> [s / size, b, n * d]. segments: [b, s], of the whole sequence.

        Dropout takes its seed from the current generator.
        """
        seed = draw_seed(dropout, q.device)
        out: Tensor = _Attend.apply(q, self._kv, self._exchange, segments, window, dropout, seed)
        return out.flatten(2)

    def gather_early(self, x: Tensor) -> Tensor:
        """x itself; where the backward comes to it, the gather of that `attend` begins. See the note above."""
        if not self._kv.requires_grad:
            return x
        marked: Tensor = _GatherEarly.apply(x, self._kv.detach(), self._exchange)
        return marked


class _Exchange:
    """The collectives of one forward and its backward, each begun early and waited for late."""

    def __init__(self, group: Group, kernel: BlockKernel, watch: Watch) -> None:
        self.group, self.kernel, self._watch = group, kernel, watch
        self._gather: tuple[Tensor, Handle] | None = None
        self._reduction: tuple[Tensor, Handle] | None = None

    def gather(self, kv: Tensor) -> None:
        """Begin to gather every rank's [2, s, b, g, d], unless that was done."""
        if self._gather is None:
            self._gather = self._watch("all-gather of keys and values", lambda: all_gather_async(kv, self.group))

    def take_gathered(self) -> Tensor:
        """All ranks' keys and values in natural order, [2, size * s, b, g, d]."""
        assert self._gather is not None
        (gathered, handle), self._gather = self._gather, None
        handle.wait()
        size = self.group.size
        chunks = gathered.unflatten(0, (size, 2)).unflatten(2, (2, -1))  # [size, 2 (k, v), 2, s / 2, b, g, d]
        return torch.cat([chunks[rank, :, half] for rank, half in layout.owners(size)], dim=1)

    def reduce(self, dkv: Tensor) -> None:
        """Begin to sum the gradient of all keys and values, [2, size * s, b, g, d]."""
        pieces = _by_rank(dkv, self.group.size)
        self._reduction = self._watch(
            "reduce-scatter of their gradient", lambda: reduce_scatter_async(pieces, self.group)
        )

    def take_reduced(self) -> Tensor:
        """This rank's part of the sum, [2, s, b, g, d]."""
        assert self._reduction is not None
        (total, handle), self._reduction = self._reduction, None
        handle.wait()
        return total

    def parts(self, length: int, rule: Rule, window: int | None) -> tuple[_Part, _Part]:
        """What `length` queries of this rank attend of its own keys, and of all others. `rule`: of the sequence."""
        rank, size = self.group.rank, self.group.size
        own, others = (plan(rank, size, length // 2, window) for plan in (own_blocks, other_blocks))
        return (own, rule_of_rank(rule, rank, rank, size)), (others, rule_of_rank(rule, rank, None, size))


class _Start(torch.autograd.Function):
    """k, v [s, b, g, d] -> [2, s, b, g, d], whose gather begins. Backward: adds what the other ranks' queries give."""

    @staticmethod
    def forward(ctx: Any, k: Tensor, v: Tensor, exchange: _Exchange) -> Tensor:
        ctx.exchange = exchange
        kv = torch.stack((k, v))
        exchange.gather(kv)
        return kv

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, own: Tensor) -> tuple[Tensor, Tensor, None]:
        wide = torch.promote_types(own.dtype, torch.float32)
        dk, dv = (own.to(wide) + ctx.exchange.take_reduced()).to(own.dtype).unbind()
        return dk, dv, None


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        kv: Tensor,
        exchange: _Exchange,
        segments: Tensor | None,
        window: int | None,
        dropout: float,
        seed: Tensor | None,
    ) -> Tensor:
        whole = rule_of_all(segments, dropout, seed, len(q) * exchange.group.size)
        own, others = exchange.parts(len(q), whole, window)
        exchange.gather(kv)  # under way since `_Start`, unless this is done again by a recomputation
        attention = Attention(exchange.kernel, q)
        attention.add(kv, *own)
        attention.add(exchange.take_gathered(), *others)
        out = attention.out.to(q.dtype)
        ctx.save_for_backward(q, kv, out, attention.lse, segments, seed)
        ctx.exchange, ctx.window, ctx.dropout = exchange, window, dropout
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, kv, out, lse, segments, seed = ctx.saved_tensors
        exchange: _Exchange = ctx.exchange
        whole = rule_of_all(segments, ctx.dropout, seed, len(q) * exchange.group.size)
        own, others = exchange.parts(len(q), whole, ctx.window)
        gradient = Gradient(exchange.kernel, grad.contiguous(), q, out, lse)
        exchange.gather(kv)
        full = exchange.take_gathered()
        dfull, dkv = zeros_like(full), zeros_like(kv)
        gradient.add(full, dfull, *others)
        if ctx.needs_input_grad[1]:
            exchange.reduce(dfull.to(kv.dtype))
        gradient.add(kv, dkv, *own)
        return gradient.dq.to(q.dtype), dkv.to(kv.dtype), None, None, None, None, None


class _GatherEarly(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, kv: Tensor, exchange: _Exchange) -> Tensor:
        ctx.save_for_backward(kv)  # saved as the attention saves it, so that what offloads saved tensors sees both
        ctx.exchange = exchange
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (kv,) = ctx.saved_tensors
        ctx.exchange.gather(kv)
        return grad, None, None


def _by_rank(dkv: Tensor, size: int) -> Tensor:
    """[2, size * s, b, g, d] in natural order -> [size * 2, s, b, g, d], each rank's two after the other."""
    chunks = dkv.unflatten(1, (2 * size, -1))
    ordered = [chunks[which, n] for rank in range(size) for which in (0, 1) for n in layout.chunks_of(rank, size)]
    return torch.stack(ordered).unflatten(0, (-1, 2)).flatten(1, 2)
