"""Brings tokens to the ranks of their experts, and the sums of the experts' results back to the tokens.

`AllToAll` sends a token once to each rank that has one of its experts. A rank adds the results of its experts for a
row, and the token's rank adds the sums of the ranks, in ascending order. So two runs have the same bits, and a layout
changes only how the terms of a sum are grouped. Nothing but indices is kept for the backward, in which rows and sums go
the other way.

[Note: tokens on their way] `start` sends the tokens and `finish` waits for them, so what a layer computes in between is
overlapped with the exchange. It is overlapped in backward, too: the backward of `finish` sends the gradients, and that
of `start` waits for them, and autograd runs between them what the forward ran there. Before each wait the computation
gives way to another one (core/streams/turns.py), if the schedule runs two at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from megatron.core.comm.all_to_all import all_to_all_async, all_to_all_v_async
from megatron.core.comm.collectives import Handle, all_gather
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
from megatron.kernels.ops.assignments import Assign, Assignments, assign, row_order
from megatron.kernels.ops.batch_invariant import expert_tree


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


class OnTheWay(Protocol):
    """Tokens that have been sent."""

    def finish(self) -> Dispatched:
        """Returns what has arrived here. Called once."""
        ...


class Dispatcher(Protocol):
    """Collective over the ranks that share the experts, in forward and backward, also for a rank without tokens."""

    def start(
        self, x: Tensor, indices: Tensor, weights: Tensor, plan: LocalPlan | Plan | None = None, *, whole: bool = False
    ) -> OnTheWay:
        """x [T, h]; indices [T, k] int64, a token's different experts, -1 for none; weights [T, k] fp32.

        Differentiable in x and weights. plan: that of an earlier dispatch with these indices, as in the second run of
        recompute. Without it the host waits for the device once, for the number of rows, unless this rank has all
        experts and the indices are `whole`: none is -1. See [Note: tokens on their way].
        """
        ...

    def combine(self, out: Tensor, dispatched: Dispatched, *, skip: bool = False) -> Tensor:
        """out [M, h], for each row the sum over the experts of this rank -> [T, h],
        the sums over all ranks. Differentiable.

        Half precision is added in fp32 and rounded once. skip: the values are undefined and need not be computed or
        exchanged; the backward is the same.
        """
        ...


class Local:
    """A Dispatcher for one rank that has all experts. The rows are the tokens themselves, without a copy."""

    def __init__(self, experts: int, assign: Assign = assign, read: ReadCounts = read_counts) -> None:
        """experts: their number. assign: the kernel that sorts assignments. read: brings their counts to the host."""
        self._experts, self._assign, self._read = experts, assign, read

    def start(
        self, x: Tensor, indices: Tensor, weights: Tensor, plan: LocalPlan | Plan | None = None, *, whole: bool = False
    ) -> OnTheWay:
        """See Dispatcher."""
        plan = plan or local_plan(indices, 0, self._experts, self._assign, self._read, whole=whole)
        assert isinstance(plan, LocalPlan)
        return _Arrived(Dispatched(x, _taken(weights, plan.positions), plan.assignments, plan, len(x)))

    def combine(self, out: Tensor, dispatched: Dispatched, *, skip: bool = False) -> Tensor:
        """See Dispatcher: `out` itself."""
        return out


class AllToAll:
    """A Dispatcher that sends a token once to each rank with one of its experts.

    Communication: an all-to-all of the counts; all-to-all-v of 8 bytes per assignment, of the rows, and of the results.
    In the backward three of the latter kind: results, 4 bytes per assignment, rows.
    """

    def __init__(
        self,
        group: Group,
        experts: int,
        etp: int = 1,
        layer: str = "a layer",
        read: ReadCounts = read_counts,
        yield_turn: Callable[[], None] = lambda: None,
        *,
        in_tree: bool = False,
    ) -> None:
        """group: etp_ep. experts: of all its ranks. etp: neighbours that share the same experts, each with a part of
        them: all of them get the token, and return partial sums. layer: for messages about a failure. read: brings
        counts to the host. yield_turn: called while tokens or results are on their way. in_tree: the sums of the
        ranks are added up as in [Note: tree of experts], and not in ascending order.
        """
        self._experts, self._read = experts, read
        self._route = _Route(group, etp, layer, yield_turn, in_tree)

    def start(
        self, x: Tensor, indices: Tensor, weights: Tensor, plan: LocalPlan | Plan | None = None, *, whole: bool = False
    ) -> OnTheWay:
        """See Dispatcher."""
        plan = plan or self._plan(indices)
        assert isinstance(plan, Plan)
        exchange = _TokenExchange(self._route, plan, len(x), weights.shape, (x.requires_grad, weights.requires_grad))
        return _Sent(exchange, *_Send.apply(x, weights, exchange))

    def combine(self, out: Tensor, dispatched: Dispatched, *, skip: bool = False) -> Tensor:
        """See Dispatcher."""
        result: Tensor = _Combine.apply(out, dispatched.plan, dispatched.tokens, self._route, skip)
        return result

    def _plan(self, indices: Tensor) -> Plan:
        route = self._route
        out = outgoing(indices, self._experts, route.group.size // route.etp)
        counts = out.counts.repeat_interleave(route.etp, dim=0)
        received, handle = all_to_all_async(counts, route.group, route.name("counts to"))
        handle.wait()
        return make_plan(out, received, len(indices), route.etp, self._read)


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

    def start(
        self, x: Tensor, indices: Tensor, weights: Tensor, plan: LocalPlan | Plan | None = None, *, whole: bool = False
    ) -> OnTheWay:
        """See Dispatcher. Waits for the tokens."""
        plan = plan or local_plan(all_gather(indices, self._group), self._first, self._local, self._assign, self._read)
        assert isinstance(plan, LocalPlan)
        rows, gathered = (to_shards(tensor, self._group, sequence_parallel=True) for tensor in (x, weights))
        return _Arrived(Dispatched(rows, _taken(gathered, plan.positions), plan.assignments, plan, len(x)))

    def combine(self, out: Tensor, dispatched: Dispatched, *, skip: bool = False) -> Tensor:
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

    def start(
        self, x: Tensor, indices: Tensor, weights: Tensor, plan: LocalPlan | Plan | None = None, *, whole: bool = False
    ) -> OnTheWay:
        """See Dispatcher. Waits for the tokens."""
        assert not (torch.is_grad_enabled() and (x.requires_grad or weights.requires_grad)), "has no backward"
        x_part, indices_part, weights_part = (
            tensor.tensor_split(self._tp.size)[self._tp.rank] for tensor in (x, indices, weights)
        )
        part = self._inner.start(x_part, indices_part, weights_part, plan, whole=whole).finish()
        return _Arrived(part._replace(tokens=len(x)))

    def combine(self, out: Tensor, dispatched: Dispatched, *, skip: bool = False) -> Tensor:
        """See Dispatcher."""
        least, remainder = divmod(dispatched.tokens, self._tp.size)
        parts = [least + (rank < remainder) for rank in range(self._tp.size)]
        mine = self._inner.combine(out, dispatched._replace(tokens=parts[self._tp.rank]), skip=skip)
        padded = mine.new_zeros(parts[0], *mine.shape[1:])
        padded[: len(mine)] = mine
        gathered = all_gather(padded, self._tp).split(parts[0])
        return torch.cat([part[:tokens] for part, tokens in zip(gathered, parts, strict=True)])


class _Arrived(NamedTuple):
    """Tokens that are here already. See OnTheWay."""

    dispatched: Dispatched

    def finish(self) -> Dispatched:
        """See OnTheWay."""
        return self.dispatched


@dataclass(frozen=True)
class _Route:
    """Between whom the tokens of a layer are exchanged. See AllToAll."""

    group: Group
    etp: int
    layer: str
    yield_turn: Callable[[], None]
    in_tree: bool

    def name(self, content: str) -> str:
        """Names an exchange for messages: what travels, the layer, and the action of the schedule with its
        microbatch."""
        return f"{content} experts of {self.layer} in {self.group.heartbeat.current_phase}"


@dataclass
class _TokenExchange:
    """One dispatch: what `_Send` and `_Receive` tell each other, apart from the tensors that autograd sees.

    needs: gradients of (tokens, weights). sent: handles of the messages in flight, those of the weights first.
    gradients: of weights and tokens, which arrive here in backward.
    """

    route: _Route
    plan: Plan
    tokens: int
    shape: torch.Size  # of the weights
    needs: tuple[bool, bool]
    sent: tuple[Handle | None, Handle | None] = (None, None)
    gradients: tuple[Tensor | None, Tensor | None] = (None, None)


@dataclass(frozen=True)
class _Sent:
    """Tokens on their way to the ranks of their experts. See OnTheWay."""

    exchange: _TokenExchange
    rows: Tensor
    weights: Tensor
    places: Tensor

    def finish(self) -> Dispatched:
        """See OnTheWay."""
        exchange, plan = self.exchange, self.exchange.plan
        rows, arrived, places = _Receive.apply(self.rows, self.weights, self.places, exchange)
        return Dispatched(rows, arrived, Assignments(places, plan.ends, plan.sizes), plan, exchange.tokens)


class _Send(torch.autograd.Function):
    """Starts the messages. Returns the memory into which they go: rows [M, h], weights [M_a] in the order in which they
    arrive, and the rows of the assignments [M_a] int32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, exchange: _TokenExchange) -> tuple[Tensor, Tensor, Tensor]:
        ctx.exchange, route, plan = exchange, exchange.route, exchange.plan
        etp, name = route.etp, route.name("tokens to")
        # The bits of a row and of a weight. They go first, so that they are put in order while the rows are on their
        # way.
        pairs = torch.stack([plan.rows, _taken(weights, plan.positions).view(torch.int32)], dim=1)
        pairs = to_all_of_etp(pairs, plan.send_assignments[::etp], etp)
        assigned, pairs_sent = all_to_all_v_async(
            pairs, plan.send_assignments, plan.receive_assignments, route.group, name
        )
        copies = x.index_select(0, plan.tokens)
        rows, rows_sent = all_to_all_v_async(copies, plan.send_rows, plan.receive_rows, route.group, name)
        exchange.sent = pairs_sent, rows_sent
        places = assigned[:, 0]
        ctx.mark_non_differentiable(places)
        return rows, assigned[:, 1].view(torch.float32), places

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        exchange, plan = ctx.exchange, ctx.exchange.plan
        exchange.route.yield_turn()
        weights_sent, rows_sent = exchange.sent
        weights, rows = exchange.gradients
        of_x = of_weights = None
        if weights is not None:
            weights_sent.wait()
            summed = _sum_over_etp(weights, plan.send_assignments, exchange.route.etp)
            of_weights = summed.new_zeros(exchange.shape.numel()).index_copy_(0, plan.positions, summed)
            of_weights = of_weights.view(exchange.shape)
        if rows is not None:
            rows_sent.wait()
            of_x = _sum_over_ranks(rows, plan, exchange.tokens)
        exchange.sent = exchange.gradients = (None, None)
        return of_x, of_weights, None


