"""The step time of one schedule for many costs at once.

The start of each event of a schedule is the maximum over a fixed set of earlier events, plus a cost (events.py).
`ScheduleGraph` finds these sets once. `makespans` then computes the step time for K different costs together, with the same
sums in the same order as the simulator, so the results are equal to the last bit.

[Note: schedules that repeat themselves]
With many microbatches a schedule is a head, a block of events that is repeated, and a tail. A block reads the times of a few
events before it, the border, and gives the times of the border of the next block. Maxima and sums commute with a constant
that is added to all times. So if a whole border is later than one some blocks before by the same number of seconds for each
of its events, it will be so after every further block, and the remaining blocks need not be played. If this never happens,
all of them are.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron.planner.schedule.events import BEGIN, COSTS, Events
from megatron.schedule.schedule import Schedule

_Array = NDArray[np.float64]
_Places = NDArray[np.intp]
# Borders are compared with so many earlier ones, after the 3rd block, the 4th, the 6th, the 9th, and so on.
_EARLIER = 16
_GROWTH = 1.4
# Of a time: the rounding of some hundred sums. Extended over a thousand blocks it is below 1e-10.
_ROUNDING = 1e-13


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
        return cls(**{name: np.concatenate([getattr(costs, name) for costs in many], axis=1) for name in COSTS[1:]})

    def take(self, which: NDArray[np.int64]) -> ManyCosts:
        """Returns those of some columns."""
        return ManyCosts(**{name: getattr(self, name)[:, which] for name in COSTS[1:]})

    def rows(self) -> _Array:
        """All costs as one array, in the order of `COSTS`, after one row of zeros."""
        return np.concatenate([np.zeros_like(self.forward[:1]), *(getattr(self, name) for name in COSTS[1:])])


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

    members: the events. border: the events before them that they may wait for, in order. after_it: the events whose times
    are the border of what follows, of the members or of the border.
    """

    def __init__(self, waits: Waits, members: _Places, border: _Places, after_it: _Places) -> None:
        order = members[np.argsort(waits.depth[members], kind="stable")]
        place = np.zeros(len(waits.cost), dtype=np.intp)
        place[border] = np.arange(len(border))
        place[order] = np.arange(len(border), len(border) + len(order))
        self._costs, self._shares = waits.cost[order], waits.share[order][:, None]
        self._after_it = place[after_it]
        # Events of one depth do not depend on each other and are computed together.
        depth, places, counts = waits.depth[order], place[waits.events[order]], waits.counts[order]
        starts = np.flatnonzero(np.diff(depth, prepend=-1))
        self._levels = []
        if len(order):
            for first, last, width in zip(
                starts, [*starts[1:], len(order)], np.maximum.reduceat(counts, starts), strict=True
            ):
                here = slice(first + len(border), last + len(border))
                self._levels.append((here, slice(first, last), places[first:last, :width].copy()))

    def costs(self, rows: _Array) -> _Array:
        """Returns [members, K] seconds, of `ManyCosts.rows`."""
        seconds: _Array = rows[self._costs] * self._shares
        return seconds

    def times(self, border: _Array, costs: _Array) -> _Array:
        """Returns [border and members, K] times."""
        times = np.empty((len(border) + len(costs), border.shape[1]))
        times[: len(border)] = border
        for here, cost, waits in self._levels:
            times[here] = (times[waits].max(axis=1) if waits.shape[1] > 1 else times[waits[:, 0]]) + costs[cost]
        return times

    def border_after(self, times: _Array) -> _Array:
        """Returns the times of the next border."""
        border: _Array = times[self._after_it]
        return border


class ScheduleGraph:
    """The events of a schedule, each with the events that it waits for.

    num_buckets: of each stage, reduced behind its last backward; 0: nothing is reduced. blocking: see the simulator. The
    schedule must be one that the simulator can play.
    """

    def __init__(self, schedule: Schedule, *, num_buckets: int = 0, blocking: bool = False) -> None:
        waits = Waits.of(Events(schedule, num_buckets, blocking))
        begin = np.array([BEGIN])
        self._head = Segment(waits, np.arange(1, len(waits.cost)), begin, begin)

    def makespans(self, costs: ManyCosts) -> _Array:
        """[K] seconds until the last action has ended and the last bucket has been reduced."""
        rows = costs.rows()
        last: _Array = self._head.times(np.zeros_like(rows[:1]), self._head.costs(rows)).max(axis=0)
        return last


@dataclass(frozen=True)
class RepeatingGraph:
    """A schedule whose block is played `count` times. See [Note: schedules that repeat themselves]."""

    head: Segment
    block: Segment
    tail: Segment
    count: int

    def makespans(self, costs: ManyCosts) -> _Array:
        """[K] seconds until the last action has ended and the last bucket has been reduced."""
        rows = costs.rows()
        begin = np.zeros_like(rows[:1])
        border = self.head.border_after(self.head.times(begin, self.head.costs(rows)))
        border = self._after_blocks(border, self.block.costs(rows))
        last: _Array = self.tail.times(border, self.tail.costs(rows)).max(axis=0)
        return last

    def _after_blocks(self, border: _Array, costs: _Array) -> _Array:
        """Returns the border after the last block; columns of costs that repeat themselves are not played any further."""
        final = np.empty_like(border)
        left = np.arange(border.shape[1])  # columns that are still played
        earlier = [border]
        check = 3
        for played in range(1, self.count + 1):
            border = self.block.border_after(self.block.times(border, costs))
            if played == check and played < self.count:
                check = max(played + 1, int(_GROWTH * played))
                extended = self._extended(earlier, border, played)
                done = ~np.isnan(extended[0])
                final[:, left[done]] = extended[:, done]
                if done.all():
                    return final
                if done.any():
                    left, border, costs = left[~done], border[:, ~done], costs[:, ~done]
                    earlier = [each[:, ~done] for each in earlier]
            earlier = [*earlier[-_EARLIER + 1 :], border]
        final[:, left] = border
        return final

    def _extended(self, earlier: Sequence[_Array], border: _Array, played: int) -> _Array:
        """Returns the border after the last block, and nan in the columns that do not repeat themselves so far.

        earlier: the borders before `border`, the last one before it at the end.
        """
        found = np.full_like(border, np.nan)
        allowed = _ROUNDING * border.max(axis=0)
        for apart in range(1, len(earlier) + 1):
            later = border - earlier[-apart]
            alike = np.isnan(found[0]) & (later.max(axis=0) - later.min(axis=0) <= allowed)
            if alike.any():
                # The last border is so many times `apart` blocks later than one of those that were played.
                times = -(-(self.count - played) // apart)
                start = played + apart * times - self.count
                like = earlier[-start] if start else border
                found[:, alike] = like[:, alike] + times * later[:, alike].mean(axis=0)
        return found
