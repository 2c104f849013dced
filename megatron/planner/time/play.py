"""The time of a pipeline's schedule, for many runs and costs at once."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron.planner.schedule.repeat import Repetition, find_repetition
from megatron.planner.schedule.repeating_graph import RepeatingGraph
from megatron.schedule.costs import Costs
from megatron.schedule.events import Events
from megatron.schedule.graph import ScheduleGraph
from megatron.schedule.offload_pass import with_offload
from megatron.schedule.passes import with_transfers
from megatron.schedule.schedule import Schedule
from megatron.schedule.spec import ScheduleSpec


@dataclass(frozen=True)
class PlayShape:
    """A schedule without its number of microbatches.

    v: virtual stages per rank. buckets: per stage. offload: it copies activations to host memory and back. pairs:
    forwards run together with backwards, whose exchanges of tokens have costs of their own.
    """

    schedule: ScheduleSpec
    p: int
    v: int
    group: int | None
    overlap: bool
    blocking: bool
    buckets: int
    offload: bool = False
    pairs: bool = False

    @property
    def exchanges(self) -> int:
        """Returns the exchanges of a microbatch in a stage that are played; with more of them, and shorter ones, the
        times hardly differ."""
        return 4 if self.pairs else 0

    @property
    def step(self) -> int:
        """Returns the number of microbatches after which the schedule may repeat itself."""
        return (self.group or self.p) if self.schedule.takes_groups else 1

    def computations(self, m: int) -> Schedule:
        """Returns the schedule of m microbatches without transfers and copies."""
        v = self.v if self.schedule.virtual_stages is None else None
        return self.schedule.build(self.p, m, v=v, group=self.group, pairs=self.pairs)

    def whole(self, m: int) -> Schedule:
        """Returns the schedule of m microbatches."""
        return _whole(dataclasses.replace(self, blocking=False, buckets=0), m)

    def lengths(self, m: int) -> Iterator[int]:
        """Yields the numbers of microbatches outside of blocks with which the schedule of m may repeat itself.

        Until the first backward and from the last forward on are at most 2 p microbatches, or three groups.
        """
        enough = 3 * self.step if self.schedule.takes_groups else 2 * self.p
        few = enough + (m - enough) % self.step
        while few + 2 * self.step < m:
            yield few
            few, enough = few + enough, 2 * enough


@dataclass(frozen=True)
class Play:
    """A schedule of m microbatches, with K costs."""

    shape: PlayShape
    m: int
    costs: Costs


def makespans(plays: Sequence[Play]) -> list[NDArray[np.float64]]:
    """Returns the [K] seconds of each. Those of the same shape and length are computed together."""
    together: dict[tuple[PlayShape, int], list[int]] = {}
    for number, play in enumerate(plays):
        together.setdefault((play.shape, play.m), []).append(number)
    times: dict[int, NDArray[np.float64]] = {}
    for (shape, m), numbers in together.items():
        seconds = _graph(shape, m).makespans(Costs.joined([plays[number].costs for number in numbers]))
        ends = np.cumsum([plays[number].costs.forward.shape[1] for number in numbers])[:-1]
        times |= zip(numbers, np.split(seconds, ends), strict=True)
    return [times[number] for number in range(len(plays))]


@functools.lru_cache(maxsize=1024)
def _graph(shape: PlayShape, m: int) -> ScheduleGraph | RepeatingGraph:
    """The graph of as few events as possible, since most of the time is spent on finding them."""
    for few in shape.lengths(m):
        repetition = _repetition(shape, few)
        if repetition is not None:
            return repetition.graph(m)
    return ScheduleGraph(Events(shape.whole(m), shape.buckets, shape.blocking, shape.exchanges))


@functools.lru_cache(maxsize=1024)
def _repetition(shape: PlayShape, few: int) -> Repetition | None:
    return find_repetition(
        shape.computations,
        shape.whole,
        few,
        shape.step,
        num_buckets=shape.buckets,
        blocking=shape.blocking,
        exchanges=shape.exchanges,
    )


@functools.lru_cache(maxsize=16)  # the most recent, which differ in blocking, buckets or copies
def _whole(shape: PlayShape, m: int) -> Schedule:
    if shape.offload:
        return with_offload(_whole(dataclasses.replace(shape, offload=False), m))
    return with_transfers(shape.computations(m), overlap=shape.overlap)
