"""The parts of a layout's step, each clocked once for all layouts that agree in the axes that it depends on.

The functions are the ones that `StepModel` uses for one layout. Copies of activations are left out, and the parts of
the bar are added up.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from megatron.config.data_parallel import DataParallelSettings
from megatron.config.mesh import mesh_of
from megatron.config.run import RunConfig
from megatron.config.settings import RunSettings, resolve
from megatron.planner.search.axis import GROUPS, LAYER, MESH, SHARDING, STAGES, UPDATE
from megatron.planner.search.layout import Layout, axes_of
from megatron.planner.time.boundaries import chain_in_node
from megatron.planner.time.clock import Clock, Places
from megatron.planner.time.constants import Number
from megatron.planner.time.hardware import Cluster, Place
from megatron.planner.time.model_work import ModelWork, model_work, places_of
from megatron.planner.time.operations import repeated
from megatron.planner.time.optimizer_update import OptimizerUpdate, optimizer_update
from megatron.planner.time.pipeline_stages import PipelineStages, columns, totals
from megatron.planner.time.replicas import Held, Reductions, Replicas, held_by, shared_by_ends
from megatron.planner.time.software import Software
from megatron.planner.time.stage_time import MEMORY, NOTHING, Parts, Phases
from megatron.schedule.registry import SCHEDULES

_Array = NDArray[np.float64]
_T = TypeVar("_T")
Modules = frozenset[str]  # those that backward recomputes
LayerVariant = tuple[int, bool, Modules]  # kind of layer, whether backward repeats all of it, and else its modules

# The axes that each part depends on. A layer depends on the schedule too, but only as far as that splits the backward.
LAYER_AXES, MESH_AXES, PIPELINE_AXES = axes_of(LAYER), axes_of(MESH), axes_of(STAGES, GROUPS)
STAGE_AXES, SHARDING_AXES, UPDATE_AXES = axes_of(STAGES), axes_of(SHARDING), axes_of(SHARDING, UPDATE)
REPLICA_AXES = axes_of(MESH, STAGES, SHARDING)


@dataclass(frozen=True)
class LayerSeconds:
    """Seconds of a microbatch, [3] of forward, input gradient and weight gradient.

    layers: of each variant of a layer. residual: bytes of the hidden states that pass from stage to stage.
    """

    layers: Mapping[LayerVariant, _Array]
    embedding: _Array
    head: _Array
    residual: float


@dataclass(frozen=True)
class StageReplicas:
    """The communication of replicas.

    replicas: of one rank of each kind, with stages of these `kinds`; `example`: of each kind, the place of a stage.
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
            self.replicas.with_microbatch(clock, phases_of(seconds[:, kind]), place)
            for kind, place in enumerate(self.example)
        ]
        return totals(stages, seconds.shape[-1])

    def outside_schedule(self, clock: Clock, seconds: _Array, optimizer: OptimizerUpdate) -> _Array:
        """Returns the [n] seconds of the step outside of its schedule. seconds: [3, kinds of stages, n]."""
        stages = [phases_of(seconds[:, kind]) for kind in self.kinds]
        outside = self.replicas.outside_schedule(clock, self.reductions, optimizer, stages)
        return columns([outside.total], seconds.shape[-1])[0]


