"""The events of a schedule, each with the events that it waits for: the simulator's rules without the costs.

The order of all events is known before the costs are (megatron/schedule/simulate.py has the rules), so the time of each
event is the maximum over a fixed set of earlier events, plus a cost.
"""

from __future__ import annotations

import itertools

from megatron.schedule.schedule import (
    COMPUTE,
    COPIES,
    GRADIENTS_OF_INPUT,
    RECEIVES,
    TRANSFERS,
    Action,
    Kind,
    Schedule,
    other_end,
)
from megatron.schedule.simulate import last_weight_grads

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
)
_OF_KIND = {
    Kind.FORWARD: "forward",
    Kind.INPUT_GRAD: "input_grad",
    Kind.WEIGHT_GRAD: "weight_grad",
    Kind.BACKWARD: "backward",
    Kind.OFFLOAD: "offload",
    Kind.RELOAD: "reload",
}
# What happens to an action, its data, or a bucket of gradients. Only a backward that fills buckets has a START of its own.
_WHATS = START, STOP, LEFT, ARRIVED, FULL, REDUCED = range(6)
BEGIN = 0  # the event at time 0
_Key = tuple[Kind, int, int]  # equal to an action, and made faster
_Event = tuple[int, int, tuple[int, ...], int, float]  # name, microbatch, after, cost, share


