"""What a picture of throughput against memory shows: all candidates of a search, and those that none other beats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron.planner.search.front import layout_front
from megatron.planner.search.search import Planner, SearchResult
from megatron.planner.time.hardware import GIB
from megatron.tooling.plan.request import SearchRequest
from megatron.tooling.plan.words import mesh_words, method_words

LINE, CHOSEN, POINT, INK, PALE = "#2a6fbb", "#d1495b", "#8fb3d6", "#333333", "#777777"
FEW, MANY = "#e4e8ee", "#aab4c2"  # candidates in a field of the cloud
COLUMNS, ROWS = 170, 90  # of the grid on which the cloud is counted
BEYOND = 1.35  # how much of the axis of memory is shown, in units of the device's
MARGIN = 1.12  # of the axis of throughput, in units of the highest
LIFT, GAP = 0.06, 0.028  # of the numbers of the best, in units of the axes


@dataclass(frozen=True)
class Mark:
    """An exact point. memory: GiB. rate: tokens/s per device. words: the layout."""

    memory: float
    rate: float
    words: str


@dataclass(frozen=True)
class FrontPicture:
    """The content of the picture.

    memory, rate: [N] bounds of all candidates, GiB and tokens/s per device. exact: the layouts with exact figures.
    front: the Pareto front by rising memory. best: the layouts that the search returned, in order. limit: GiB that a
    layout may take.
    """

    title: str
    memory: NDArray[np.float64]
    rate: NDArray[np.float64]
    exact: Sequence[Mark]
    front: Sequence[Mark]
    best: Sequence[Mark]
    limit: float

    @property
    def right(self) -> float:
        """The end of the axis of memory."""
        return self.limit * BEYOND

    @property
    def top(self) -> float:
        """The end of the axis of throughput."""
        marks = [mark.rate for mark in (*self.exact, *self.best)]
        return MARGIN * max([*marks, float(self.rate[self.memory <= self.limit].max(initial=0.0))])

    def label_places(self) -> list[tuple[float, float]]:
        """Returns where the numbers of the best are written: above them, in the order of memory and not on each
        other."""
        order = sorted(range(len(self.best)), key=lambda number: self.best[number].memory)
        height = max(mark.rate for mark in self.best) + LIFT * self.top
        gap, places, last = GAP * self.right, dict[int, tuple[float, float]](), -self.right
        for number in order:
            last = max(self.best[number].memory, last + gap)
            places[number] = last, height
        return [places[number] for number in range(len(order))]

    def cloud(self) -> NDArray[np.float64]:
        """Returns the [ROWS, COLUMNS] number of candidates in each field of the grid, the lowest throughput first."""
        edges = np.linspace(0, self.top, ROWS + 1), np.linspace(0, self.right, COLUMNS + 1)
        counts: NDArray[np.float64] = np.histogram2d(self.rate, self.memory, bins=edges)[0]
        return counts

    def steps(self) -> list[tuple[float, float]]:
        """Returns the corners of the front: the most throughput within each amount of memory."""
        corners: list[tuple[float, float]] = []
        for mark in (mark for mark in self.front if mark.memory <= self.right):
            if corners:
                corners.append((mark.memory, corners[-1][1]))
            corners.append((mark.memory, mark.rate))
        return [*corners, (self.right, corners[-1][1])] if corners else []


def front_of(request: SearchRequest, planner: Planner, result: SearchResult) -> FrontPicture:
    """Returns the picture of a search, for which the exact figures of the front are computed."""
    tokens = float(result.best[0].time.tokens) / request.world_size
    front = layout_front(planner, result, BEYOND * planner.limit)

    def mark(number: int, seconds: float, nbytes: float) -> Mark:
        layout = result.candidates.layout(number)
        words = f"{mesh_words(layout, request.world_size)}: {method_words(layout, request.world_size)}"
        return Mark(nbytes / GIB, tokens / seconds, words)

    return FrontPicture(
        title=f"{len(result.candidates):,} layouts on {request.world_size} {request.cluster.device.name}",
        memory=planner.memory_bounds(result.candidates) / GIB,
        rate=tokens / result.time_bounds,
        exact=[mark(number, *figures) for number, figures in front.exact.items()],
        front=[mark(number, *front.exact[number]) for number in reversed(front.numbers)],
        best=[mark(planned.number, planned.seconds, planned.memory) for planned in result.best],
        limit=planner.limit / GIB,
    )
