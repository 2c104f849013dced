"""Why a layout takes the time that it takes: what better hardware would bring, and what one other flag would change."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron.base.errors import ConfigError
from megatron.config.mesh import mesh_of
from megatron.config.rules.check import problems
from megatron.config.run import RunConfig
from megatron.config.settings import resolve
from megatron.planner.memory.plan import RankMemory, plan_memory
from megatron.planner.search.itemize import LinkLoad, OperationTime, links_by_load, operations_by_time
from megatron.planner.search.layout import AXES, Candidates, Layout
from megatron.planner.search.search import Planner, SearchResult
from megatron.planner.time.data_sheet import DataSheetClock
from megatron.planner.time.hardware import Cluster, with_device
from megatron.planner.time.step_time import StepModel, StepTime

FASTER = 1.1  # the rate of one resource in units of today's
TRIED = 12  # neighbours per axis whose exact figures are computed at most


@dataclass(frozen=True)
class Gain:
    """A resource that is 10 % faster, and the seconds of a step with it."""

    resource: str
    seconds: float


@dataclass(frozen=True)
class Neighbour:
    """The fastest layout that fits and has another value of one axis, with as few other changes as the rules allow.

    changed: the axes in which it differs, that one first. layout: None if none of those that were tried fits.
    """

    axis: str
    layout: Layout | None
    changed: tuple[str, ...] = ()
    seconds: float = float("inf")


@dataclass(frozen=True)
class Explanation:
    """Why a layout takes its time; each part with the most important ones first."""

    operations: Sequence[OperationTime]
    links: Sequence[LinkLoad]
    gains: Sequence[Gain]
    neighbours: Sequence[Neighbour]


@dataclass(frozen=True)
class Comparison:
    """A layout that a user names: what the rules say against it, or its time and the memory of its pipeline ranks."""

    time: StepTime | None = None
    ranks: tuple[RankMemory, ...] = ()
    problems: tuple[str, ...] = ()


def gains(seconds_on: Callable[[Cluster], float], cluster: Cluster) -> list[Gain]:
    """Returns what each resource would bring, the most useful first. seconds_on: of a step on a changed cluster."""
    device = cluster.device
    peak, reached = ({kind: FASTER * rate for kind, rate in rates.items()} for rates in (device.peak, device.reached))
    better = {
        "products of the device": dataclasses.replace(
            cluster, device=dataclasses.replace(device, peak=peak, reached=reached)
        ),
        "memory of the device": with_device(cluster, bandwidth=FASTER * device.bandwidth),
        "link in the node": with_device(cluster, link=FASTER * device.link),
        "network": dataclasses.replace(cluster, network=FASTER * cluster.network),
        "copies to the host": dataclasses.replace(cluster, host=FASTER * cluster.host),
    }
    return sorted((Gain(name, seconds_on(changed)) for name, changed in better.items()), key=lambda gain: gain.seconds)


def neighbours(
    candidates: Candidates,
    number: int,
    bounds: NDArray[np.float64],
    evaluate: Callable[[Sequence[int]], Sequence[float]],
) -> list[Neighbour]:
    """Returns the best neighbour along each axis on which some candidate differs.

    number: of the layout among the candidates. bounds: [N] lower bounds of their seconds. evaluate: returns the exact
    seconds of candidates, infinite for those that do not fit.
    """
    differs = {axis: codes != codes[number] for axis, codes in candidates.codes.items()}
    changes = np.sum([differs[axis] for axis in AXES], axis=0)
    best_by_axis: list[Neighbour] = []
    seen: set[bytes] = set()
    for axis in AXES:
        candidates_elsewhere = np.flatnonzero(differs[axis])
        near = candidates_elsewhere[
            changes[candidates_elsewhere] == changes[candidates_elsewhere].min(initial=len(AXES))
        ]
        near = near[np.argsort(bounds[near], kind="stable")][:TRIED]
        if not len(near) or near.tobytes() in seen:  # they differ in several axes: the first one stands for all
            continue
        seen.add(near.tobytes())
        best, seconds = _fastest(near, bounds, evaluate)
        if best is None:
            best_by_axis.append(Neighbour(axis, None))
            continue
        changed = (axis, *(other for other in AXES if other != axis and differs[other][best]))
        best_by_axis.append(Neighbour(axis, candidates.layout(best), changed, seconds))
    return sorted(best_by_axis, key=lambda neighbour: neighbour.seconds)


def _fastest(
    numbers: NDArray[np.intp], bounds: NDArray[np.float64], evaluate: Callable[[Sequence[int]], Sequence[float]]
) -> tuple[int | None, float]:
    """The fastest of candidates that are sorted by their bounds, and its seconds."""
    best, seconds = None, float("inf")
    for number in map(int, numbers):
        if bounds[number] >= seconds:
            break
        (exact,) = evaluate([number])
        if exact < seconds:
            best, seconds = number, exact
    return best, seconds


def explain(planner: Planner, search_result: SearchResult, number: int) -> Explanation:
    """Returns why the layout `found.best[number]` takes its time."""
    planned = search_result.best[number]
    run = planned.layout.apply(planner.run)
    settings = resolve(run, mesh_of(run.parallel, planner.world_size))
    model = StepModel(run, settings, planner.cluster, planner.software)
    better: list[Gain] = []
    if isinstance(planner.clock, DataSheetClock):  # a profile cannot say what another machine would do
        sheets = planner.clock

        def seconds_on(cluster: Cluster) -> float:
            changed = StepModel(run, settings, cluster, planner.software)
            return float(changed.time(dataclasses.replace(sheets, cluster=cluster)).seconds)

        better = gains(seconds_on, planner.cluster)

    def seconds_of(numbers: Sequence[int]) -> list[float]:
        plans = planner.plan(search_result.candidates, numbers)
        return [float(plan.time.seconds) if planner.fits(plan) else float("inf") for plan in plans]

    return Explanation(
        operations_by_time(model, settings, planner.clock, planned.time),
        links_by_load(run, model, settings, planner.cluster),
        better,
        neighbours(search_result.candidates, planned.number, search_result.time_bounds, seconds_of),
    )


def compare(planner: Planner, run: RunConfig) -> Comparison:
    """Returns what there is to say about a run in a layout of the user's own."""
    if faults := problems(run, planner.world_size):
        return Comparison(problems=tuple(faults))
    settings = resolve(run, mesh_of(run.parallel, planner.world_size))
    try:
        model = StepModel(run, settings, planner.cluster, planner.software)
    except ConfigError as error:
        return Comparison(problems=(str(error),))
    return Comparison(model.time(planner.clock), tuple(plan_memory(run, settings, planner.target)))


def differences(here: Mapping[str, float], there: Mapping[str, float]) -> list[tuple[str, float]]:
    """Returns (part, seconds that `there` takes more than `here`), the largest differences first."""
    names = dict.fromkeys((*here, *there))
    changes = [(name, there.get(name, 0.0) - here.get(name, 0.0)) for name in names]
    return sorted(changes, key=lambda change: -abs(change[1]))
