"""The step time of many layouts at once: a lower bound for all of them, and the time of those that need it.

Layouts share most of their parts, which are clocked once (step_parts.py) and combined for all layouts by numpy. Only
the schedule depends on everything: it has a bound in closed form (planner/schedule/bound.py), and is played where the
time is asked for.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron.config.run import RunConfig
from megatron.planner.schedule.bound import least_makespans
from megatron.planner.search.axis import COPIES, UPDATE
from megatron.planner.search.layout import AXES, Candidates, Layout, axes_of
from megatron.planner.search.layout_table import distinct, groups_of
from megatron.planner.search.step_parts import (
    LAYER_AXES,
    MESH_AXES,
    PIPELINE_AXES,
    REPLICA_AXES,
    UPDATE_AXES,
    StepParts,
    phases_of,
)
from megatron.planner.time.boundaries import NEARBY, end_of_chain
from megatron.planner.time.clock import Clock
from megatron.planner.time.hardware import Cluster
from megatron.planner.time.pipeline_stages import PipelineStages, totals
from megatron.planner.time.play import Play, makespans
from megatron.planner.time.software import Software
from megatron.planner.time.stage_time import Phases
from megatron.schedule.costs import Costs
from megatron.schedule.registry import SCHEDULES

_Array = NDArray[np.float64]
_Numbers = NDArray[np.int64]
_ROUNDING = 1e-9  # sums in another order differ by much less
_CHUNK = 12288  # layouts whose costs stay in the cache


@dataclass(frozen=True)
class _Steps:
    """n layouts of one pipeline, with K schedules.

    numbers: [n] of the layouts among the candidates. outside: [n] seconds outside of the schedule. of: [n] the schedule
    of each layout. m, buckets: [K] microbatches, and buckets of each stage. costs: of the K schedules.
    """

    numbers: _Numbers
    pipeline: PipelineStages
    outside: _Array
    of: _Numbers
    m: _Numbers
    buckets: _Numbers
    costs: Costs


class TimeBounds:
    """The step times of layouts of a run that `config.rules` accept, and whose vocabulary is known."""

    def __init__(self, run: RunConfig, world_size: int, cluster: Cluster, software: Software, clock: Clock) -> None:
        self._run, self._world_size = run, world_size
        self._parts = StepParts(run, world_size, cluster, software, clock)

    def seconds(self, candidates: Candidates) -> _Array:
        """Returns [N] seconds of a step, of which none is above that of `StepModel`."""
        if not len(candidates):
            return np.zeros(0)
        # Copies of activations cost nothing in this bound.
        first, alike = distinct([candidates.codes[axis] for axis in AXES if axis not in axes_of(COPIES)])
        return self._seconds(candidates.take(first))[alike]

    def _seconds(self, candidates: Candidates) -> _Array:
        seconds = np.zeros(len(candidates))
        for steps in self._steps(candidates):
            schedule = least_makespans(steps.pipeline.settings, steps.m, steps.costs, steps.buckets)
            seconds[steps.numbers] = schedule[steps.of] + steps.outside
        return seconds * (1 + self._parts.straggling) * (1 - _ROUNDING)

    def played_seconds(self, candidates: Candidates) -> _Array:
        """Returns [N] seconds of a step, those of `StepModel` but for rounding, and without copies of activations."""
        seconds, offload = np.zeros(len(candidates)), candidates.column("offload")
        numbers, plays = [], []
        for steps in self._steps(candidates):
            seconds[steps.numbers] = steps.outside
            for alike in groups_of([steps.m, steps.buckets]):
                mask = np.isin(steps.of, alike)
                played = steps.numbers[mask]
                # Copies in no time change nothing, and exact work needs the same graph with times of copies.
                shape = steps.pipeline.shape(int(steps.buckets[alike[0]]), offload=bool(offload[played].any()))
                plays.append(Play(shape, int(steps.m[alike[0]]), steps.costs.take(alike)))
                numbers.append((played, np.searchsorted(alike, steps.of[mask])))
        for (played, of), schedule in zip(numbers, makespans(plays), strict=True):
            seconds[played] += schedule[of]
        return seconds * (1 + self._parts.straggling)

    def _steps(self, candidates: Candidates) -> Iterator[_Steps]:
        """Yields the layouts by pipeline, those with the same replicas and the same schedule next to each other."""
        if not len(candidates):
            return
        columns = _Columns(self._run, self._world_size, self._parts, candidates)
        _, pipelines = distinct([candidates.codes[axis] for axis in PIPELINE_AXES])
        order = np.lexsort((columns.scheduled, columns.replicas, pipelines))
        for numbers in np.split(order, np.flatnonzero(np.diff(pipelines[order])) + 1):
            pipeline = self._parts.pipeline(candidates.layout(numbers[0]))
            for start in range(0, len(numbers), _CHUNK):
                yield columns.steps(pipeline, numbers[start : start + _CHUNK])


class _Columns:
    """The parts of N candidates as arrays."""

    def __init__(self, run: RunConfig, world_size: int, parts: StepParts, candidates: Candidates) -> None:
        self._parts, self._clock = parts, parts.clock
        codes = candidates.codes
        self._recompute = codes["recompute"]
        self._recomputes = [Layout(recompute=text).apply(run).recompute for text in candidates.values["recompute"]]
        recomputed = tuple(dict.fromkeys(config.parts_of(0) for config in self._recomputes))

        split = np.array([SCHEDULES[name].splits_backward for name in candidates.values["schedule"]])[codes["schedule"]]
        split = split & (candidates.column("pp") > 1)
        numbers, self._layer = distinct([*(codes[axis] for axis in LAYER_AXES), split.astype(np.int16)])
        layers = [parts.layer(candidates.layout(number), recomputed) for number in numbers.tolist()]
        # [3, layers] seconds of a microbatch.
        self._layers = {
            variant: np.stack([layer.layers[variant] for layer in layers], axis=-1) for variant in layers[0].layers
        }
        self._embedding = np.stack([layer.embedding for layer in layers], axis=-1)
        self._head = np.stack([layer.head for layer in layers], axis=-1)

        meshes, mesh = distinct([codes[axis] for axis in MESH_AXES])
        self._chain = np.array([parts.chain_in_node(candidates.layout(number)) for number in meshes.tolist()])[mesh]
        hops, hop = distinct([self._layer, self._chain, candidates.column("pp")])
        nearby, far = [], []
        for number in hops.tolist():
            chain, residual = int(self._chain[number]), layers[self._layer[number]].residual
            nearby.append(parts.hop(NEARBY, residual) if chain > 1 else (0.0, 0.0))
            far.append(parts.hop(end_of_chain(chain), residual) if candidates.layout(number).pp > chain else (0.0, 0.0))
        # [time on the link or until the data has arrived, N] between stages in a node, and between those in two.
        self._nearby, self._far = np.array(nearby).T[:, hop], np.array(far).T[:, hop]

        replicas, self.replicas = distinct([codes[axis] for axis in REPLICA_AXES])
        self._replicas = [parts.replicas(candidates.layout(number)) for number in replicas.tolist()]
        updates, self._update = distinct([codes[axis] for axis in UPDATE_AXES])
        self._optimizers = [parts.optimizer(candidates.layout(number)) for number in updates.tolist()]
        # Neither the update nor, in this model, copies of activations change the schedule.
        _, self.scheduled = distinct([codes[axis] for axis in AXES if axis not in axes_of(UPDATE, COPIES)])
        ranks = np.prod([candidates.column(axis) for axis in ("tp", "cp", "pp")], axis=0)
        samples = parts.samples(candidates.layout(0))
        self._m = samples // (candidates.column("micro_batch") * (world_size // ranks))

    def steps(self, pipeline: PipelineStages, numbers: _Numbers) -> _Steps:
        """Returns the layouts with these numbers, which have this pipeline.

        Those with the same replicas are next to each other, and of these the ones with the same schedule.
        """
        begins = np.diff(self.scheduled[numbers], prepend=-1) != 0
        of, played = np.cumsum(begins) - 1, numbers[begins]
        seconds = self._stage_seconds(pipeline, played)
        buckets, outside = np.zeros(len(played), dtype=np.int64), np.zeros(len(numbers))
        bucket = np.zeros((len(pipeline.examples), len(played)))
        places = self.replicas[numbers]
        borders = [0, *(np.flatnonzero(np.diff(places)) + 1).tolist(), len(numbers)]
        for start, stop in itertools.pairwise(borders):
            replicas, schedules = self._replicas[places[start]], slice(of[start], of[stop - 1] + 1)
            seconds[:, :, schedules] = replicas.with_microbatch(self._clock, seconds[:, :, schedules])
            buckets[schedules] = replicas.buckets
            bucket[:, schedules] = replicas.bucket[:, None]
            updates, update = np.unique(self._update[numbers[start:stop]], return_inverse=True)
            for number, code in enumerate(updates.tolist()):
                columns = start + np.flatnonzero(update == number)
                by_schedule = replicas.outside_schedule(self._clock, seconds[:, :, schedules], self._optimizers[code])
                outside[columns] = by_schedule[of[columns] - schedules.start]
        node_of = np.array(pipeline.settings.placement.rank_of)[:, None] // self._chain[played]
        transfer, latency = (
            np.where(node_of[1:] == node_of[:-1], nearby[played], far[played])
            for nearby, far in zip(self._nearby, self._far, strict=True)
        )
        costs = pipeline.costs(seconds, transfer, latency, bucket, np.zeros_like(bucket))
        return _Steps(numbers, pipeline, outside, of, self._m[played], buckets, costs)

    def _stage_seconds(self, pipeline: PipelineStages, numbers: _Numbers) -> _Array:
        """Returns [3, kinds of stages, n] seconds of a microbatch: forward, input gradient, weight gradient."""
        seconds = np.zeros((3, len(pipeline.examples), len(numbers)))
        recompute, layer = self._recompute[numbers], self._layer[numbers]
        for code in np.unique(recompute).tolist():
            columns = np.flatnonzero(recompute == code)
            seconds[:, :, columns] = self._alike_seconds(pipeline, code, layer[columns])
        return seconds

    def _alike_seconds(self, pipeline: PipelineStages, recompute: int, layer: _Numbers) -> _Array:
        """Returns [3, kinds of stages, n] seconds of layouts with the same recompute. layer: [n], their layers."""
        config = self._recomputes[recompute]
        modules = config.parts_of(0)

        def phases(kind: int, full: bool) -> Phases:
            return phases_of(self._layers[kind, full, modules][:, layer])

        embedding, head = phases_of(self._embedding[:, layer]), phases_of(self._head[:, layer])
        return totals(pipeline.phases(config, phases, embedding, head), len(layer))
