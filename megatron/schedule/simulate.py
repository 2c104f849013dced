"""Simulates a schedule: when each action begins and ends, and the waits of each rank. The rules are those of
events.py."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from megatron.schedule.costs import Costs
from megatron.schedule.events import BEGIN, COST_OF_KIND, Events
from megatron.schedule.graph import ScheduleGraph
from megatron.schedule.schedule import COMPUTE, TRANSFERS, Action, Schedule, other_end


class ActionInterval(NamedTuple):
    """The time of an action, in seconds from the start of the step. For a send or receive: while its data moved."""

    action: Action
    start: float
    stop: float


@dataclass(frozen=True)
class SimulatedTimeline:
    """The result of a simulation. `intervals` are those of each rank, in the order of its list; two computations that
    run together have intervals that overlap.

    `exposed` is the time in seconds that each rank was blocked by communication: the time that a network without cost
    would save it, with the rest of the schedule unchanged. `computing` is the time in seconds that each rank computes.
    `reduced` is when the last bucket of each rank has been
    reduced, 0 where none is.
    """

    schedule: Schedule
    intervals: tuple[tuple[ActionInterval, ...], ...]
    exposed: tuple[float, ...]
    computing: tuple[float, ...]
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
        return self.computing[rank]

    def bubble(self, rank: int) -> float:
        """Returns the fraction of the step in which the rank does not compute, for any reason."""
        return max(0.0, 1 - self.busy(rank) / self.makespan)

    def idle_inside(self, rank: int) -> float:
        """Returns that fraction between its first and its last computation, which the zero-bubble papers report."""
        intervals = self.computation(rank)
        last = max(interval.stop for interval in intervals)
        return max(0.0, 1 - self.busy(rank) / (last - intervals[0].start))


def simulate(
    schedule: Schedule, costs: Costs, *, num_buckets: int = 0, blocking: bool = False, exchanges: int = 0
) -> SimulatedTimeline:
    """Simulates the whole step for one case of costs.

    num_buckets: of each stage, reduced behind its last backward; 0: nothing is reduced. blocking: ranks are blocked by
    sends and receives. exchanges: of tokens, of a microbatch in each stage and direction. Raises ScheduleError if ranks
    deadlock, with the action of each.
    """
    events = Events(schedule, num_buckets, blocking, exchanges)
    times: list[float] = ScheduleGraph(events).times(costs)[:, 0].tolist()

    def interval(action: Action) -> ActionInterval:
        stop = events.done[action]
        if action.kind in TRANSFERS:
            begun = events.after[stop][0]  # the data leaves before it arrives
        else:
            begun = events.begun.get(action, stop)
        return ActionInterval(action, max(times[event] for event in events.after[begun]), times[stop])

    intervals = tuple(tuple(map(interval, actions)) for actions in schedule.actions)
    seconds = {kind: getattr(costs, COST_OF_KIND[kind])[:, 0].tolist() for kind in COMPUTE}
    exposed, computing = [], []
    for rank in range(schedule.placement.num_ranks):
        waits, busy, free = 0.0, 0.0, BEGIN
        unit_of = {unit[0]: unit for unit in schedule.units(rank)}
        for action in schedule.actions[rank]:
            if action in unit_of:
                unit = unit_of[action]
                sources = [source for member in unit if (source := events.source(member)) is not None]
                ready = max(times[free], *(times[events.done[source]] for source in sources), 0.0)
                computed = sum(seconds[kind][stage] for kind, stage, _ in unit)
                start = min(interval(member).start for member in unit)
                free = max((events.done[member] for member in unit), key=times.__getitem__)
                waits += start - ready
                if exchanges:
                    waits += times[free] - start - computed
                busy += computed
            elif blocking and action.kind in TRANSFERS:
                boundary = min(action.stage, other_end(action).stage)
                waits += float(costs.transfer[boundary, 0] + costs.latency[boundary, 0])
                free = events.done[action]
        exposed.append(waits)
        computing.append(busy)
    reduced = tuple(times[event] for event in events.reduced)
    return SimulatedTimeline(schedule, intervals, tuple(exposed), tuple(computing), reduced)
