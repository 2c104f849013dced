"""Finds the fastest layout that fits into memory of each mesh, and computes exactly only where that could change the
answer.

Layouts of one mesh (tp, cp, pp, ep) that differ in an offload share alone are closer than the error of their predicted
times, so the answer is the best layout of the best meshes. A layout with features that no published run confirms ranks
as if it took longer by the error of its prediction (confidence.py).

All candidates have a lower bound of their ranking time, and are looked at in its order. Some at a time get a lower
bound of their memory, and those that fit by it have their schedule played, a batch at a time; the ones that are still
faster than the best of their mesh and than the last mesh of the answer are planned in full, in the order of the played
time. The search ends when no bound of the others is below the last mesh of the answer, so planning every candidate
would give the same one.
"""

from __future__ import annotations

import dataclasses
import gc
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron.config.mesh import mesh_of
from megatron.config.run import RunConfig
from megatron.config.settings import resolve
from megatron.planner.memory.plan import RankMemory
from megatron.planner.search.confidence import Confidence, confidence_of
from megatron.planner.search.layout import Candidates, Layout
from megatron.planner.search.layout_table import distinct
from megatron.planner.search.memory_bounds import MemoryBounds
from megatron.planner.search.time_bounds import TimeBounds
from megatron.planner.time.clock import Clock
from megatron.planner.time.hardware import Cluster, used_memory
from megatron.planner.time.software import Software
from megatron.planner.time.step_time import StepModel, StepTime
from megatron.spec.sizes import FUSED_GPU

_Array = NDArray[np.float64]
_Numbers = NDArray[np.int64]
_LOOKED_AT = 4096  # candidates whose memory is bounded together, at first
_BATCH = 64  # schedules that are played together, at first
_GROWTH = 2  # of each further batch of either kind
_ROUNDING = 1 + 1e-9  # played times are those of the model but for rounding
_DIGITS = 11
_OF_THE_HOST = 0.9  # part of its memory that a run may have
MESH = ("tp", "cp", "pp", "ep")
FREE_MEMORY = 0.05  # part of a device that a plan leaves free


@dataclass(frozen=True, kw_only=True)
class PlannedLayout:
    """A candidate in full. number: its place among the candidates. memory: bytes of the device of the fullest rank,
    with what libraries take and the allocator loses. host: bytes of host memory of the rank that has the most. ranks:
    the plan of each pipeline rank. error: of the seconds, in units of them. penalty: the part of the seconds by which
    the layout ranks behind its prediction."""

    number: int
    layout: Layout
    time: StepTime
    memory: float
    host: int
    ranks: tuple[RankMemory, ...]
    error: float
    penalty: float

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return float(np.squeeze(self.time.seconds))

    @property
    def mesh(self) -> tuple[int, ...]:
        """The sizes of the axes of `MESH`."""
        return tuple(getattr(self.layout, axis) for axis in MESH)

    @property
    def ranking_seconds(self) -> float:
        """Seconds of a step, with the penalty."""
        return self.seconds * (1 + self.penalty)

    @property
    def rank(self) -> tuple[float, int]:
        """The order of layouts: equal times, but for rounding, in the order of the candidates."""
        return rounded(self.ranking_seconds), self.number


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """best: the fastest of each mesh that fit, the fastest first. time_bounds: [N] seconds. exact: those that were
    planned in full, by number. out_of_memory: candidates that were looked at and do not fit by the bound of their
    memory. simulated: those whose schedule was played. bounded_out: all others, which are too slow by the bound of
    their time. least: where nothing fits, the candidate that needs the least memory. parts: wall seconds of the search,
    by part."""

    best: tuple[PlannedLayout, ...]
    candidates: Candidates
    time_bounds: _Array
    exact: Mapping[int, PlannedLayout]
    out_of_memory: int
    bounded_out: int
    simulated: int
    least: PlannedLayout | None
    parts: Mapping[str, float]

    @property
    def seconds(self) -> float:
        """Wall seconds of all parts."""
        return sum(self.parts.values())


def rounded(seconds: float) -> float:
    """Returns a time without the digits that the order of sums decides."""
    return float(f"{seconds:.{_DIGITS}g}")


