"""The parts of a layout's step, each clocked once for all layouts that agree in the axes that it depends on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from megatron.config.data_parallel import DataParallelSettings
from megatron.config.mesh import mesh_of
from megatron.config.pipeline import PipelineSettings
from megatron.config.recompute import RecomputeConfig
from megatron.config.run import RunConfig
from megatron.config.settings import RunSettings, resolve
from megatron.planner.search.layout import AXES, Layout
from megatron.planner.time.boundaries import chain_in_node
from megatron.planner.time.clock import Clock, Places
from megatron.planner.time.constants import Number
from megatron.planner.time.hardware import Cluster, Place
from megatron.planner.time.model_work import ModelWork, model_work, places_of
from megatron.planner.time.operations import repeated
from megatron.planner.time.optimizer_update import OptimizerUpdate, optimizer_update
from megatron.planner.time.replicas import Held, Reductions, Replicas, held_by, shared_by_ends
from megatron.planner.time.software import Software
from megatron.planner.time.stage_time import MEMORY, NOTHING, Parts, Phases
from megatron.schedule.partition import Stage
from megatron.schedule.registry import SCHEDULES

_Array = NDArray[np.float64]
_T = TypeVar("_T")
Modules = frozenset[str]  # those that backward recomputes

# The axes that each part depends on. A layer depends on the schedule too, but only as far as that splits the backward.
LAYER = ("tp", "sequence_parallel", "tp_overlap", "cp", "cp_kind", "cp_inner", "micro_batch", "ep", "etp")
PIPELINE = tuple(axis for axis in AXES if axis in ("pp", "schedule", "virtual_stages", "uneven_ends"))
GROUPED = (*PIPELINE, "group")
MESH = ("tp", "cp", "pp", "ep", "etp")
SHARDING = ("sharding", "reduce_mode", "dp_overlap", "instances")
UPDATE = (*SHARDING, "optimizer_offload")
REPLICAS = (*dict.fromkeys((*MESH, *PIPELINE, *SHARDING)),)


@dataclass(frozen=True)
class LayerSeconds:
    """Seconds of a microbatch: arrays are [3, kinds of layers], of forward, input gradient and weight gradient.

    again: by the modules that are recomputed. whole: if all of the layer is. embedding, head: [3]. residual: bytes of the
    hidden states that pass from stage to stage.
    """

    again: Mapping[Modules, _Array]
    whole: _Array
    embedding: _Array
    head: _Array
    residual: float


@dataclass(frozen=True)
class Pipeline:
    """The stages of a pipeline, of which most are alike.

    examples: one stage of each kind. kind_of: [stages] its kind. ranks: the kinds of stages of each rank, of alike ranks
    once. layer_kinds: of each layer of the model.
    """

    settings: PipelineSettings
    examples: tuple[Stage, ...]
    kind_of: NDArray[np.int64]
    ranks: tuple[tuple[int, ...], ...]
    layer_kinds: tuple[int, ...]

    def layers(self, recompute: RecomputeConfig) -> _Array:
        """Returns [2, kinds of stages, kinds of layers] layers that are recomputed in parts, and whole."""
        counts = np.zeros((2, len(self.examples), max(self.layer_kinds) + 1))
        for place, stage in enumerate(self.examples):
            for group, full in recompute.groups(stage.layers):
                for number in group:
                    counts[int(full), place, self.layer_kinds[number]] += 1
        return counts


@dataclass(frozen=True)
class ReplicaSeconds:
    """What replicas do together.

    replicas: those of one rank of each kind, with stages of these `kinds`; `example`: of each kind, the place of one.
    bucket: [kinds of stages] seconds of each of `buckets` reductions behind a stage's last backward. every_microbatch:
    whether they communicate in every microbatch.
    """

    replicas: Replicas
    kinds: tuple[int, ...]
    example: tuple[int, ...]
    bucket: _Array
    buckets: int
    reductions: Reductions
    every_microbatch: bool

    def with_microbatch(self, clock: Clock, seconds: _Array) -> _Array:
        """Returns [3, kinds of stages, n] seconds of a microbatch with its communication."""
        if not self.every_microbatch:
            return seconds
        stages = [
            self.replicas.with_microbatch(clock, _phases(seconds[:, kind]), self.example[kind])
            for kind in range(len(self.example))
        ]
        return np.stack(
            [[each.forward.total, each.input_grad.total, each.weight_grad.total] for each in stages], axis=1
        )

    def rest(self, clock: Clock, seconds: _Array, optimizers: Sequence[OptimizerUpdate]) -> _Array:
        """Returns the [optimizers, n] seconds of the step outside of its schedule.

        seconds: [3, kinds of stages, n] of a microbatch.
        """
        stages = [_phases(seconds[:, kind]) for kind in self.kinds]
        slowing = self.reductions.slowing + self.replicas.sum_slowing(clock, self.reductions, stages)
        others = self.reductions.exposed + self.replicas.late_gathers(clock, stages) + slowing
        found = np.empty((len(optimizers), seconds.shape[-1]))
        for row, optimizer in zip(found, optimizers, strict=True):
            row[:] = others + self.replicas.update(clock, optimizer, stages) + clock.step()
        return found


class StepParts:
    """The parts of layouts of a run that `config.rules` accept."""

    def __init__(self, run: RunConfig, world_size: int, cluster: Cluster, software: Software, clock: Clock) -> None:
        self._run, self._world_size, self._cluster = run, world_size, cluster
        self._software, self.clock = software, clock
        self._found: dict[Hashable, Any] = {}

    def layer(self, layout: Layout, recomputed: tuple[Modules, ...]) -> LayerSeconds:
        """Returns the seconds of layers for each choice of modules that are recomputed."""
        key = layout.pp > 1 and SCHEDULES[layout.schedule].splits_backward, recomputed
        return self._once(LAYER, layout, lambda: self._layer(layout, recomputed), *key)

    def chain_in_node(self, layout: Layout) -> int:
        """Returns how many neighbours along the pipeline share a node."""
        return chain_in_node(self._meshed(layout).mesh, self._cluster)

    def hop(self, place: Place, residual: float) -> tuple[float, float]:
        """Returns the seconds of hidden states on a link between stages, and until they are there."""
        latency = _number(self.clock.hop_latency(place))
        return _number(self.clock.hop(place, residual)) - latency, latency

    def pipeline(self, layout: Layout) -> Pipeline:
        """Returns the stages."""
        return self._once(GROUPED, layout, lambda: self._pipeline(layout))

    def replicas(self, layout: Layout) -> ReplicaSeconds:
        """Returns what replicas do together."""
        return self._once(REPLICAS, layout, lambda: self._replicas(layout))

    def optimizer(self, layout: Layout) -> OptimizerUpdate:
        """Returns the update of the parameters."""
        return self._once(UPDATE, layout, lambda: self._optimizer(layout))

    @property
    def straggling(self) -> float:
        """Part of a step that is spent waiting for the slowest rank."""
        return _number(self.clock.straggling(self._world_size))

    def samples(self, layout: Layout) -> int:
        """Returns the samples of a step."""
        return self._settings(layout).batches.final_global_batch_size

    def _once(self, axes: Sequence[str], layout: Layout, find: Callable[[], _T], *more: Hashable) -> _T:
        key = (axes, *(getattr(layout, axis) for axis in axes), *more)
        if key not in self._found:
            self._found[key] = find()
        found: _T = self._found[key]
        return found

    def _settings(self, layout: Layout) -> RunSettings:
        run = layout.apply(self._run)
        return resolve(run, mesh_of(run.parallel, self._world_size))

    def _meshed(self, layout: Layout) -> RunSettings:
        """Settings of a layout with the same mesh, and perhaps others of everything else."""
        return self._once(MESH, layout, lambda: self._settings(layout), "settings")

    def _sharding(self, layout: Layout) -> DataParallelSettings:
        split = layout.pp > 1 and layout.schedule
        return self._once(SHARDING, layout, lambda: self._settings(layout).data_parallel, split)

    def _places(self, layout: Layout) -> Places:
        """Where the ranks of all groups but those inside of cp are."""

        def found() -> Places:
            settings = dataclasses.replace(self._meshed(layout), data_parallel=self._sharding(layout))
            return places_of(settings, self._cluster)

        return self._once((*MESH, *SHARDING), layout, found)

    def _work(self, layout: Layout) -> ModelWork:
        return model_work(layout.apply(self._run), self._settings(layout), self._software)

    def _layer(self, layout: Layout, recomputed: tuple[Modules, ...]) -> LayerSeconds:
        settings, clock = self._settings(layout), self.clock
        places = places_of(settings, self._cluster)
        work = model_work(layout.apply(self._run), settings, self._software)
        again: dict[Modules, list[_Array]] = {modules: [] for modules in recomputed}
        whole = []
        for kind in work.works:
            once = clock.layer_once(kind, places)
            whole.append(_seconds(clock.with_repeated(kind, once, (), places, full=True)))
            for modules, found in again.items():
                operations = repeated(kind, modules)
                found.append(_seconds(clock.with_repeated(kind, once, operations, places, full=False)))
        return LayerSeconds(
            {modules: np.stack(found, axis=1) for modules, found in again.items()},
            np.stack(whole, axis=1),
            _seconds(clock.end(work.embedding, places)),
            _seconds(clock.end(work.head, places)),
            work.sizes.residual,
        )

    def _pipeline(self, layout: Layout) -> Pipeline:
        settings = self._settings(layout).pipeline
        layer_kinds = self._once((), layout, lambda: self._work(layout).kinds, "kinds")
        kinds: dict[tuple[object, ...], int] = {}
        examples, kind_of = [], []
        for stage in settings.stages:
            key = (tuple(layer_kinds[number] for number in stage.layers), stage.embedding, stage.head)
            if key not in kinds:
                kinds[key] = len(kinds)
                examples.append(stage)
            kind_of.append(kinds[key])
        placement = settings.placement
        ranks = [tuple(kind_of[stage] for stage in placement.stages_of(rank)) for rank in range(placement.num_ranks)]
        return Pipeline(settings, tuple(examples), np.array(kind_of), tuple(dict.fromkeys(ranks)), layer_kinds)

    def _held(self, layout: Layout) -> tuple[list[Held], int]:
        """Parameters of each kind of stage, and those of the first rank that another one has, too."""
        spec = self._once((), layout, lambda: self._work(layout).spec, "spec")
        mesh, pipeline = self._meshed(layout).mesh, self.pipeline(layout)
        shared = shared_by_ends(spec, mesh, pipeline.settings.stages_of(0))
        return [held_by(spec, mesh, stage) for stage in pipeline.examples], shared

    def _replicas(self, layout: Layout) -> ReplicaSeconds:
        pipeline, places, clock = self.pipeline(layout), self._places(layout), self.clock
        settings = self._sharding(layout)
        held, shared = self._once((*PIPELINE, "tp", "ep", "etp"), layout, lambda: self._held(layout))
        everywhere = [held[kind] for kind in pipeline.kind_of.tolist()]
        rank_of = pipeline.settings.placement.rank_of
        width = self._once((), layout, lambda: self._work(layout).sizes.e, "width")
        whole = Replicas(settings, places, everywhere, rank_of)
        buckets, settings = whole.buckets, dataclasses.replace(settings, bucket_size=whole.bucket_size)
        kinds = tuple(kind for kinds in pipeline.ranks for kind in kinds)
        ranks = [rank for rank, kinds in enumerate(pipeline.ranks) for _ in kinds]
        replicas = Replicas(settings, places, [held[kind] for kind in kinds], ranks, width, shared)
        example = tuple(kinds.index(kind) for kind in range(len(held)))
        reductions = replicas.reductions(clock)
        overlapped = reductions.overlapped
        return ReplicaSeconds(
            replicas,
            kinds,
            example,
            np.array([0.0 if overlapped is None else _number(overlapped[place]) / buckets for place in example]),
            buckets,
            reductions,
            any(replicas.with_microbatch(clock, NOTHING, place) is not NOTHING for place in example),
        )

    def _optimizer(self, layout: Layout) -> OptimizerUpdate:
        half = self._run.model.dtype_name != "float32"
        return optimizer_update(self._run.optimizer, self._settings(layout), half=half)


def _phases(seconds: _Array) -> Phases:
    return Phases(*(Parts({MEMORY: each}) for each in seconds))


def _seconds(phases: Phases) -> _Array:
    """[3]."""
    return np.array([_number(parts.total) for parts in (phases.forward, phases.input_grad, phases.weight_grad)])


def _number(seconds: Number) -> float:
    return float(np.squeeze(seconds))
