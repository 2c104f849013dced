"""Simulates a schedule: when each action begins and ends, and the waits of each rank. The rules are those of
events.py."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from megatron.schedule.costs import Costs
from megatron.schedule.events import BEGIN, Events
from megatron.schedule.graph import ScheduleGraph
from megatron.schedule.schedule import COMPUTE, TRANSFERS, Action, Schedule, other_end


class ActionInterval(NamedTuple):
    """The time of an action, in seconds from the start of the step. For a send or receive: while its data moved."""

    action: Action
    start: float
    stop: float


@dataclass(frozen=True)
class SimulatedTimeline:
    """The result of a simulation. `intervals` are those of each rank, in the order of its list.

    `exposed` is the time in seconds that each rank was blocked by communication: the time that a network without cost
    would save it, with the rest of the schedule unchanged. `reduced` is when the last bucket of each rank has been
    reduced, 0 where none is.
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


def simulate(schedule: Schedule, costs: Costs, *, num_buckets: int = 0, blocking: bool = False) -> SimulatedTimeline:
    """Simulates the whole step for one case of costs.

    num_buckets: of each stage, reduced behind its last backward; 0: nothing is reduced. blocking: ranks are blocked by
    sends and receives. Raises ScheduleError if ranks deadlock, with the action of each.
    """
    events = Events(schedule, num_buckets, blocking)
    times: list[float] = ScheduleGraph(events).times(costs)[:, 0].tolist()

    def interval(action: Action) -> ActionInterval:
        stop = events.done[action]
        begun = events.after[stop][0] if action.kind in TRANSFERS else stop  # the data leaves before it arrives
        return ActionInterval(action, max(times[event] for event in events.after[begun]), times[stop])

    intervals = tuple(tuple(map(interval, actions)) for actions in schedule.actions)
    exposed = []
    for rank_intervals in intervals:
        seconds, free = 0.0, BEGIN
        for action, start, _ in rank_intervals:
            if action.kind in COMPUTE:
                source = events.source(action)
                ready = times[free] if source is None else max(times[free], times[events.done[source]])
                seconds += start - ready
                free = events.done[action]
            elif blocking and action.kind in TRANSFERS:
                boundary = min(action.stage, other_end(action).stage)
                seconds += float(costs.transfer[boundary, 0] + costs.latency[boundary, 0])
                free = events.done[action]
        exposed.append(seconds)
    return SimulatedTimeline(schedule, intervals, tuple(exposed), tuple(times[event] for event in events.reduced))