class Planner:
    """Plans layouts of a run on a cluster, by bounds and in full. free: the part of a device that stays free."""

    def __init__(
        self,
        run: RunConfig,
        world_size: int,
        cluster: Cluster,
        software: Software,
        clock: Clock,
        free: float = FREE_MEMORY,
    ) -> None:
        self.run, self.world_size, self.cluster, self.software, self.clock = run, world_size, cluster, software, clock
        self.free = free
        self.target = FUSED_GPU
        self.times = TimeBounds(run, world_size, cluster, software, clock)
        self._memory = MemoryBounds(run, world_size, self.target)
        self._planned: dict[Layout, PlannedLayout] = {}
        self._last: tuple[Layout, StepModel] | None = None  # most layouts are asked about twice in turn

    @property
    def limit(self) -> float:
        """Bytes of memory of a device that a layout may take."""
        return (1 - self.free) * self.cluster.device.memory

    def memory_bounds(self, candidates: Candidates) -> _Array:
        """Returns [N] bytes of a device, of which none is above that of the plan in full."""
        return np.asarray(used_memory(self._memory.nbytes(candidates)))

    def fits(self, planned: PlannedLayout) -> bool:
        """Returns whether a device and a node have so much memory."""
        return planned.memory <= self.limit and self.fits_host(planned)

    def fits_host(self, planned: PlannedLayout) -> bool:
        """Returns whether a node has so much memory."""
        return planned.host <= self._host_limit

    def fit_by_bounds(self, candidates: Candidates, limit: float) -> tuple[NDArray[np.bool_], _Array]:
        """Returns [N] whether candidates may fit devices with `limit` bytes and their nodes, and `memory_bounds`."""
        bounds = self._memory.bounds(candidates)
        device = np.asarray(used_memory(bounds.device))
        return (device <= limit) & (bounds.host <= self._host_limit), device

    @property
    def _host_limit(self) -> float:
        """Bytes of host memory of a rank."""
        return _OF_THE_HOST * self.cluster.host_memory / min(self.cluster.node, self.world_size)

    def confidence(self, candidates: Candidates) -> Confidence:
        """Returns the errors of candidates."""
        return confidence_of(candidates, self.run, self.world_size, self.cluster.node)

    def seconds(self, layout: Layout) -> float:
        """Returns the seconds of a step of a layout."""
        return float(np.squeeze(self._model(layout).seconds(self.clock)))

    def plan(self, candidates: Candidates, numbers: Iterable[int]) -> list[PlannedLayout]:
        """Returns the plans in full of some candidates."""
        plans = []
        for number in numbers:
            layout = candidates.layout(number)
            if layout not in self._planned:
                (peaks,) = self._memory.exact([layout])
                confidence = self.confidence(Candidates.of([layout]))
                self._planned[layout] = PlannedLayout(
                    number=number,
                    layout=layout,
                    time=self._model(layout).time(self.clock),
                    memory=float(used_memory(peaks.device)),
                    host=peaks.host,
                    ranks=peaks.ranks,
                    error=float(confidence.errors[0]),
                    penalty=float(confidence.penalties[0]),
                )
            plans.append(self._planned[layout])
        return plans

    def _model(self, layout: Layout) -> StepModel:
        if self._last is None or self._last[0] != layout:
            run = layout.apply(self.run)
            settings = resolve(run, mesh_of(run.parallel, self.world_size))
            self._last = layout, StepModel(run, settings, self.cluster, self.software)
        return self._last[1]


def search(planner: Planner, candidates: Candidates, keep: int = 5) -> SearchResult:
    """Returns the fastest candidate that fits of the `keep` fastest meshes; of equally fast ones those that come
    first."""
    with without_garbage_collection():
        return _search(planner, candidates, keep)


def _search(planner: Planner, candidates: Candidates, keep: int) -> SearchResult:
    begun = time.perf_counter()
    times = planner.times.seconds(candidates)
    parts = {"time bounds": time.perf_counter() - begun, "memory bounds": 0.0, "exact": 0.0}
    memory = np.full(len(candidates), np.nan)
    chosen = _Best(planner, candidates, keep)
    bounds = times * chosen.weights
    order = np.argsort(bounds, kind="stable")
    size, start, out_of_memory = _LOOKED_AT, 0, 0
    while start < len(order) and bounds[order[start]] <= chosen.slowest:
        begun = time.perf_counter()
        numbers = order[start : start + size]
        start, size = start + len(numbers), size * _GROWTH
        numbers = numbers[bounds[numbers] <= chosen.slowest_of_meshes(numbers)]
        may_fit, memory[numbers] = planner.fit_by_bounds(candidates.take(numbers), planner.limit)
        fitting = numbers[may_fit]
        bounded = time.perf_counter()
        chosen.consider(fitting, bounds[fitting])
        parts["memory bounds"] += bounded - begun
        parts["exact"] += time.perf_counter() - bounded
        out_of_memory += len(numbers) - len(fitting)
    least = None
    if not chosen.best:  # so all have a bound of their memory
        least = _least(planner, candidates, memory)
    return SearchResult(
        best=tuple(chosen.best),
        candidates=candidates,
        time_bounds=times,
        exact={planned.number: planned for planned in chosen.planned},
        out_of_memory=out_of_memory,
        bounded_out=len(candidates) - out_of_memory - chosen.simulated,
        simulated=chosen.simulated,
        least=least,
        parts=parts,
    )


