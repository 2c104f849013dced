"""The times of a schedule's events for many costs at once.

The time of each event is the maximum over a fixed set of earlier events, plus a cost (events.py). These sets are found
once, and the times of K different costs are then computed together.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron.schedule.costs import Costs
from megatron.schedule.events import BEGIN, Events

_Array = NDArray[np.float64]
_Places = NDArray[np.intp]


@dataclass(frozen=True)
class Waits:
    """The events of a schedule as arrays.

    events: [E, most waits] of the events that each one waits for, some of them more than once; counts: columns without
    those that only repeat. cost, share, depth: [E], see `Events`.
    """

    events: _Places
    counts: _Places
    cost: _Places
    share: _Array
    depth: _Places

    @classmethod
    def of(cls, events: Events) -> Waits:
        """Returns the arrays of a schedule."""
        counts = np.fromiter(map(len, events.after), dtype=np.intp)
        flat = np.fromiter(itertools.chain.from_iterable(events.after), dtype=np.intp)
        starts = np.cumsum(counts) - counts
        columns = np.arange(counts.max())
        places = flat[starts[:, None] + np.where(columns < counts[:, None], columns, 0)]
        # An event that waits for another one has no need to wait for BEGIN.
        places = np.where(places == BEGIN, places.max(axis=1, keepdims=True), places)
        return cls(places, counts, np.array(events.cost), np.array(events.share), np.array(events.depth))


class Segment:
    """Some events of a schedule, after those of a border.

    members: the events. border: the events before them that they may wait for, in order. next_border: the events, of
    the members or of the border, whose times are the border of the next segment.
    """

    def __init__(self, waits: Waits, members: _Places, border: _Places, next_border: _Places) -> None:
        order = members[np.argsort(waits.depth[members], kind="stable")]
        place = np.zeros(len(waits.cost), dtype=np.intp)
        place[border] = np.arange(len(border))
        place[order] = np.arange(len(border), len(border) + len(order))
        self._costs, self._shares = waits.cost[order], waits.share[order][:, None]
        self._next_border = place[next_border]
        # Events of one depth do not depend on each other and are computed together.
        depth, places, counts = waits.depth[order], place[waits.events[order]], waits.counts[order]
        starts = np.flatnonzero(np.diff(depth, prepend=-1))
        self._levels = []
        if len(order):
            for first, last, width in zip(
                starts, [*starts[1:], len(order)], np.maximum.reduceat(counts, starts), strict=True
            ):
                rows = slice(first + len(border), last + len(border))
                self._levels.append((rows, slice(first, last), places[first:last, :width].copy()))

    def costs(self, rows: _Array) -> _Array:
        """Returns [members, K] seconds, of `Costs.rows`."""
        seconds: _Array = rows[self._costs] * self._shares
        return seconds

    def times(self, border: _Array, costs: _Array) -> _Array:
        """Returns [border and members, K] times."""
        times = np.empty((len(border) + len(costs), border.shape[1]))
        times[: len(border)] = border
        for rows, cost, waits in self._levels:
            times[rows] = (times[waits].max(axis=1) if waits.shape[1] > 1 else times[waits[:, 0]]) + costs[cost]
        return times

    def border_after(self, times: _Array) -> _Array:
        """Returns the times of the next border."""
        border: _Array = times[self._next_border]
        return border


class ScheduleGraph:
    """All events of a schedule as one segment."""

    def __init__(self, events: Events) -> None:
        waits = Waits.of(events)
        numbers = np.arange(len(waits.cost))
        self._segment = Segment(waits, numbers[1:], numbers[:1], numbers)

    def makespans(self, costs: Costs) -> _Array:
        """Returns [K] seconds until the last action has ended and the last bucket has been reduced."""
        last: _Array = self._times(costs).max(axis=0)
        return last

    def times(self, costs: Costs) -> _Array:
        """Returns [E, K] seconds of all events, in their order."""
        return self._segment.border_after(self._times(costs))

    def _times(self, costs: Costs) -> _Array:
        rows = costs.rows()
        return self._segment.times(np.zeros_like(rows[:1]), self._segment.costs(rows))
