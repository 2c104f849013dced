"""Simulates a schedule with given costs: when each action begins and ends, and the waits of each rank.

The rules are the engine's: A rank runs its list in order. A computation starts when the rank is free and its inputs
have arrived. Sends and receives are posted at their position in the list and do not block the rank; a transfer begins
when both are posted and the previous one from the same rank to the same rank has left. OFFLOAD and RELOAD are
overlapped with computation, each kind sequentially: the backward waits for its RELOAD, and an OFFLOAD has one
computation to finish; the next computation or RELOAD waits for it.

With `Costs.blocking`, instead, a rank is blocked at a send or a receive until the other end has reached it and the data
has moved: the minimum that a transport can do.

The reductions of gradients are no actions of a list: they start as the buckets fill. The last backward of a stage that
computes gradients of weights fills its buckets at equal distances, the last one when it ends, and a rank reduces its buckets
one after the other, overlapped with computation. The step ends after the last one.

A schedule without sends and receives is simulated with its dependencies alone: data is available on all ranks
immediately.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

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


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Costs in seconds. `forward`, `input_grad`, `weight_grad` and `backward` (a whole one) have one number per stage.

    `transfer` is the time for which a send occupies the link from one rank to another; `latency` the time from then
    until the data arrives. Both have one number per boundary between stages: number b is that between stages b and b + 1,
    in both directions. `offload` and `reload` are one copy of the offloaded activations of a microbatch, one number per
    stage. `buckets`: for each stage the reductions of its buckets of gradients, in the order in which its backward fills
    them; empty if nothing is reduced during the step. For `blocking` see the module.
    """

    forward: tuple[float, ...]
    input_grad: tuple[float, ...]
    weight_grad: tuple[float, ...]
    backward: tuple[float, ...]
    latency: tuple[float, ...]
    transfer: tuple[float, ...]
    offload: tuple[float, ...]
    reload: tuple[float, ...]
    buckets: tuple[tuple[float, ...], ...] = ()
    blocking: bool = False

    @classmethod
    def uniform(
        cls,
        num_stages: int,
        *,
        forward: float = 1.0,
        input_grad: float = 1.0,
        weight_grad: float = 1.0,
        backward: float | None = None,
        latency: float = 0.0,
        transfer: float = 0.0,
        offload: float = 0.0,
        reload: float = 0.0,
        buckets: tuple[float, ...] = (),
        blocking: bool = False,
    ) -> Costs:
        """Returns equal costs for every stage and boundary. `backward` is by default the sum of its halves."""
        backward = input_grad + weight_grad if backward is None else backward
        return cls(
            forward=(forward,) * num_stages,
            input_grad=(input_grad,) * num_stages,
            weight_grad=(weight_grad,) * num_stages,
            backward=(backward,) * num_stages,
            latency=(latency,) * (num_stages - 1),
            transfer=(transfer,) * (num_stages - 1),
            offload=(offload,) * num_stages,
            reload=(reload,) * num_stages,
            buckets=(buckets,) * num_stages if buckets else (),
            blocking=blocking,
        )

    def of(self, kind: Kind) -> tuple[float, ...]:
        """Returns the seconds of a kind of computation, one number per stage."""
        by_kind: dict[Kind, tuple[float, ...]] = {
            Kind.FORWARD: self.forward,
            Kind.BACKWARD: self.backward,
            Kind.INPUT_GRAD: self.input_grad,
            Kind.WEIGHT_GRAD: self.weight_grad,
        }
        return by_kind[kind]


class ActionInterval(NamedTuple):
    """The time of an action, in seconds from the start of the step. For a send or receive: while its data moved."""

    action: Action
    start: float
    stop: float


@dataclass(frozen=True)
class SimulatedTimeline:
    """The result of a simulation. `intervals` are those of each rank, in the order of its list.

    `exposed` is the time in seconds that each rank was blocked by communication: the time that a network without cost
    would save it, with the rest of the schedule unchanged. `reduced` is when the last bucket of each rank has been reduced,
    0 where none is.
    """

    schedule: Schedule
    intervals: tuple[tuple[ActionInterval, ...], ...]
    exposed: tuple[float, ...]
    reduced: tuple[float, ...]

    @cached_property
    def makespan(self) -> float:
        """Seconds until the last rank has finished its actions and the reduction of its buckets."""
        return max(*(interval.stop for intervals in self.intervals for interval in intervals), *self.reduced)

    def computation(self, rank: int) -> list[ActionInterval]:
        """Returns the intervals in which the rank computes."""
        return [interval for interval in self.intervals[rank] if interval.action.kind in COMPUTE]

    def busy(self, rank: int) -> float:
        """Returns the seconds of computation."""
        return sum(interval.stop - interval.start for interval in self.computation(rank))

    def bubble(self, rank: int) -> float:
        """Returns the fraction of the step in which the rank does not compute, for any reason."""
        return max(0.0, 1 - self.busy(rank) / self.makespan)

    def idle_inside(self, rank: int) -> float:
        """Returns that fraction between its first and its last computation, which the zero-bubble papers report."""
        intervals = self.computation(rank)
        return max(0.0, 1 - self.busy(rank) / (intervals[-1].stop - intervals[0].start))