class _Best:
    """The fastest layouts that fit of each mesh, of the candidates that were considered so far.

    weights: [N] ranking times in units of the predicted ones.
    """

    def __init__(self, planner: Planner, candidates: Candidates, keep: int) -> None:
        self._planner, self._candidates, self._keep = planner, candidates, keep
        self.weights = 1 + planner.confidence(candidates).penalties
        self.best: list[PlannedLayout] = []  # the best layouts of the best meshes, the fastest first
        self.planned: list[PlannedLayout] = []
        self.simulated = 0
        self._by_mesh: dict[int, PlannedLayout] = {}
        firsts, self._meshes = distinct([candidates.codes[axis] for axis in MESH])
        self._limits = np.full(len(firsts), np.inf)  # ranking seconds of the best layout of each mesh
        self._batch = _BATCH
        self._too_slow: dict[Layout, float] = {}  # layout without offload -> part of the activations

    @property
    def slowest(self) -> float:
        """Ranking seconds of the last mesh of the answer; infinite until there are enough."""
        return self.best[-1].ranking_seconds if len(self.best) == self._keep else np.inf

    def slowest_of_meshes(self, numbers: _Numbers) -> _Array:
        """Returns [numbers] the ranking seconds above which a candidate is neither in the answer nor the best of its
        mesh."""
        return np.minimum(self._limits[self._meshes[numbers]], self.slowest)

    def consider(self, numbers: _Numbers, bounds: _Array) -> None:
        """Considers these candidates, whose ranking times have these bounds in rising order."""
        start = 0
        while start < len(numbers) and bounds[start] <= self.slowest:
            batch = slice(start, start + self._batch)
            self._consider(numbers[batch][bounds[batch] <= self.slowest_of_meshes(numbers[batch])])
            start, self._batch = batch.stop, self._batch * _GROWTH

    def _consider(self, numbers: _Numbers) -> None:
        """Plays these candidates, and plans those in full that could be among the best."""
        if not len(numbers):
            return
        self.simulated += len(numbers)
        played = self._planner.times.played_seconds(self._candidates.take(numbers)) * self.weights[numbers]
        for place in np.lexsort((numbers, played)).tolist():
            number = int(numbers[place])
            limit = float(self.slowest_of_meshes(numbers[place : place + 1])[0]) * _ROUNDING
            if played[place] > limit or self._copies_are_too_slow(number, limit):
                continue
            (planned,) = self._planner.plan(self._candidates, [number])
            self.planned.append(planned)
            mesh = int(self._meshes[number])
            if self._planner.fits(planned) and (mesh not in self._by_mesh or planned.rank < self._by_mesh[mesh].rank):
                self._by_mesh[mesh], self._limits[mesh] = planned, planned.ranking_seconds
                self.best = sorted(self._by_mesh.values(), key=lambda layout: layout.rank)[: self._keep]

    def _copies_are_too_slow(self, number: int, limit: float) -> bool:
        """Whether the copies of activations, which the played time leaves out, make a layout too slow.

        More copies never make a step faster, so a larger part need not be asked about after a smaller one.
        """
        layout = self._candidates.layout(number)
        if not layout.offload:
            return False
        alike = dataclasses.replace(layout, offload=0.0)
        if layout.offload >= self._too_slow.get(alike, np.inf):
            return True
        if self._planner.seconds(layout) * self.weights[number] <= limit:
            return False
        self._too_slow[alike] = layout.offload
        return True


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Schedules are lists of many tuples without cycles, through which the collector would look again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _least(planner: Planner, candidates: Candidates, bounds: _Array) -> PlannedLayout | None:
    """The candidate that needs the least memory of a device, the first of equal ones."""
    least: PlannedLayout | None = None
    for number in np.argsort(bounds, kind="stable").tolist():
        if least is not None and bounds[number] > least.memory:
            break
        (planned,) = planner.plan(candidates, [number])
        if least is None or (planned.memory, planned.number) < (least.memory, least.number):
            least = planned
    return least
