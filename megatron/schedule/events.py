"""The events of a schedule, each with the events that it waits for: the rules by which schedules are timed.

The rules are the engine's. A rank runs its list in order. A computation starts when the rank is free and its inputs
have arrived. Sends and receives are posted at their position in the list and do not block the rank; a transfer begins
when both are posted and the previous one from the same rank to the same rank has left. OFFLOAD and RELOAD are
overlapped with computation, each kind sequentially: the backward waits for its RELOAD, and an OFFLOAD has one
computation to finish; the next computation or RELOAD waits for it.

A forward and a backward may exchange tokens between ranks that hold other experts, at `exchanges` places at equal
distances. A computation that runs alone waits for each exchange. Two that run together take turns: one computes until
its next exchange, starts that, and lets the other one compute, beginning with the first. The exchanges of a rank are
one after the other.

With `blocking`, instead, a rank is blocked at a send or a receive until the other end has reached it and the data has
moved: the minimum that a transport can do.

The reductions of gradients are no actions of a list: they start as the buckets fill. The last backward of a stage that
computes gradients of weights fills its buckets at equal distances, the last one when it ends, and a rank reduces its
buckets one after the other, overlapped with computation. The step ends after the last one.

A schedule without sends and receives is timed with its dependencies alone: data is available on all ranks immediately.

The order of all events is known before the costs are, so the time of each event is the maximum over a fixed set of
earlier events, plus a cost.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from megatron.schedule.schedule import (
    COMPUTE,
    COPIES,
    GRADIENTS_OF_INPUT,
    GRADIENTS_OF_WEIGHTS,
    RECEIVES,
    TRANSFERS,
    Action,
    Kind,
    Schedule,
    ScheduleError,
    other_end,
)

# The costs that an event can take, in the order of their rows.
COSTS = (
    "none",
    "forward",
    "input_grad",
    "weight_grad",
    "backward",
    "transfer",
    "latency",
    "offload",
    "reload",
    "bucket",
    "forward_exchange",
    "backward_exchange",
)
COST_OF_KIND = {
    Kind.FORWARD: "forward",
    Kind.INPUT_GRAD: "input_grad",
    Kind.WEIGHT_GRAD: "weight_grad",
    Kind.BACKWARD: "backward",
    Kind.OFFLOAD: "offload",
    Kind.RELOAD: "reload",
}
_EXCHANGE_OF_KIND = {
    Kind.FORWARD: "forward_exchange",
    Kind.INPUT_GRAD: "backward_exchange",
    Kind.BACKWARD: "backward_exchange",
}
# The events of an action, of its data, of a bucket of gradients, or of a part of a computation that runs together with
# another one. Only a backward that fills buckets has a START event.
_TYPES = START, STOP, LEFT, ARRIVED, FULL, REDUCED, PART, EXCHANGED = range(8)
BEGIN = 0  # the event at time 0
_Key = tuple[Kind, int, int]  # equal to an action, and faster to make
_Event = tuple[int, int, tuple[int, ...], int, float]  # name, microbatch, after, cost, share


class Events:
    """All events of a schedule, in an order in which each follows those that it waits for; the first is BEGIN.

    For each event: after, the events that it waits for, with the previous action of its rank first; cost, share: the
    row of the costs that it takes, and how much of it; depth, the length of the longest chain of events before it;
    name, a number that says what happens to which kind of action, of which stage and bucket; and microbatch. done: the
    event at which a computation, a copy, or the data of a send or receive is complete. begun: of a computation, the
    event that begins when it does. reduced: of each rank, the event at which its last bucket is reduced, BEGIN without
    buckets.
    """

    def __init__(self, schedule: Schedule, num_buckets: int, blocking: bool, exchanges: int = 0) -> None:
        """exchanges: of a microbatch in each stage, in forward and again in backward.

        Raises ScheduleError if ranks deadlock, with the action of each, or if a transfer has one end only.
        """
        self._events: list[_Event] = [(-1, 0, (BEGIN,), 0, 0.0)]
        self.depth = [0]
        stages = schedule.placement.num_stages
        starts = [0, 1]
        for name in COSTS[1:-1]:
            starts.append(starts[-1] + (stages - 1 if name in ("transfer", "latency") else stages))
        self._row = dict(zip(COSTS, starts, strict=True))
        ranks = schedule.placement.num_ranks
        self._rank_of, self._blocking, self._num_buckets = schedule.placement.rank_of, blocking, num_buckets
        self._exchanges, self._numbers = exchanges, max(num_buckets, exchanges) + 1  # of the parts of an action
        self._with_transfers = any(action.kind in TRANSFERS for actions in schedule.actions for action in actions)
        self._fills_buckets = _last_weight_grads(schedule) if num_buckets else frozenset()
        # The first name of the events of one type of one kind of actions, without stages and buckets.
        names = itertools.product(range(len(_TYPES)), Kind)
        self._first = {name: number * stages * self._numbers for number, name in enumerate(names)}
        self._free, self._due, self.reduced = [BEGIN] * ranks, [BEGIN] * ranks, [BEGIN] * ranks
        self._copied = {kind: [BEGIN] * ranks for kind in COPIES}
        self._exchanged = [BEGIN] * ranks  # the last exchange of each rank
        self.done: dict[_Key, int] = {}
        self.begun: dict[_Key, int] = {}
        self._posted: dict[_Key, int] = {}
        self._link_free: dict[tuple[int, int], int] = {}  # (from rank, to rank) -> the last transfer has left
        self._run(schedule)
        self.name, self.microbatch, self.after, self.cost, self.share = zip(*self._events, strict=True)

    def name_of(self, event_type: int, action: Action, number: int = 0) -> int:
        """Returns the number of a type of event of an action, without its microbatch. number: of a bucket or a part."""
        kind, stage, _ = action
        return self._first[event_type, kind] + stage * self._numbers + number

    def _run(self, schedule: Schedule) -> None:
        """Runs the lists of all ranks, each as far as possible, until they end."""
        place = [0] * len(schedule.actions)
        progress = True
        while progress:
            progress, missing = False, {}
            for rank, actions in enumerate(schedule.actions):
                while place[rank] < len(actions):
                    together = 2 if actions[place[rank]] in schedule.with_next else 1
                    needed = self._try(rank, actions[place[rank] : place[rank] + together])
                    if needed is not None:
                        missing[rank] = Action(*needed)
                        break
                    place[rank] += together
                    progress = True
        if stuck := [f"rank {rank} at {schedule.actions[rank][place[rank]]}, for {missing[rank]}" for rank in missing]:
            raise ScheduleError(f"{schedule.name}: ranks wait for each other: {'; '.join(sorted(stuck))}")
        if unmatched := [str(action) for action in self._posted if action not in self.done]:
            raise ScheduleError(f"{schedule.name}: nothing at the other end of {', '.join(unmatched)}")

    def times(self, seconds: Mapping[str, float]) -> list[float]:
        """Returns the time of each event where costs of these names, of `COSTS`, are equal in all stages, and all
        others are 0. Without arrays, because schedules are made before numpy is loaded."""
        stages = self._row["input_grad"] - self._row["forward"]
        by_row = {self._row[name] + stage: cost for name, cost in seconds.items() for stage in range(stages)}
        times: list[float] = []
        for after, cost, share in zip(self.after, self.cost, self.share, strict=True):
            times.append(max((times[event] for event in after if event < len(times)), default=0.0))
            times[-1] += by_row.get(cost, 0.0) * share
        return times

    def _event(self, name: int, microbatch: int, after: tuple[int, ...], cost: int = 0, share: float = 1.0) -> int:
        self._events.append((name, microbatch, after, cost, share))
        depths = self.depth
        depth = 0
        for event in after:
            if depths[event] > depth:
                depth = depths[event]
        depths.append(depth + 1)
        return len(depths) - 1

    def _try(self, rank: int, together: Sequence[Action]) -> _Key | None:
        """Runs an action, or two computations together, or returns the action for which they wait."""
        action = together[0]
        if action.kind in COMPUTE:
            return self._compute(rank, together)
        if action.kind in TRANSFERS:
            return self._transfer(rank, action)
        self._copy(rank, action)
        return None

    def _compute(self, rank: int, together: Sequence[Action]) -> _Key | None:
        after: tuple[int, ...] = (self._free[rank], self._due[rank]) if self._due[rank] else (self._free[rank],)
        for action in together:
            kind, stage, microbatch = action
            source = self.source(action)
            if source is not None:
                if self._with_transfers and self._rank_of[source[1]] != rank:
                    source = Kind.RECV_FORWARD if kind is Kind.FORWARD else Kind.RECV_BACKWARD, stage, microbatch
                ready = self.done.get(source)
                if ready is None:
                    return source
                after = (*after, ready)
            if kind in GRADIENTS_OF_INPUT and (reload := self.done.get((Kind.RELOAD, stage, microbatch))):
                after = (*after, reload)
        self._due[rank] = self._copied[Kind.OFFLOAD][rank]
        if len(together) == 1:
            self._free[rank] = self._alone(rank, together[0], after)
        else:
            self._free[rank] = self._in_turns(rank, together, after)
        return None

    def _alone(self, rank: int, action: Action, after: tuple[int, ...]) -> int:
        """Returns the event at which the computation ends; its exchanges are counted as one before it."""
        kind, stage, microbatch = action
        if self._exchanges and kind in _EXCHANGE_OF_KIND:
            row = self._row[_EXCHANGE_OF_KIND[kind]] + stage
            after = (self._event(self.name_of(EXCHANGED, action), microbatch, (*after, self._exchanged[rank]), row),)
            self._exchanged[rank] = self.begun[action] = after[0]
        cost = self._row[COST_OF_KIND[kind]] + stage
        fills = action in self._fills_buckets
        if fills:
            after = (self._event(self.name_of(START, action), microbatch, after),)
        stop = self._event(self.name_of(STOP, action), microbatch, after, cost)
        self.begun.setdefault(action, stop)
        self._end(action, stop)
        if fills:
            self._reduce(rank, action, after, cost)
        return stop

    def _in_turns(self, rank: int, together: Sequence[Action], after: tuple[int, ...]) -> int:
        """Returns the event at which both computations have ended."""
        backward, forward = together
        ready = {forward: after, backward: after}  # what the next part of each waits for
        free, parts = after, self._exchanges + 1
        for part, action in itertools.product(range(parts), (backward, forward)):
            kind, stage, microbatch = action
            cost = self._row[COST_OF_KIND[kind]] + stage
            is_last = part == parts - 1
            name = self.name_of(STOP, action) if is_last else self.name_of(PART, action, part)
            stop = self._event(name, microbatch, (*free, *ready[action]), cost, 1 / parts)
            self.begun.setdefault(action, stop)
            free = (stop,)
            if is_last:
                self._end(action, stop)
            else:
                row = self._row[_EXCHANGE_OF_KIND[kind]] + stage
                name = self.name_of(EXCHANGED, action, part)
                exchanged = self._event(name, microbatch, (stop, self._exchanged[rank]), row, 1 / self._exchanges)
                self._exchanged[rank], ready[action] = exchanged, (exchanged,)
        if backward in self._fills_buckets:
            self._reduce(rank, backward, free, 0)
        return free[0]

    def _end(self, action: Action, stop: int) -> None:
        self.done[action] = stop
        if action.kind is Kind.BACKWARD:  # the previous stage waits for the gradient of its output in either form
            self.done[Kind.INPUT_GRAD, action.stage, action.microbatch] = stop

    def source(self, action: Action) -> _Key | None:
        """Returns the computation, of another stage, whose result a computation needs, or None."""
        kind, stage, microbatch = action
        if kind is Kind.WEIGHT_GRAD:
            return None
        source = stage - 1 if kind is Kind.FORWARD else stage + 1
        if not 0 <= source < len(self._rank_of):
            return None
        return Kind.FORWARD if kind is Kind.FORWARD else Kind.INPUT_GRAD, source, microbatch

    def _reduce(self, rank: int, action: Action, after: tuple[int, ...], cost: int) -> None:
        """Reduces the buckets that the backward `action` fills."""
        row, microbatch = self._row["bucket"] + action.stage, action.microbatch
        for number in range(1, self._num_buckets + 1):
            share = number / self._num_buckets
            full = self._event(self.name_of(FULL, action, number), microbatch, after, cost, share)
            before = (self.reduced[rank], full) if self.reduced[rank] else (full,)
            self.reduced[rank] = self._event(self.name_of(REDUCED, action, number), microbatch, before, row)

    def _copy(self, rank: int, action: Action) -> None:
        after: tuple[int, ...] = (self._free[rank], self._copied[action.kind][rank])
        if action.kind is Kind.RELOAD:
            after = (*after, self.done[Kind.OFFLOAD, action.stage, action.microbatch], self._due[rank])
        cost = self._row[COST_OF_KIND[action.kind]] + action.stage
        stop = self._event(self.name_of(STOP, action), action.microbatch, after, cost)
        self._copied[action.kind][rank] = self.done[action] = stop

    def _transfer(self, rank: int, action: Action) -> _Key | None:
        if action not in self._posted:
            self._posted[action] = self._free[rank]
            other = other_end(action)
            if other in self._posted:
                send, receive = (other, action) if action.kind in RECEIVES else (action, other)
                link = (self._rank_of[send.stage], self._rank_of[receive.stage])
                after = (self._posted[send], self._posted[receive], self._link_free.get(link, BEGIN))
                boundary, microbatch = min(action.stage, other.stage), action.microbatch
                cost = self._row["transfer"] + boundary
                left = self._event(self.name_of(LEFT, send), microbatch, after, cost)
                cost = self._row["latency"] + boundary
                arrived = self._event(self.name_of(ARRIVED, send), microbatch, (left,), cost)
                self._link_free[link] = left
                self.done[action] = self.done[other] = arrived
        if self._blocking:
            if action not in self.done:
                return action
            self._free[rank] = self.done[action]
        return None


def _last_weight_grads(schedule: Schedule) -> frozenset[Action]:
    """Returns the last action of each stage that computes gradients of weights."""
    last = {
        action.stage: action
        for actions in schedule.actions
        for action in actions
        if action.kind in GRADIENTS_OF_WEIGHTS
    }
    return frozenset(last.values())
