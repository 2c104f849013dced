"""The Pareto front of step time and memory over all candidates, from their bounds and as few exact figures as it
takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron.planner.search.axis import COPIES, UPDATE
from megatron.planner.search.layout import axes_of
from megatron.planner.search.layout_table import groups_of
from megatron.planner.search.search import PlannedLayout, Planner, SearchResult, without_garbage_collection

_ROUNDING = 1e-9  # sums in another order differ by much less
Points = NDArray[np.float64]  # [N, 2] seconds and bytes


@dataclass(frozen=True)
class Front:
    """numbers: candidates on the front, from the fastest to the one with the least memory. exact: of every candidate
    whose exact figures are known, seconds and bytes."""

    numbers: tuple[int, ...]
    exact: Mapping[int, tuple[float, float]]


def pareto(points: Points) -> NDArray[np.intp]:
    """Returns the places of the points that no other point equals or beats in both figures, by rising seconds.

    Of equal points the first one is returned.
    """
    order = np.lexsort((points[:, 1], points[:, 0]))
    memory = points[order, 1]
    before = np.concatenate([[np.inf], np.minimum.accumulate(memory)[:-1]])
    places: NDArray[np.intp] = order[memory < before]
    return places


def find_front(
    bounds: Points,
    known: Mapping[int, tuple[float, float]],
    tighten: Callable[[Sequence[int]], Iterable[tuple[NDArray[np.intp], NDArray[np.float64]]]],
    evaluate: Callable[[Sequence[int]], Sequence[tuple[float, float]]],
) -> Front:
    """Returns the front of the exact figures of all candidates.

    bounds: lower bounds of seconds and bytes. known: exact figures of some of them. tighten: yields, for each of some
    candidates, higher lower bounds of the seconds of that one and of others like it, as their numbers and seconds.
    evaluate: returns exact figures, infinite for candidates that cannot run. Both are asked only about candidates whose
    bounds are on the front of all that is known, and once about each, so none that could lie on the front is left out.
    """
    points, exact = bounds.copy(), dict(known)
    for number, figures in exact.items():
        points[number] = figures
    tightened, alive = set(exact), np.arange(len(points))
    while True:
        alive = alive[_undominated(points[alive], np.array(list(exact.values())).reshape(-1, 2))]
        front = [int(alive[place]) for place in pareto(points[alive])]
        loose = [number for number in front if number not in tightened]
        if loose:
            tightened.update(loose)
            for places, seconds in tighten(loose):
                open_ones = np.array([place not in exact for place in places.tolist()], dtype=np.bool_)
                points[places[open_ones], 0] = np.maximum(points[places[open_ones], 0], seconds[open_ones])
        elif open_front := [number for number in front if number not in exact]:
            for number, figures in zip(open_front, evaluate(open_front), strict=True):
                points[number] = exact[number] = figures
        else:
            return Front(tuple(front), exact)


def layout_front(planner: Planner, search_result: SearchResult, limit: float) -> Front:
    """Returns the front of a search's candidates that run on devices with `limit` bytes of memory.

    Within each amount of memory its fastest candidate is the one that a search with such devices finds among layouts
    without penalties.
    """
    may_run, memory = planner.fit_by_bounds(search_result.candidates, limit)
    shown = np.flatnonzero(may_run)
    candidates = search_result.candidates.take(shown)
    bounds = np.stack([search_result.time_bounds[shown], memory[shown]], axis=1)
    place = {int(number): at for at, number in enumerate(shown)}
    # Layouts that differ in copies of activations and in the offload of the optimizer have one schedule. More copies
    # never make it faster, and the bounds, in which copies cost nothing, differ by the time of the update.
    alike = groups_of([codes for axis, codes in candidates.codes.items() if axis not in axes_of(UPDATE, COPIES)])
    group = np.empty(len(shown), dtype=np.intp)
    for at, places in enumerate(alike):
        group[places] = at
    offload = candidates.column("offload")

    def figures(planned: PlannedLayout) -> tuple[float, float]:
        return (planned.seconds, planned.memory) if planner.fits_host(planned) else (np.inf, np.inf)

    def tighten(numbers: Sequence[int]) -> Iterator[tuple[NDArray[np.intp], NDArray[np.float64]]]:
        for number in numbers:
            seconds = planner.seconds(candidates.layout(number)) * (1 - _ROUNDING)
            places = alike[group[number]]
            places = places[offload[places] >= offload[number]]
            yield places, seconds + bounds[places, 0] - bounds[number, 0]

    def evaluate(numbers: Sequence[int]) -> list[tuple[float, float]]:
        return [figures(plan) for plan in planner.plan(search_result.candidates, shown[list(numbers)].tolist())]

    with without_garbage_collection():
        figures_by_place = {
            place[number]: figures(planned) for number, planned in search_result.exact.items() if number in place
        }
        front = find_front(bounds, figures_by_place, tighten, evaluate)
    exact = {int(shown[number]): both for number, both in front.exact.items() if np.isfinite(both[0])}
    return Front(tuple(int(shown[number]) for number in front.numbers), exact)


def _undominated(points: Points, exact: Points) -> NDArray[np.bool_]:
    """Whether no exact point is better in both figures: only such points can be on the front."""
    if not len(exact):
        return np.ones(len(points), dtype=np.bool_)
    by_time = exact[np.argsort(exact[:, 0], kind="stable")]
    faster = np.searchsorted(by_time[:, 0], points[:, 0], side="left")  # exact points with less time
    least = np.concatenate([[np.inf], np.minimum.accumulate(by_time[:, 1])])
    undominated: NDArray[np.bool_] = points[:, 1] <= least[faster]
    return undominated
