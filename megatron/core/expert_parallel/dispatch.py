"""Brings tokens to the ranks of their experts, and the sums of the experts' results back to the tokens.

`AllToAll` sends a token once to each rank that has one of its experts. A rank adds the results of its experts for a
row, and the token's rank adds the sums of the ranks, in ascending order. So two runs have the same bits, and a layout
changes only how the terms of a sum are grouped. Nothing but indices is kept for the backward, in which rows and sums go
the other way.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from megatron.core.comm.all_to_all import all_to_all_async, all_to_all_v, all_to_all_v_async
from megatron.core.comm.collectives import all_gather
from megatron.core.comm.regions import sum_partial_to_sequence_shard, to_shards
from megatron.core.expert_parallel.plan import (
    LocalPlan,
    Plan,
    ReadCounts,
    local_plan,
    make_plan,
    outgoing,
    read_counts,
    to_all_of_etp,
)
from megatron.core.groups import Group
from megatron.kernels.ops.assignments import Assign, Assignments, assign


class Dispatched(NamedTuple):
    """The rows that a rank's experts work on.

    rows: [M, h]. weights: [A] fp32, in the order of `assignments`. plan: for another dispatch of tokens with the same
    indices. tokens: the number of tokens that were dispatched here.
    """

    rows: Tensor
    weights: Tensor
    assignments: Assignments
    plan: LocalPlan | Plan
    tokens: int


class Dispatcher(Protocol):
    """Collective over the ranks that share the experts, in forward and backward, also for a rank without tokens."""

    def dispatch(
        self, x: Tensor, indices: Tensor, weights: Tensor, plan: LocalPlan | Plan | None = None, *, whole: bool = False
    ) -> Dispatched:
        """x [T, h]; indices [T, k] int64, a token's different experts, -1 for none; weights [T, k] fp32.

        Differentiable in x and weights. plan: that of an earlier dispatch with these indices, as in the second run of
        recompute. Without it the host waits for the device once, for the number of rows, unless this rank has all
        experts and the indices are `whole`: none is -1.
        """
        ...

    def combine(self, out: Tensor, dispatched: Dispatched) -> Tensor:
        """out [M, h], for each row the sum over the experts of this rank -> [T, h],
        the sums over all ranks. Differentiable.

        Half precision is added in fp32 and rounded once.
        """
        ...


class Local:
    """A Dispatcher for one rank that has all experts. The rows are the tokens themselves, without a copy."""

    def __init__(self, experts: int, assign: Assign = assign, read: ReadCounts = read_counts) -> None:
        """experts: their number. assign: the kernel that sorts assignments. read: brings their counts to the host."""
        self._experts, self._assign, self._read = experts, assign, read

    def dispatch(
        self, x: Tensor, indices: Tensor, weights: Tensor, plan: LocalPlan | Plan | None = None, *, whole: bool = False
    ) -> Dispatched:
        """See Dispatcher."""
        plan = plan or local_plan(indices, 0, self._experts, self._assign, self._read, whole=whole)
        assert isinstance(plan, LocalPlan)
        return Dispatched(x, _taken(weights, plan.positions), plan.assignments, plan, len(x))

    def combine(self, out: Tensor, dispatched: Dispatched) -> Tensor:
        """See Dispatcher: `out` itself."""
        return out


class AllToAll:
    """A Dispatcher that sends a token once to each rank with one of its experts.

    Communication: an all-to-all of the counts; all-to-all-v of 8 bytes per assignment, of the rows, and of the results.
    In the backward three of the latter kind: results, 4 bytes per assignment, rows.
    """

    def __init__(
        self, group: Group, experts: int, etp: int = 1, layer: str = "a layer", read: ReadCounts = read_counts
    ) -> None:
        """group: etp_ep. experts: of all its ranks. etp: neighbours that share the same experts, each with a part of
        them: all of them get the token, and return partial sums. layer: for messages about a failure. read: brings
        counts to the host.
        """
        self._group, self._experts, self._etp, self._layer, self._read = group, experts, etp, layer, read

    def dispatch(
        self, x: Tensor, indices: Tensor, weights: Tensor, plan: LocalPlan | Plan | None = None, *, whole: bool = False
    ) -> Dispatched:
        """See Dispatcher."""
        plan = plan or self._plan(indices)
        assert isinstance(plan, Plan)
        rows, arrived, places = _Dispatch.apply(x, weights, plan, self._group, self._etp, self._layer)
        return Dispatched(rows, arrived, Assignments(places, plan.ends, plan.sizes), plan, len(x))

    def combine(self, out: Tensor, dispatched: Dispatched) -> Tensor:
        """See Dispatcher."""
        result: Tensor = _Combine.apply(out, dispatched.plan, dispatched.tokens, self._group, self._layer)
        return result

    def _plan(self, indices: Tensor) -> Plan:
        out = outgoing(indices, self._experts, self._group.size // self._etp)
        counts = out.counts.repeat_interleave(self._etp, dim=0)
        received, handle = all_to_all_async(counts, self._group, _name("counts to", self._layer, self._group))
        handle.wait()
        return make_plan(out, received, self._etp, self._read)


class AllGather:
    """A Dispatcher that gathers all tokens on all ranks: the reference for AllToAll. All ranks have as many tokens.

    Communication: all-gathers of indices, tokens and weights, and a reduce-scatter of the results. In the backward an
    all-gather of the results' gradient, and reduce-scatters of those of weights and tokens.
    """

    def __init__(
        self, group: Group, experts: int, etp: int = 1, assign: Assign = assign, read: ReadCounts = read_counts
    ) -> None:
        """group: etp_ep. experts: of all its ranks. etp: neighbours that share the same experts, each with a part.
        assign, read: see Local."""
        self._group, self._local, self._assign, self._read = group, experts * etp // group.size, assign, read
        self._first = group.rank // etp * self._local

    def dispatch(
        self, x: Tensor, indices: Tensor, weights: Tensor, plan: LocalPlan | Plan | None = None, *, whole: bool = False
    ) -> Dispatched:
        """See Dispatcher."""
        plan = plan or local_plan(all_gather(indices, self._group), self._first, self._local, self._assign, self._read)
        assert isinstance(plan, LocalPlan)
        rows, gathered = (to_shards(tensor, self._group, sequence_parallel=True) for tensor in (x, weights))
        return Dispatched(rows, _taken(gathered, plan.positions), plan.assignments, plan, len(x))

    def combine(self, out: Tensor, dispatched: Dispatched) -> Tensor:
        """See Dispatcher."""
        return sum_partial_to_sequence_shard(out, self._group)


class Scattered:
    """A Dispatcher for tokens that all ranks of tp hold, in evaluation and generation:
    each rank dispatches a part of them.

    A part may be empty, and parts may differ by one token. Not differentiable. Communication: that of the inner
    Dispatcher, and an all-gather of the results over tp.
    """

    def __init__(self, inner: Dispatcher, tp: Group) -> None:
        """inner: Local or AllToAll, as it must allow parts of different size."""
        self._inner, self._tp = inner, tp

    def dispatch(
        self, x: Tensor, indices: Tensor, weights: Tensor, plan: LocalPlan | Plan | None = None, *, whole: bool = False
    ) -> Dispatched:
        """See Dispatcher."""
        assert not (torch.is_grad_enabled() and (x.requires_grad or weights.requires_grad)), "has no backward"
        x_part, indices_part, weights_part = (
            tensor.tensor_split(self._tp.size)[self._tp.rank] for tensor in (x, indices, weights)
        )
        return self._inner.dispatch(x_part, indices_part, weights_part, plan, whole=whole)._replace(tokens=len(x))

    def combine(self, out: Tensor, dispatched: Dispatched) -> Tensor:
        """See Dispatcher."""
        least, remainder = divmod(dispatched.tokens, self._tp.size)
        parts = [least + (rank < remainder) for rank in range(self._tp.size)]
        mine = self._inner.combine(out, dispatched._replace(tokens=parts[self._tp.rank]))
        padded = mine.new_zeros(parts[0], *mine.shape[1:])
        padded[: len(mine)] = mine
        gathered = all_gather(padded, self._tp).split(parts[0])
        return torch.cat([part[:tokens] for part, tokens in zip(gathered, parts, strict=True)])


class _Dispatch(torch.autograd.Function):
    """(rows [M, h], weights [M_a], rows of the assignments [M_a] int64)"""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weights: Tensor, plan: Plan, group: Group, etp: int, layer: str
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.plan, ctx.group, ctx.etp, ctx.tokens, ctx.shape = plan, group, etp, len(x), weights.shape
        ctx.layer, name = layer, _name("tokens to", layer, group)
        # The bits of a row and of a weight. They go first, so that they are put in order while the rows are on their
        # way.
        pairs = torch.stack([plan.rows, _taken(weights, plan.positions).view(torch.int32)], dim=1)
        pairs = to_all_of_etp(pairs, plan.send_assignments[::etp], etp)
        assigned, pairs_sent = all_to_all_v_async(pairs, plan.send_assignments, plan.receive_assignments, group, name)
        copies = x.index_select(0, plan.tokens)
        rows, rows_sent = all_to_all_v_async(copies, plan.send_rows, plan.receive_rows, group, name)
        pairs_sent.wait()
        places = plan.assignments(assigned[:, 0]).rows
        arrived = assigned[:, 1].index_select(0, plan.order).view(torch.float32)
        rows_sent.wait()
        ctx.mark_non_differentiable(places)
        return rows, arrived, places

    @staticmethod
    def backward(ctx: Any, grad_rows: Tensor, grad_weights: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        plan, group, name = ctx.plan, ctx.group, _name("gradients back from", ctx.layer, ctx.group)
        of_x = of_weights = None
        if ctx.needs_input_grad[1]:
            ordered = torch.empty_like(grad_weights).index_copy_(0, plan.order, grad_weights)
            weights, weights_sent = all_to_all_v_async(
                ordered, plan.receive_assignments, plan.send_assignments, group, name
            )
        if ctx.needs_input_grad[0]:
            rows, rows_sent = all_to_all_v_async(grad_rows, plan.receive_rows, plan.send_rows, group, name)
        if ctx.needs_input_grad[1]:
            weights_sent.wait()
            summed = _sum_over_etp(weights, plan.send_assignments, ctx.etp)
            of_weights = summed.new_zeros(ctx.shape.numel()).index_copy_(0, plan.positions, summed).view(ctx.shape)
        if ctx.needs_input_grad[0]:
            rows_sent.wait()
            of_x = _sum_over_ranks(rows, plan, ctx.tokens)
        return of_x, of_weights, None, None, None, None


class _Combine(torch.autograd.Function):
    """[M, h] -> [T, h]"""

    @staticmethod
    def forward(ctx: Any, out: Tensor, plan: Plan, tokens: int, group: Group, layer: str) -> Tensor:
        ctx.plan, ctx.group, ctx.layer = plan, group, layer
        name = _name("results back from", layer, group)
        return _sum_over_ranks(all_to_all_v(out, plan.receive_rows, plan.send_rows, group, name), plan, tokens)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        plan, name = ctx.plan, _name("gradients to", ctx.layer, ctx.group)
        copies = grad.index_select(0, plan.tokens)
        return all_to_all_v(copies, plan.send_rows, plan.receive_rows, ctx.group, name), None, None, None, None


def _name(content: str, layer: str, group: Group) -> str:
    """Names an exchange for messages: what travels, the layer, and the action of the schedule with its microbatch."""
    return f"{content} experts of {layer} in {group.heartbeat.current_phase}"


def _taken(weights: Tensor, positions: Tensor) -> Tensor:
    """[T, k] -> [A]"""
    assert weights.dtype == torch.float32, weights.dtype
    return weights.flatten().index_select(0, positions)


def _sum_over_ranks(rows: Tensor, plan: Plan, tokens: int) -> Tensor:
    """[S, h], by (rank, token) -> [T, h]. A rank has a token once, so the order of a sum is that of the ranks."""
    total = rows.new_zeros((tokens, *rows.shape[1:]), dtype=torch.float32 if rows.dtype.itemsize == 2 else rows.dtype)
    for places, part in zip(plan.tokens.split(plan.send_rows), rows.split(plan.send_rows), strict=True):
        total.index_add_(0, places, part.to(total.dtype))
    return total.to(rows.dtype)


def _sum_over_etp(numbers: Tensor, counts: list[int], etp: int) -> Tensor:
    """[sum of counts], by rank of etp_ep -> [sum of counts / etp], by ep rank: the sums over etp, in rank order."""
    if etp == 1:
        return numbers
    parts = numbers.split(counts)
    return torch.cat([torch.stack(parts[first : first + etp]).sum(0) for first in range(0, len(parts), etp)])
