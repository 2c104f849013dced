"""Why no layout is left, and the nearest ones: with another value of a fixed flag, with less memory, or on more
devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron.config.rules.check import problems
from megatron.config.run import RunConfig
from megatron.planner.search.layout import AXES, Candidates, Layout, default_choices
from megatron.planner.search.search import PlannedLayout, Planner
from megatron.planner.search.space import space_of

# The values of the axes that a user has chosen. All others have their default values.
ChosenValues = Mapping[str, tuple[Any, ...]]
MOST_TIMES = 64  # as many devices that are looked at


@dataclass(frozen=True)
class Freed:
    """An axis with one chosen value, and the nearest value with which there is a layout."""

    axis: str
    fixed: Any
    nearest: Any


@dataclass(frozen=True)
class Remedies:
    """Where nothing fits. ranks: the fewest devices on which a layout fits, None if none was found. freed: axes, each
    of which alone keeps all layouts from fitting."""

    ranks: int | None
    freed: Sequence[Freed]


def space_with(run: RunConfig, world_size: int, chosen: ChosenValues) -> Candidates:
    """Returns the layouts with the chosen values, and default values of all other axes."""
    return space_of(run, world_size, {**default_choices(run, world_size), **chosen})


def freed_axes(run: RunConfig, world_size: int, chosen: ChosenValues) -> list[Freed]:
    """Returns the axes with one chosen value, each of which alone keeps the space empty."""
    freed = []
    for axis, free in _freed(chosen):
        candidates = space_with(run, world_size, free)
        if len(candidates):
            works = candidates.column(axis).tolist()
            freed.append(Freed(axis, chosen[axis][0], nearest_value(chosen[axis][0], works)))
    return freed


def nearest_value(fixed: Any, works: Sequence[Any]) -> Any:
    """Returns the number that is nearest to the fixed one by its ratio, or the first of values that are no numbers."""
    if isinstance(fixed, int) and not isinstance(fixed, bool) and fixed > 0:
        return min(sorted(set(works)), key=lambda value: max(value, fixed) / max(1, min(value, fixed)))
    return works[0]


def broken_rules(run: RunConfig, world_size: int, chosen: ChosenValues) -> list[str]:
    """Returns what the rules say about the plainest layout with the chosen values."""
    choices = {**default_choices(run, world_size), **chosen}
    plain = Layout()
    values = {
        axis: getattr(plain, axis) if getattr(plain, axis) in choices[axis] else choices[axis][0] for axis in AXES
    }
    return problems(Layout(**values).apply(run), world_size)


def remedies_of(planner_of: Callable[[int], Planner], world_size: int, chosen: ChosenValues) -> Remedies:
    """Returns what would make a layout fit. planner_of: the planner of so many ranks. Some layout is accepted.

    Looked at are 2, 4, ... times as many devices, and other values of each axis with one chosen value.
    """
    planner = planner_of(world_size)
    ranks: int | None = 2 * world_size
    while ranks is not None and not _fits(planner_of(ranks), chosen):
        ranks = 2 * ranks if ranks < MOST_TIMES * world_size else None
    freed = []
    for axis, free in _freed(chosen):
        best = _least_memory(planner, space_with(planner.run, world_size, free))
        if best is not None and planner.fits(best):
            freed.append(Freed(axis, chosen[axis][0], getattr(best.layout, axis)))
    return Remedies(ranks, freed)


def _freed(chosen: ChosenValues) -> list[tuple[str, ChosenValues]]:
    """(axis with one chosen value, the choices without it)."""
    return [
        (axis, {other: chosen[other] for other in chosen if other != axis})
        for axis in AXES
        if len(chosen.get(axis, ())) == 1
    ]


def _fits(planner: Planner, chosen: ChosenValues) -> bool:
    best = _least_memory(planner, space_with(planner.run, planner.world_size, chosen))
    return best is not None and planner.fits(best)


def _least_memory(planner: Planner, candidates: Candidates) -> PlannedLayout | None:
    """The candidate with the least memory on its fullest rank."""
    bounds = planner.memory_bounds(candidates)
    best: PlannedLayout | None = None
    for number in np.argsort(bounds, kind="stable").tolist():
        if best is not None and bounds[number] >= best.memory:
            break
        (planned,) = planner.plan(candidates, [number])
        if best is None or planned.memory < best.memory:
            best = planned
    return best