def simulate(schedule: Schedule, costs: Costs) -> SimulatedTimeline:
    """Simulates the whole step. Raises ScheduleError if ranks deadlock, with the action of each."""
    play = _Play(schedule, costs)
    ready = list(range(schedule.placement.num_ranks))
    while ready:
        ready += play.advance(ready.pop())
    play.check_finished()
    return SimulatedTimeline(schedule, play.in_list_order(), tuple(play.exposed), tuple(play.reduced))


def last_weight_grads(schedule: Schedule) -> dict[Action, int]:
    """Returns the last action that computes gradients of weights of each stage -> the rank that runs it."""
    last: dict[int, tuple[Action, int]] = {}
    for rank, actions in enumerate(schedule.actions):
        for action in actions:
            if action.kind in GRADIENTS_OF_WEIGHTS:
                last[action.stage] = action, rank
    return dict(last.values())


class _Play:
    """The state of a simulation. The order of processing does not matter: a time depends on earlier times only."""

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        ranks = schedule.placement.num_ranks
        self._schedule, self._costs, self._rank_of = schedule, costs, schedule.placement.rank_of
        self._seconds = {kind: costs.of(kind) for kind in COMPUTE}
        self._with_transfers = any(action.kind in TRANSFERS for actions in schedule.actions for action in actions)
        self._next = [0] * ranks  # index in the rank's list
        self._free = [0.0] * ranks  # when the rank has finished its actions so far
        self.exposed = [0.0] * ranks
        self.reduced = [0.0] * ranks  # when the rank's buckets that are full have been reduced
        self._fills_buckets = last_weight_grads(schedule) if costs.buckets else {}
        # when the rank's copies of this direction have finished
        self._copied = {kind: [0.0] * ranks for kind in COPIES}
        self._due = [0.0] * ranks  # when the offloads whose computation has ended have finished
        self._reloaded: dict[Action, float] = {}
        self._made: dict[Action, float] = {}  # FORWARD or, for a backward of either form, INPUT_GRAD -> when made
        self._posted: dict[Action, float] = {}  # send or receive -> when posted
        self._moved: dict[Action, float] = {}  # send or receive -> when the data has arrived
        self._way_free: dict[tuple[int, int], float] = {}  # (from rank, to rank) -> when the last transfer has left
        self._intervals: dict[Action, ActionInterval] = {}
        self._waiting: dict[Action, list[int]] = {}  # action -> ranks that can continue when it is computed or moved
        self._woken: list[int] = []

    def advance(self, rank: int) -> list[int]:
        """Runs the rank's list as far as possible; returns the ranks that can continue because of it."""
        actions = self._schedule.actions[rank]
        self._woken = []
        while self._next[rank] < len(actions):
            missing = self._try(rank, actions[self._next[rank]])
            if missing is not None:
                self._waiting.setdefault(missing, []).append(rank)
                break
            self._next[rank] += 1
        return self._woken

    def check_finished(self) -> None:
        """Raises ScheduleError unless every list has ended, and every transfer has happened."""
        stuck = []
        for missing, ranks in self._waiting.items():
            stuck += [
                f"rank {rank} at {self._schedule.actions[rank][self._next[rank]]}, for {missing}" for rank in ranks
            ]
        if stuck:
            raise ScheduleError(f"{self._schedule.name}: ranks wait for each other: {'; '.join(sorted(stuck))}")
        if alone := [str(action) for action in self._posted if action not in self._moved]:
            raise ScheduleError(f"{self._schedule.name}: nothing at the other end of {', '.join(alone)}")

    def in_list_order(self) -> tuple[tuple[ActionInterval, ...], ...]:
        """Returns the interval of each action, in the order of the ranks' lists."""
        return tuple(tuple(map(self._intervals.__getitem__, actions)) for actions in self._schedule.actions)

    def _try(self, rank: int, action: Action) -> Action | None:
        """Runs an action, or returns the action for which it waits."""
        if action.kind in COMPUTE:
            return self._compute(rank, action)
        if action.kind in TRANSFERS:
            return self._transfer(rank, action)
        self._copy(rank, action)
        return None

    def _compute(self, rank: int, action: Action) -> Action | None:
        """Runs a computation; results of the rank itself are ready, because its list is run in order."""
        kind, stage, microbatch = action
        there = made = self._free[rank]  # when the input is here, and when it was computed
        source = stage - 1 if kind is Kind.FORWARD else stage + 1
        if kind is not Kind.WEIGHT_GRAD and 0 <= source < len(self._rank_of):
            if self._with_transfers and self._rank_of[source] != rank:
                receive = Action(Kind.RECV_FORWARD if kind is Kind.FORWARD else Kind.RECV_BACKWARD, stage, microbatch)
                if receive not in self._moved:
                    return receive
                there = max(there, self._moved[receive])
            need = Action(Kind.FORWARD if kind is Kind.FORWARD else Kind.INPUT_GRAD, source, microbatch)
            if need not in self._made:
                return need
            made = max(made, self._made[need])
        start = max(there, made)
        if kind in GRADIENTS_OF_INPUT:
            start = max(start, self._reloaded.get(Action(Kind.RELOAD, stage, microbatch), 0.0))
        start = max(start, self._due[rank])
        self._due[rank] = self._copied[Kind.OFFLOAD][rank]
        stop = self._free[rank] = start + self._seconds[kind][stage]
        self.exposed[rank] += start - made
        self._intervals[action] = ActionInterval(action, start, stop)
        if action in self._fills_buckets:
            self._reduce(rank, action)
        if kind is not Kind.WEIGHT_GRAD:
            result = action if kind is not Kind.BACKWARD else Action(Kind.INPUT_GRAD, stage, microbatch)
            self._made[result] = stop
            self._wake(result)
        return None

    def _reduce(self, rank: int, action: Action) -> None:
        """Reduces the buckets that the backward `action` fills."""
        start, buckets = self._intervals[action].start, self._costs.buckets[action.stage]
        seconds = self._seconds[action.kind][action.stage]
        for number, reduction in enumerate(buckets, start=1):
            full = start + number / len(buckets) * seconds
            self.reduced[rank] = max(self.reduced[rank], full) + reduction

    def _copy(self, rank: int, action: Action) -> None:
        """Runs a copy; a reload may wait for its own offload on the same rank, and the validator checks their order."""
        begun, seconds = self._free[rank], self._costs.offload[action.stage]
        if action.kind is Kind.RELOAD:
            begun = max(
                begun, self._intervals[Action(Kind.OFFLOAD, action.stage, action.microbatch)].stop, self._due[rank]
            )
            seconds = self._costs.reload[action.stage]
        start = max(begun, self._copied[action.kind][rank])
        stop = self._copied[action.kind][rank] = start + seconds
        self._intervals[action] = ActionInterval(action, start, stop)
        if action.kind is Kind.RELOAD:
            self._reloaded[action] = stop

    def _transfer(self, rank: int, action: Action) -> Action | None:
        if action not in self._posted:
            self._posted[action] = self._free[rank]
            other = other_end(action)
            if other in self._posted:
                self._move(action, other)
        if self._costs.blocking:
            if action not in self._moved:
                return action
            self._free[rank] = self._moved[action]
            boundary = min(action.stage, other_end(action).stage)
            self.exposed[rank] += self._costs.transfer[boundary] + self._costs.latency[boundary]
        return None

    def _move(self, action: Action, other: Action) -> None:
        way = (self._rank_of[action.stage], self._rank_of[other.stage])
        if action.kind in RECEIVES:
            way = way[::-1]
        start = max(self._posted[action], self._posted[other], self._way_free.get(way, 0.0))
        boundary = min(action.stage, other.stage)
        self._way_free[way] = start + self._costs.transfer[boundary]
        stop = start + self._costs.transfer[boundary] + self._costs.latency[boundary]
        for end in (action, other):
            self._moved[end] = stop
            self._intervals[end] = ActionInterval(end, start, stop)
            self._wake(end)

    def _wake(self, what: Action) -> None:
        if what in self._waiting:
            self._woken += self._waiting.pop(what)
