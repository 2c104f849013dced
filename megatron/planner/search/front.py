"""The Pareto front of step time and memory over all candidates, from their bounds and few exact figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Points = NDArray[np.float64]  # [N, 2] seconds and bytes


@dataclass(frozen=True)
class Front:
    """numbers: candidates on the front, from the fastest to the one with the least memory. exact: of every candidate whose
    exact figures are known, seconds and bytes. complete: no other candidate can be on the front."""

    numbers: tuple[int, ...]
    exact: Mapping[int, tuple[float, float]]
    complete: bool


def pareto(points: Points) -> NDArray[np.intp]:
    """Returns the places of the points that no other point equals or beats in both figures, by rising seconds.

    Of equal points the first one is returned.
    """
    order = np.lexsort((points[:, 1], points[:, 0]))
    memory = points[order, 1]
    before = np.concatenate([[np.inf], np.minimum.accumulate(memory)[:-1]])
    found: NDArray[np.intp] = order[memory < before]
    return found


def find_front(
    bounds: Points,
    known: Mapping[int, tuple[float, float]],
    evaluate: Callable[[Sequence[int]], Sequence[tuple[float, float]]],
    *,
    most: int,
) -> Front:
    """Returns the front of the exact figures of all candidates.

    bounds: lower bounds of seconds and bytes. known: exact figures of some of them. evaluate: returns those of others, and
    is asked for at most `most`. A candidate is asked for only if its bounds are on the front of all that is known.
    """
    points, exact = bounds.copy(), dict(known)
    for number, figures in exact.items():
        points[number] = figures
    alive, left = np.arange(len(points)), most
    while True:
        alive = alive[_undominated(points[alive], np.array(list(exact.values())).reshape(-1, 2))]
        front = [int(alive[place]) for place in pareto(points[alive])]
        open_ones = [number for number in front if number not in exact][:left]
        if not open_ones:
            return Front(tuple(n for n in front if n in exact), exact, all(n in exact for n in front))
        for number, figures in zip(open_ones, evaluate(open_ones), strict=True):
            exact[number] = figures
            points[number] = figures
        left -= len(open_ones)


def _undominated(points: Points, exact: Points) -> NDArray[np.bool_]:
    """Whether no exact point is better in both figures: only such points can be on the front."""
    if not len(exact):
        return np.ones(len(points), dtype=np.bool_)
    by_time = exact[np.argsort(exact[:, 0], kind="stable")]
    faster = np.searchsorted(by_time[:, 0], points[:, 0], side="left")  # exact points with less time
    least = np.concatenate([[np.inf], np.minimum.accumulate(by_time[:, 1])])
    found: NDArray[np.bool_] = points[:, 1] <= least[faster]
    return found