class StepParts:
    """The parts of layouts of a run that `config.rules` accept."""

    def __init__(self, run: RunConfig, world_size: int, cluster: Cluster, software: Software, clock: Clock) -> None:
        self._run, self._world_size, self._cluster = run, world_size, cluster
        self._software, self.clock = software, clock
        self._cache: dict[Hashable, Any] = {}

    def layer(self, layout: Layout, recomputed: tuple[Modules, ...]) -> LayerSeconds:
        """Returns the seconds of layers for each choice of modules that are recomputed."""
        key = layout.pp > 1 and SCHEDULES[layout.schedule].splits_backward, recomputed
        return self._cached(LAYER_AXES, layout, lambda: self._layer(layout, recomputed), *key)

    def chain_in_node(self, layout: Layout) -> int:
        """Returns how many neighbours along the pipeline share a node."""
        return chain_in_node(self._meshed(layout).mesh, self._cluster)

    def hop(self, place: Place, residual: float) -> tuple[float, float]:
        """Returns the seconds of hidden states on a link between stages, and until they have arrived."""
        latency = _number(self.clock.hop_latency(place))
        return _number(self.clock.hop(place, residual)) - latency, latency

    def pipeline(self, layout: Layout) -> PipelineStages:
        """Returns the stages."""

        def stages() -> PipelineStages:
            kinds = self._cached((), layout, lambda: self._work(layout).kinds, "kinds")
            return PipelineStages.alike(self._settings(layout).pipeline, kinds)

        return self._cached(PIPELINE_AXES, layout, stages)

    def replicas(self, layout: Layout) -> StageReplicas:
        """Returns the communication of replicas."""
        return self._cached(REPLICA_AXES, layout, lambda: self._replicas(layout))

    def optimizer(self, layout: Layout) -> OptimizerUpdate:
        """Returns the update of the parameters."""
        half = self._run.model.dtype_name != "float32"
        return self._cached(
            UPDATE_AXES, layout, lambda: optimizer_update(self._run.optimizer, self._settings(layout), half=half)
        )

    @property
    def straggling(self) -> float:
        """Part of a step that is spent waiting for the slowest rank."""
        return _number(self.clock.straggling(self._world_size))

    def samples(self, layout: Layout) -> int:
        """Returns the samples of a step."""
        return self._settings(layout).batches.final_global_batch_size

    def _cached(self, axes: Sequence[str], layout: Layout, compute: Callable[[], _T], *details: Hashable) -> _T:
        key = (axes, *(getattr(layout, axis) for axis in axes), *details)
        if key not in self._cache:
            self._cache[key] = compute()
        value: _T = self._cache[key]
        return value

    def _settings(self, layout: Layout) -> RunSettings:
        run = layout.apply(self._run)
        return resolve(run, mesh_of(run.parallel, self._world_size))

    def _meshed(self, layout: Layout) -> RunSettings:
        """Returns settings with the mesh of a layout, and perhaps other choices on all other axes."""
        return self._cached(MESH_AXES, layout, lambda: self._settings(layout), "settings")

    def _sharding(self, layout: Layout) -> DataParallelSettings:
        split = layout.pp > 1 and layout.schedule
        return self._cached(SHARDING_AXES, layout, lambda: self._settings(layout).data_parallel, split)

    def _places(self, layout: Layout) -> Places:
        """Returns where the ranks of all groups but those inside of cp are."""

        def places() -> Places:
            settings = dataclasses.replace(self._meshed(layout), data_parallel=self._sharding(layout))
            return places_of(settings, self._cluster)

        return self._cached((*MESH_AXES, *SHARDING_AXES), layout, places)

    def _work(self, layout: Layout) -> ModelWork:
        return model_work(layout.apply(self._run), self._settings(layout), self._software)

    def _layer(self, layout: Layout, recomputed: tuple[Modules, ...]) -> LayerSeconds:
        work, clock, places = self._work(layout), self.clock, places_of(self._settings(layout), self._cluster)
        layers: dict[LayerVariant, _Array] = {}
        for kind, operations in enumerate(work.works):
            once = clock.layer_once(operations, places)
            whole = clock.with_repeated(operations, once, (), places, full=True)
            for modules in recomputed:
                parts = clock.with_repeated(operations, once, repeated(operations, modules), places, full=False)
                layers[kind, True, modules], layers[kind, False, modules] = _seconds(whole), _seconds(parts)
        embedding, head = (_seconds(clock.end(end, places)) for end in (work.embedding, work.head))
        return LayerSeconds(layers, embedding, head, work.sizes.residual)

    def _held(self, layout: Layout) -> tuple[list[Held], int]:
        """Returns the parameters of each kind of stage, and those of the first rank that another rank has, too."""
        spec = self._cached((), layout, lambda: self._work(layout).spec, "spec")
        mesh, pipeline = self._meshed(layout).mesh, self.pipeline(layout)
        shared = shared_by_ends(spec, mesh, pipeline.settings.stages_of(0))
        return [held_by(spec, mesh, stage) for stage in pipeline.examples], shared

    def _replicas(self, layout: Layout) -> StageReplicas:
        pipeline, places, clock = self.pipeline(layout), self._places(layout), self.clock
        settings = self._sharding(layout)
        held, shared = self._cached((*STAGE_AXES, "tp", "ep", "etp"), layout, lambda: self._held(layout))
        everywhere = [held[kind] for kind in pipeline.kind_of.tolist()]
        rank_of = pipeline.settings.placement.rank_of
        width = self._cached((), layout, lambda: self._work(layout).sizes.e, "width")
        whole = Replicas(settings, places, everywhere, rank_of)
        buckets, settings = whole.buckets, dataclasses.replace(settings, bucket_size=whole.bucket_size)
        kinds = tuple(kind for kinds in pipeline.ranks for kind in kinds)
        ranks = [rank for rank, kinds in enumerate(pipeline.ranks) for _ in kinds]
        replicas = Replicas(settings, places, [held[kind] for kind in kinds], ranks, width, shared)
        example = tuple(kinds.index(kind) for kind in range(len(held)))
        reductions = replicas.reductions(clock)
        overlapped = reductions.overlapped
        return StageReplicas(
            replicas,
            kinds,
            example,
            np.array([0.0 if overlapped is None else _number(overlapped[place]) / buckets for place in example]),
            buckets,
            reductions,
            any(replicas.with_microbatch(clock, NOTHING, place) is not NOTHING for place in example),
        )


def phases_of(seconds: _Array) -> Phases:
    """Returns the phases that take these [3, n] seconds, as one part."""
    return Phases(*(Parts({MEMORY: row}) for row in seconds))


def _seconds(phases: Phases) -> _Array:
    """Returns [3] seconds."""
    return totals([phases], 1)[:, 0, 0]


def _number(seconds: Number) -> float:
    return float(np.squeeze(seconds))
