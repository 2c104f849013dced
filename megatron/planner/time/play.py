"""The time of a pipeline's schedule, for many runs and costs at once."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron.planner.schedule.graph import ManyCosts, ScheduleGraph
from megatron.schedule.passes import with_transfers
from megatron.schedule.spec import ScheduleSpec

_LEAST_PLAYED = 16  # microbatches; a schedule is played with at least 2 p or p + 16 of them, and extended from there


@dataclass(frozen=True)
class PlayShape:
    """A schedule without its number of microbatches. v: virtual stages per rank. buckets: per stage."""

    schedule: ScheduleSpec
    p: int
    v: int
    group: int | None
    overlap: bool
    blocking: bool
    buckets: int

    def lengths(self, m: int) -> tuple[int, int]:
        """Returns the numbers of microbatches with which the schedule of m is played, equal if m is one of them.

        With many microbatches a schedule repeats itself: it is played with two small numbers of them that are one period
        apart, and the time of a period is added for all others.
        """
        step = (self.group or self.p) if self.schedule.takes_groups else 1
        few = max(_LEAST_PLAYED, min(2 * self.p, self.p + _LEAST_PLAYED))
        few += (m - few) % step
        return (m, m) if m <= few + step else (few, few + step)


@dataclass(frozen=True)
class Play:
    """A schedule of m microbatches, with K costs."""

    shape: PlayShape
    m: int
    costs: ManyCosts


def makespans(plays: Sequence[Play]) -> list[NDArray[np.float64]]:
    """Returns the [K] seconds of each. Those of the same shape are computed together."""
    together: dict[tuple[PlayShape, int], list[int]] = {}
    for number, play in enumerate(plays):
        for length in set(play.shape.lengths(play.m)):
            together.setdefault((play.shape, length), []).append(number)
    times: dict[tuple[int, int], NDArray[np.float64]] = {}
    for (shape, length), numbers in together.items():
        found = _graph(shape, length).makespans(ManyCosts.joined([plays[number].costs for number in numbers]))
        ends = np.cumsum([plays[number].costs.forward.shape[1] for number in numbers])[:-1]
        for number, part in zip(numbers, np.split(found, ends), strict=True):
            times[number, length] = part
    results = []
    for number, play in enumerate(plays):
        few, more = play.shape.lengths(play.m)
        short, longer = times[number, few], times[number, more]
        results.append(short if few == more else short + (play.m - few) / (more - few) * (longer - short))
    return results


@functools.lru_cache(maxsize=1024)
def _graph(shape: PlayShape, m: int) -> ScheduleGraph:
    schedule = shape.schedule
    asked = shape.v if schedule.virtual_stages is None else None
    played = with_transfers(schedule.build(shape.p, m, v=asked, group=shape.group), overlap=shape.overlap)
    return ScheduleGraph(played, num_buckets=shape.buckets, blocking=shape.blocking)