class Events:
    """All events of a schedule, in an order in which each follows those that it waits for; the first one is BEGIN.

    For each event: after, the events that it waits for; cost, share: the row of the costs that it takes, and how much of it;
    depth, the length of the longest chain of events before it; name, a number that says what happens to which kind of
    action, of which stage and bucket; and microbatch.
    """

    def __init__(self, schedule: Schedule, num_buckets: int, blocking: bool) -> None:
        self._events: list[_Event] = [(-1, 0, (BEGIN,), 0, 0.0)]
        self.depth = [0]
        stages = schedule.placement.num_stages
        starts = [0, 1]
        for name in COSTS[1:-1]:
            starts.append(starts[-1] + (stages - 1 if name in ("transfer", "latency") else stages))
        self._row = dict(zip(COSTS, starts, strict=True))
        ranks = schedule.placement.num_ranks
        self._rank_of, self._blocking, self._num_buckets = schedule.placement.rank_of, blocking, num_buckets
        self._with_transfers = any(action.kind in TRANSFERS for actions in schedule.actions for action in actions)
        self._fills_buckets = last_weight_grads(schedule) if num_buckets else {}
        # The first name of what happens to actions of a kind, without stages and buckets.
        names = itertools.product(range(len(_WHATS)), Kind)
        self._first = {name: number * stages * (num_buckets + 1) for number, name in enumerate(names)}
        self._free, self._due, self._reduced = [BEGIN] * ranks, [BEGIN] * ranks, [BEGIN] * ranks
        self._copied = {kind: [BEGIN] * ranks for kind in COPIES}
        self._done: dict[_Key, int] = {}  # of a transfer: arrived
        self._made: dict[_Key, int] = {}
        self._posted: dict[_Key, int] = {}
        self._way_free: dict[tuple[int, int], int] = {}
        place = [0] * ranks
        waiting = True
        while waiting:
            waiting = False
            for rank, actions in enumerate(schedule.actions):
                while place[rank] < len(actions) and self._try(rank, actions[place[rank]]):
                    place[rank] += 1
                    waiting = True
        assert all(at == len(actions) for at, actions in zip(place, schedule.actions, strict=True))
        self.name, self.microbatch, self.after, self.cost, self.share = zip(*self._events, strict=True)

    def name_of(self, what: int, action: Action, bucket: int = 0) -> int:
        """Returns the number of what happens to an action, without its microbatch."""
        kind, stage, _ = action
        return self._first[what, kind] + stage * (self._num_buckets + 1) + bucket

    def _event(self, name: int, microbatch: int, after: tuple[int, ...], cost: int = 0, share: float = 1.0) -> int:
        self._events.append((name, microbatch, after, cost, share))
        depths = self.depth
        depth = 0
        for event in after:
            if depths[event] > depth:
                depth = depths[event]
        depths.append(depth + 1)
        return len(depths) - 1

    def _try(self, rank: int, action: Action) -> bool:
        if action.kind in COMPUTE:
            return self._compute(rank, action)
        if action.kind in TRANSFERS:
            return self._transfer(rank, action)
        self._copy(rank, action)
        return True

    def _compute(self, rank: int, action: Action) -> bool:
        kind, stage, microbatch = action
        source = stage - 1 if kind is Kind.FORWARD else stage + 1
        after = (self._free[rank], self._due[rank]) if self._due[rank] else (self._free[rank],)
        if kind is not Kind.WEIGHT_GRAD and 0 <= source < len(self._rank_of):
            if self._with_transfers and self._rank_of[source] != rank:
                receive = Kind.RECV_FORWARD if kind is Kind.FORWARD else Kind.RECV_BACKWARD
                ready = self._done.get((receive, stage, microbatch))
            else:
                need = Kind.FORWARD if kind is Kind.FORWARD else Kind.INPUT_GRAD
                ready = self._made.get((need, source, microbatch))
            if ready is None:
                return False
            after = (*after, ready)
        if kind in GRADIENTS_OF_INPUT and (reload := self._done.get((Kind.RELOAD, stage, microbatch))):
            after = (*after, reload)
        cost = self._row[_OF_KIND[kind]] + stage
        self._due[rank] = self._copied[Kind.OFFLOAD][rank]
        fills = action in self._fills_buckets
        if fills:
            after = (self._event(self.name_of(START, action), microbatch, after),)
        self._free[rank] = stop = self._event(self.name_of(STOP, action), microbatch, after, cost)
        if fills:
            row = self._row["bucket"] + stage
            for number in range(1, self._num_buckets + 1):
                share = number / self._num_buckets
                full = self._event(self.name_of(FULL, action, number), microbatch, after, cost, share)
                before = (self._reduced[rank], full) if self._reduced[rank] else (full,)
                self._reduced[rank] = self._event(self.name_of(REDUCED, action, number), microbatch, before, row)
        if kind is not Kind.WEIGHT_GRAD:
            self._made[Kind.INPUT_GRAD if kind is Kind.BACKWARD else kind, stage, microbatch] = stop
        return True

    def _copy(self, rank: int, action: Action) -> None:
        after: tuple[int, ...] = (self._free[rank], self._copied[action.kind][rank])
        if action.kind is Kind.RELOAD:
            after = (*after, self._done[Kind.OFFLOAD, action.stage, action.microbatch], self._due[rank])
        cost = self._row[_OF_KIND[action.kind]] + action.stage
        stop = self._event(self.name_of(STOP, action), action.microbatch, after, cost)
        self._copied[action.kind][rank] = self._done[action] = stop

    def _transfer(self, rank: int, action: Action) -> bool:
        if action not in self._posted:
            self._posted[action] = self._free[rank]
            other = other_end(action)
            if other in self._posted:
                send, receive = (other, action) if action.kind in RECEIVES else (action, other)
                way = (self._rank_of[send.stage], self._rank_of[receive.stage])
                after = (self._posted[send], self._posted[receive], self._way_free.get(way, BEGIN))
                boundary, microbatch = min(action.stage, other.stage), action.microbatch
                cost = self._row["transfer"] + boundary
                left = self._event(self.name_of(LEFT, send), microbatch, after, cost)
                cost = self._row["latency"] + boundary
                arrived = self._event(self.name_of(ARRIVED, send), microbatch, (left,), cost)
                self._way_free[way] = left
                self._done[action] = self._done[other] = arrived
        if self._blocking:
            if action not in self._done:
                return False
            self._free[rank] = self._done[action]
        return True