class _Receive(torch.autograd.Function):
    """Waits for the messages of `_Send`: (rows [M, h], weights [M_a] and rows [M_a] int64 of the assignments, in order)

    The gradients that backward returns are stand-ins of the right shapes: those of the tokens are on their way.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weights: Tensor, places: Tensor, exchange: _TokenExchange
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.exchange, plan = exchange, exchange.plan
        exchange.route.yield_turn()
        pairs_sent, rows_sent = exchange.sent
        assert pairs_sent is not None and rows_sent is not None
        exchange.sent = (None, None)
        pairs_sent.wait()
        ordered = plan.assignments(places).rows
        arrived = weights.index_select(0, plan.order)
        rows_sent.wait()
        ctx.mark_non_differentiable(ordered)
        return rows.view_as(rows), arrived, ordered

    @staticmethod
    def backward(ctx: Any, grad_rows: Tensor, grad_weights: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        exchange, route, plan = ctx.exchange, ctx.exchange.route, ctx.exchange.plan
        name = route.name("gradients back from")
        weights = rows = weights_sent = rows_sent = None
        needs_x, needs_weights = exchange.needs
        if needs_weights:
            ordered = torch.empty_like(grad_weights).index_copy_(0, plan.order, grad_weights)
            weights, weights_sent = all_to_all_v_async(
                ordered, plan.receive_assignments, plan.send_assignments, route.group, name
            )
        if needs_x:
            rows, rows_sent = all_to_all_v_async(grad_rows, plan.receive_rows, plan.send_rows, route.group, name)
        exchange.gradients, exchange.sent = (weights, rows), (weights_sent, rows_sent)
        return grad_rows, grad_weights, None, None


class _Combine(torch.autograd.Function):
    """[M, h] -> [T, h]"""

    @staticmethod
    def forward(ctx: Any, out: Tensor, plan: Plan, tokens: int, route: _Route, skip: bool) -> Tensor:
        ctx.plan, ctx.route = plan, route
        if skip:
            return out.new_empty(tokens, *out.shape[1:])
        rows, sent = all_to_all_v_async(
            out, plan.receive_rows, plan.send_rows, route.group, route.name("results back from")
        )
        route.yield_turn()
        sent.wait()
        return _sum_in_tree(rows, plan, tokens) if route.in_tree else _sum_over_ranks(rows, plan, tokens)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        plan, route = ctx.plan, ctx.route
        copies = grad.index_select(0, plan.tokens)
        rows, sent = all_to_all_v_async(
            copies, plan.send_rows, plan.receive_rows, route.group, route.name("gradients to")
        )
        route.yield_turn()
        sent.wait()
        return rows, None, None, None, None


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


def _sum_in_tree(rows: Tensor, plan: Plan, tokens: int) -> Tensor:
    """As `_sum_over_ranks`, by [Note: tree of experts]."""
    ends = torch.tensor(plan.send_rows, dtype=torch.int32, device=rows.device).cumsum(0).int()
    return expert_tree.add_up(rows, row_order(Assignments(plan.tokens, ends, plan.send_rows), tokens), ends)


def _sum_over_etp(numbers: Tensor, counts: list[int], etp: int) -> Tensor:
    """[sum of counts], by rank of etp_ep -> [sum of counts / etp], by ep rank: the sums over etp, in rank order."""
    if etp == 1:
        return numbers
    parts = numbers.split(counts)
    return torch.cat([torch.stack(parts[first : first + etp]).sum(0) for first in range(0, len(parts), etp)])
