"""The step time of one schedule for many costs at once.

The order of all events of a schedule is known before the costs are (megatron/schedule/simulate.py has the rules), so the
start of each event is the maximum over a fixed set of earlier events, plus a cost. `ScheduleGraph` finds these sets
once. `makespans` then computes the step time for K different costs together, with the same sums in the same order as
the simulator, so the results are equal to the last bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

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

_Array = NDArray[np.float64]
_COSTS = (
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


@dataclass(frozen=True, kw_only=True)
class ManyCosts:
    """K costs of a schedule, in seconds; see `schedule.simulate.Costs`.

    [stages, K]: forward, input_grad, weight_grad, backward, offload, reload, and bucket, the reduction of one of the
    `num_buckets` equal buckets of a stage. [stages - 1, K]: transfer, latency.
    """

    forward: _Array
    input_grad: _Array
    weight_grad: _Array
    backward: _Array
    transfer: _Array
    latency: _Array
    offload: _Array
    reload: _Array
    bucket: _Array

    @classmethod
    def joined(cls, many: Sequence[ManyCosts]) -> ManyCosts:
        """Returns the costs of all, one after the other."""
        if len(many) == 1:
            return many[0]
        return cls(**{name: np.concatenate([getattr(costs, name) for costs in many], axis=1) for name in _COSTS[1:]})

    def rows(self) -> _Array:
        """All costs as one array, in the order of `_COSTS`, after one row of zeros."""
        return np.concatenate([np.zeros_like(self.forward[:1]), *(getattr(self, name) for name in _COSTS[1:])])


class ScheduleGraph:
    """The events of a schedule, each with the events that it waits for.

    num_buckets: of each stage, reduced behind its last backward; 0: nothing is reduced. blocking: see the simulator. The
    schedule must be one that the simulator can play.
    """

    def __init__(self, schedule: Schedule, *, num_buckets: int = 0, blocking: bool = False) -> None:
        self._stages = schedule.placement.num_stages
        events = _Events(schedule, self._stages, num_buckets, blocking)
        self._last = np.array(events.ends)
        # Events are computed in groups that do not depend on each other.
        depth = np.zeros(len(events.after), dtype=int)
        for event, after in enumerate(events.after):
            depth[event] = 1 + max((depth[other] for other in after), default=-1)
        self._groups = []
        order = np.argsort(depth, kind="stable")
        for group in np.split(order, np.flatnonzero(np.diff(depth[order])) + 1):
            width = max(1, *(len(events.after[event]) for event in group), 1)
            # Time 0 is event 0, which waits for nothing.
            waits = np.array([[*events.after[event], *[0] * (width - len(events.after[event]))] for event in group])
            costs = np.array([events.cost[event] for event in group])
            shares = np.array([events.share[event] for event in group])
            self._groups.append((group, waits, costs, shares[:, None]))
        self._count = len(events.after)

    def makespans(self, costs: ManyCosts) -> _Array:
        """[K] seconds until the last action has ended and the last bucket has been reduced."""
        rows = costs.rows()
        times = np.zeros((self._count, rows.shape[1]))
        for group, waits, cost, share in self._groups[1:]:
            times[group] = times[waits].max(axis=1) + share * rows[cost]
        last: _Array = times[self._last].max(axis=0)
        return last


class _Events:
    """The simulator's play, with events in place of times.

    after: the events that each one waits for. cost, share: the row of `ManyCosts` that it takes, and how much of it. ends:
    events that end the step.
    """

    def __init__(self, schedule: Schedule, stages: int, num_buckets: int, blocking: bool) -> None:
        self.after: list[tuple[int, ...]] = [()]
        self.cost, self.share = [0], [0.0]
        self.ends = [0]
        starts = [0, 1]
        for name in _COSTS[1:-1]:
            starts.append(starts[-1] + (stages - 1 if name in ("transfer", "latency") else stages))
        self._row = dict(zip(_COSTS, starts, strict=True))
        ranks = schedule.placement.num_ranks
        self._schedule, self._rank_of, self._blocking = schedule, schedule.placement.rank_of, blocking
        self._num_buckets = num_buckets
        self._with_transfers = any(action.kind in TRANSFERS for actions in schedule.actions for action in actions)
        self._fills_buckets = last_weight_grads(schedule) if num_buckets else {}
        self._free, self._due, self._reduced = [0] * ranks, [0] * ranks, [0] * ranks
        self._copied = {kind: [0] * ranks for kind in COPIES}
        self._done: dict[Action, int] = {}  # of a transfer: arrived
        self._made: dict[Action, int] = {}
        self._posted: dict[Action, int] = {}
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
        self.ends += [*self._free, *self._reduced, *(event for copied in self._copied.values() for event in copied)]

    def _event(self, after: tuple[int, ...], cost: str = "none", number: int = 0, share: float = 1.0) -> int:
        self.after.append(tuple(dict.fromkeys(after)))
        self.cost.append(self._row[cost] + number if cost != "none" else 0)
        self.share.append(share)
        return len(self.after) - 1

    def _try(self, rank: int, action: Action) -> bool:
        if action.kind in COMPUTE:
            return self._compute(rank, action)
        if action.kind in TRANSFERS:
            return self._transfer(rank, action)
        self._copy(rank, action)
        return True

    def _compute(self, rank: int, action: Action) -> bool:
        kind, stage, microbatch = action
        after = [self._free[rank], self._due[rank]]
        source = stage - 1 if kind is Kind.FORWARD else stage + 1
        if kind is not Kind.WEIGHT_GRAD and 0 <= source < len(self._rank_of):
            if self._with_transfers and self._rank_of[source] != rank:
                receive = Action(Kind.RECV_FORWARD if kind is Kind.FORWARD else Kind.RECV_BACKWARD, stage, microbatch)
                if receive not in self._done:
                    return False
                after.append(self._done[receive])
            need = Action(Kind.FORWARD if kind is Kind.FORWARD else Kind.INPUT_GRAD, source, microbatch)
            if need not in self._made:
                return False
            after.append(self._made[need])
        if kind in GRADIENTS_OF_INPUT:
            after.append(self._done.get(Action(Kind.RELOAD, stage, microbatch), 0))
        start = self._event(tuple(after))
        self._due[rank] = self._copied[Kind.OFFLOAD][rank]
        self._free[rank] = stop = self._event((start,), _OF_KIND[kind], stage)
        if action in self._fills_buckets:
            for number in range(1, self._num_buckets + 1):
                full = self._event((start,), _OF_KIND[kind], stage, number / self._num_buckets)
                self._reduced[rank] = self._event((self._reduced[rank], full), "bucket", stage)
        if kind is not Kind.WEIGHT_GRAD:
            self._made[action if kind is not Kind.BACKWARD else Action(Kind.INPUT_GRAD, stage, microbatch)] = stop
        return True

    def _copy(self, rank: int, action: Action) -> None:
        after = [self._free[rank], self._copied[action.kind][rank]]
        if action.kind is Kind.RELOAD:
            after += [self._done[Action(Kind.OFFLOAD, action.stage, action.microbatch)], self._due[rank]]
        stop = self._event(tuple(after), _OF_KIND[action.kind], action.stage)
        self._copied[action.kind][rank] = self._done[action] = stop

    def _transfer(self, rank: int, action: Action) -> bool:
        other = other_end(action)
        if action not in self._posted:
            self._posted[action] = self._free[rank]
            if other in self._posted:
                way = (self._rank_of[action.stage], self._rank_of[other.stage])
                way = way[::-1] if action.kind in RECEIVES else way
                after = (self._posted[action], self._posted[other], self._way_free.get(way, 0))
                boundary = min(action.stage, other.stage)
                self._way_free[way] = self._event(after, "transfer", boundary)
                arrived = self._event((self._way_free[way],), "latency", boundary)
                self._done[action] = self._done[other] = arrived
        if self._blocking:
            if action not in self._done:
                return False
            self._free[rank] = self._done[action]
        return True
