"""The step time of many layouts at once: a lower bound for all of them, and the exact time of those that need it.

Layouts share most of their parts, which are clocked once (step_parts.py) and combined for all layouts by numpy. Only the
schedule depends on everything: it has a bound in closed form (planner/schedule/bound.py), and is played where the exact
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
from megatron.planner.search.layout import Candidates, Layout
from megatron.planner.search.layout_table import distinct, groups_of
from megatron.planner.search.step_parts import GROUPED, LAYER, MESH, REPLICAS, UPDATE, Pipeline, StepParts
from megatron.planner.time.boundaries import NEARBY, end_of_chain
from megatron.planner.time.clock import Clock
from megatron.planner.time.hardware import Cluster
from megatron.planner.time.play import Play, PlayShape, makespans
from megatron.planner.time.software import Software
from megatron.schedule.costs import Costs
from megatron.schedule.registry import SCHEDULES

_Array = NDArray[np.float64]
_Numbers = NDArray[np.int64]
_ROUNDING = 1e-9  # sums in another order differ by much less
_AT_ONCE = 12288  # layouts whose costs stay in the cache


@dataclass(frozen=True)
class _Steps:
    """n layouts of one pipeline, with K schedules.

    numbers, rest: [n] their numbers among the candidates, and seconds outside of the schedule. of: [n] the schedule of each.
    m, buckets: [K] microbatches, and buckets of each stage. costs: of the K schedules.
    """

    numbers: _Numbers
    pipeline: Pipeline
    rest: _Array
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
        # Copies of activations cost nothing here.
        first, alike = distinct([codes for axis, codes in candidates.codes.items() if axis != "offload"])
        return self._seconds(candidates.take(first))[alike]

    def _seconds(self, candidates: Candidates) -> _Array:
        found = np.zeros(len(candidates))
        for steps in self._steps(candidates):
            shape = self._shape(steps.pipeline)
            schedule = least_makespans(
                *(shape.schedule, shape.p, shape.v, shape.group, steps.m, steps.costs, steps.buckets),
                blocking=shape.blocking,
            )
            found[steps.numbers] = schedule[steps.of] + steps.rest
        return found * (1 + self._parts.straggling) * (1 - _ROUNDING)

    def played_seconds(self, candidates: Candidates) -> _Array:
        """Returns [N] seconds of a step, those of `StepModel` but for rounding, and without copies of activations."""
        found, offload = np.zeros(len(candidates)), candidates.column("offload")
        numbers, plays = [], []
        for steps in self._steps(candidates):
            found[steps.numbers] = steps.rest
            for which in groups_of([steps.m, steps.buckets]):
                here = np.isin(steps.of, which)
                some = steps.numbers[here]
                # Copies in no time change nothing, and exact work needs the same graph with times of copies.
                shape = self._shape(steps.pipeline, int(steps.buckets[which[0]]), offload=bool(offload[some].any()))
                plays.append(Play(shape, int(steps.m[which[0]]), steps.costs.take(which)))
                numbers.append((some, np.searchsorted(which, steps.of[here])))
        for (some, of), seconds in zip(numbers, makespans(plays), strict=True):
            found[some] += seconds[of]
        return found * (1 + self._parts.straggling)

    def _shape(self, pipeline: Pipeline, buckets: int = 1, *, offload: bool = False) -> PlayShape:
        settings = pipeline.settings
        p = settings.placement.num_ranks
        return PlayShape(
            settings.schedule,
            p,
            settings.placement.num_stages // p,
            settings.group,
            overlap=settings.overlap,
            blocking=not settings.overlap,
            buckets=buckets,
            offload=offload,
        )

    def _steps(self, candidates: Candidates) -> Iterator[_Steps]:
        """The layouts by pipeline, those with the same replicas and the same schedule next to each other."""
        if not len(candidates):
            return
        columns = _Columns(self._run, self._world_size, self._parts, candidates)
        _, pipelines = distinct([candidates.codes[axis] for axis in GROUPED])
        order = np.lexsort((columns.scheduled, columns.replicas, pipelines))
        for numbers in np.split(order, np.flatnonzero(np.diff(pipelines[order])) + 1):
            pipeline = self._parts.pipeline(candidates.layout(numbers[0]))
            for start in range(0, len(numbers), _AT_ONCE):
                yield columns.steps(pipeline, numbers[start : start + _AT_ONCE])


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
        layers, self._layer = distinct([*(codes[axis] for axis in LAYER), split.astype(np.int16)])
        found = [parts.layer(candidates.layout(number), recomputed) for number in layers.tolist()]
        self._again = {modules: np.stack([each.again[modules] for each in found], axis=-1) for modules in recomputed}
        self._whole = np.stack([each.whole for each in found], axis=-1)
        self._embedding = np.stack([each.embedding for each in found], axis=-1)
        self._head = np.stack([each.head for each in found], axis=-1)

        meshes, mesh = distinct([codes[axis] for axis in MESH])
        self._chain = np.array([parts.chain_in_node(candidates.layout(number)) for number in meshes.tolist()])[mesh]
        hops, hop = distinct([self._layer, self._chain, candidates.column("pp")])
        nearby, far = [], []
        for number in hops.tolist():
            chain, residual = int(self._chain[number]), found[self._layer[number]].residual
            nearby.append(parts.hop(NEARBY, residual) if chain > 1 else (0.0, 0.0))
            far.append(parts.hop(end_of_chain(chain), residual) if candidates.layout(number).pp > chain else (0.0, 0.0))
        # [time on the link or until the data is there, N] between stages in a node, and between those in two.
        self._nearby, self._far = np.array(nearby).T[:, hop], np.array(far).T[:, hop]

        replicas, self.replicas = distinct([codes[axis] for axis in REPLICAS])
        self._replicas = [parts.replicas(candidates.layout(number)) for number in replicas.tolist()]
        updates, self._update = distinct([codes[axis] for axis in UPDATE])
        self._optimizers = [parts.optimizer(candidates.layout(number)) for number in updates.tolist()]
        # Neither the update nor, here, copies of activations change the schedule.
        _, self.scheduled = distinct([codes[axis] for axis in codes if axis not in ("offload", "optimizer_offload")])
        ranks = np.prod([candidates.column(axis) for axis in ("tp", "cp", "pp")], axis=0)
        samples = parts.samples(candidates.layout(0))
        self._m = samples // (candidates.column("micro_batch") * (world_size // ranks))

    def steps(self, pipeline: Pipeline, numbers: _Numbers) -> _Steps:
        """Returns some of the layouts, which have this pipeline. Those with the same replicas are next to each other, and of
        these the ones with the same schedule."""
        begins = np.diff(self.scheduled[numbers], prepend=-1) != 0
        of, played = np.cumsum(begins) - 1, numbers[begins]
        seconds = self._stage_seconds(pipeline, played)
        buckets, rest = np.zeros(len(played), dtype=np.int64), np.zeros(len(numbers))
        bucket = np.zeros((len(pipeline.examples), len(played)))
        places = self.replicas[numbers]
        borders = [0, *(np.flatnonzero(np.diff(places)) + 1).tolist(), len(numbers)]
        for start, stop in itertools.pairwise(borders):
            together, here = self._replicas[places[start]], slice(of[start], of[stop - 1] + 1)
            seconds[:, :, here] = together.with_microbatch(self._clock, seconds[:, :, here])
            buckets[here] = together.buckets
            bucket[:, here] = together.bucket[:, None]
            updates, update = np.unique(self._update[numbers[start:stop]], return_inverse=True)
            optimizers = [self._optimizers[number] for number in updates.tolist()]
            rests = together.rest(self._clock, seconds[:, :, here], optimizers)
            rest[start:stop] = rests[update, of[start:stop] - here.start]
        forward, input_grad, weight_grad = seconds[:, pipeline.kind_of]
        node_of = np.array(pipeline.settings.placement.rank_of)[:, None] // self._chain[played]
        transfer, latency = (
            np.where(node_of[1:] == node_of[:-1], nearby[played], far[played])
            for nearby, far in zip(self._nearby, self._far, strict=True)
        )
        nothing = np.zeros_like(forward)
        costs = Costs(
            forward=forward,
            input_grad=input_grad,
            weight_grad=weight_grad,
            backward=input_grad + weight_grad,
            transfer=transfer,
            latency=latency,
            offload=nothing,
            reload=nothing,
            bucket=bucket[pipeline.kind_of],
        )
        return _Steps(numbers, pipeline, rest, of, self._m[played], buckets, costs)

    def _stage_seconds(self, pipeline: Pipeline, numbers: _Numbers) -> _Array:
        """[3, kinds of stages, n] seconds of a microbatch: forward, input gradient, weight gradient."""
        found = np.zeros((3, len(pipeline.examples), len(numbers)))
        recompute, layer = self._recompute[numbers], self._layer[numbers]
        for code in np.unique(recompute).tolist():
            which = np.flatnonzero(recompute == code)
            config = self._recomputes[code]
            in_parts, whole = pipeline.layers(config)
            places = layer[which]
            found[:, :, which] = in_parts @ self._again[config.parts_of(0)][:, :, places]
            if whole.any():
                found[:, :, which] += whole @ self._whole[:, :, places]
        for place, stage in enumerate(pipeline.examples):
            if stage.embedding:
                found[:, place] += self._embedding[:, layer]
            if stage.head:
                found[:, place] += self._head[:, layer]
        return found
