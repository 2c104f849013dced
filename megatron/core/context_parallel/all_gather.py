"""all_gather: every rank gathers all keys and values and attends its own two chunks to what comes before them.

After Megatron-Kwai's balanced context parallelism (Yuan et al., USENIX ATC 2024). Let M be the bytes of a rank's keys
and values, 2 * s / size * b * g * d * itemsize. A rank sends, a layer:
  forward: (size - 1) * M, an all-gather.
  backward: 2 * (size - 1) * M: the all-gather again, and a reduce-scatter of the gradients.
Kept for the backward: q, this rank's keys and values, the output, and its log-sum-exp. All keys and values, size * M, are
there during the attention only; while they are put into the sequence's order, twice.

[Note: two gathers out of the way]
`start` begins the forward's gather as soon as keys and values are there; what is done before `attend` (the norm and
rotation of the queries) runs beside it. `gather_early` marks a place later in the forward whose gradient comes earlier
in the backward: put behind a layer's MLP, the backward's gather runs beside the gradients of the MLP and of the output
projection, as in Megatron-Kwai.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.core.comm.collectives import Handle, all_gather_async, reduce_scatter
from megatron.core.context_parallel import layout
from megatron.core.context_parallel.blocks import Attention, Gradient, Segments, zeros_like
from megatron.core.context_parallel.plan import prefix_blocks
from megatron.core.context_parallel.ring import refuse_dropout
from megatron.core.groups import Group
from megatron.kernels.ops.attention_lse import BlockKernel


class Gather:
    """One gather of keys and values at a time: begun early, or where the result is taken."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._under_way: tuple[Tensor, Handle] | None = None

    def start(self, kv: Tensor) -> None:
        """Begin to gather this rank's [2, s, b, g, d], unless that was done."""
        if self._under_way is None:
            self._under_way = all_gather_async(kv, self._group)

    def take(self, kv: Tensor) -> Tensor:
        """All ranks' keys and values in natural order, [2, size * s, b, g, d]."""
        self.start(kv)
        assert self._under_way is not None
        (gathered, handle), self._under_way = self._under_way, None
        handle.wait()
        size = self._group.size
        chunks = gathered.unflatten(0, (size, 2)).unflatten(2, (2, -1))  # [size, 2 (k, v), 2, s / 2, b, g, d]
        return torch.cat([chunks[rank, :, half] for rank, half in layout.owners(size)], dim=1)


@dataclass(frozen=True)
class Pending:
    """Keys and values on their way: k, v [s, b, g, d] as the caller gave them, kv both together."""

    k: Tensor
    v: Tensor
    kv: Tensor
    forward: Gather
    backward: Gather


class AllGatherAttention:
    """An `AttentionKernel` for this rank's part of the sequence, in the balanced layout of `group`; also in two steps."""

    def __init__(self, group: Group, kernel: BlockKernel) -> None:
        self.group, self.kernel = group, kernel

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, segments: Tensor | None, window: int | None, dropout: float
    ) -> Tensor:
        """q [s / size, b, n, d]; k, v [s / size, b, g, d] -> [s / size, b, n * d]. segments: [b, s], of the whole sequence.

        Raises ConfigError when dropout is not 0.
        """
        refuse_dropout(dropout)
        return self.attend(q, self.start(k, v), segments=segments, window=window)

    def start(self, k: Tensor, v: Tensor) -> Pending:
        """Begin to gather k, v [s / size, b, g, d]. Must be followed by one `attend`."""
        kv = torch.stack((k.detach(), v.detach()))
        pending = Pending(k, v, kv, Gather(self.group), Gather(self.group))
        pending.forward.start(kv)
        return pending

    def attend(self, q: Tensor, pending: Pending, *, segments: Tensor | None, window: int | None) -> Tensor:
        """q [s / size, b, n, d] -> [s / size, b, n * d]. The gradient reaches the k and v that were given to `start`."""
        out: Tensor = _Attend.apply(q, pending.k, pending.v, pending, self, segments, window)
        return out.flatten(2)

    def gather_early(self, x: Tensor, pending: Pending) -> Tensor:
        """x itself; where the backward comes to it, the gather of that `attend` begins. See the note above."""
        if not pending.k.requires_grad:
            return x
        marked: Tensor = _GatherEarly.apply(x, pending.kv, pending.backward)
        return marked

    def take_segments(self, segments: Tensor | None) -> Segments:
        """Ids of this rank's queries and of all keys, from those of the whole sequence [b, s]."""
        if segments is None:
            return None
        return layout.take(segments, 1, self.group.rank, self.group.size), segments


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        pending: Pending,
        owner: AllGatherAttention,
        segments: Tensor | None,
        window: int | None,
    ) -> Tensor:
        group = owner.group
        attention = Attention(owner.kernel, q)
        blocks = prefix_blocks(group.rank, group.size, len(q) // 2, window)
        attention.add(pending.forward.take(pending.kv), blocks, owner.take_segments(segments))
        out = attention.out.to(q.dtype)
        ctx.save_for_backward(q, pending.kv, out, attention.lse, segments)
        ctx.owner, ctx.blocks, ctx.gather = owner, blocks, pending.backward
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, kv, out, lse, segments = ctx.saved_tensors
        owner, group = ctx.owner, ctx.owner.group
        full = ctx.gather.take(kv)
        gradient, dkv = Gradient(owner.kernel, grad.contiguous(), q, out, lse), zeros_like(full)
        gradient.add(full, dkv, ctx.blocks, owner.take_segments(segments))
        dk, dv = reduce_scatter(_by_rank(dkv, group.size).to(kv.dtype), group).unbind()
        return gradient.dq.to(q.dtype), dk, dv, None, None, None, None


class _GatherEarly(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, kv: Tensor, gather: Gather) -> Tensor:
        ctx.save_for_backward(kv)  # saved as the attention saves it, so that what offloads saved tensors sees both
        ctx.gather = gather
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        ctx.gather.start(*ctx.saved_tensors)
        return grad, None, None


def _by_rank(dkv: Tensor, size: int) -> Tensor:
    """[2, size * s, b, g, d] in natural order -> [size * 2, s, b, g, d], each rank's two after the other."""
    chunks = dkv.unflatten(1, (2 * size, -1))
    ordered = [chunks[which, n] for rank in range(size) for which in (0, 1) for n in layout.chunks_of(rank, size)]
    return torch.stack(ordered).unflatten(0, (-1, 2)).flatten(1, 2)
