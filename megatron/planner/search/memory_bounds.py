"""The memory of all layouts of a search: a lower bound for many at once, and the exact figure of a few.

The bound takes the same steps as the plan, by the same code of planner/memory, each once per distinct combination of
the axes that it depends on: layers and ends (parts.py), stages (stage.py), the moments of the schedule (moments.py) and
the state of a rank (model_states.py). It is lower by weights that a step fetches from host memory, which count as none,
by the rounding of activations that move, and where messages are not overlapped with computations or computations run
together, by messages whose receive is posted early.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.base.errors import ConfigError
from megatron.config.data_parallel import LAST, DataParallelSettings
from megatron.config.mesh import mesh_of
from megatron.config.optimizer_offload import UPDATE, offload_settings
from megatron.config.pipeline import PipelineSettings, hides_exchanges
from megatron.config.recompute import RecomputeConfig
from megatron.config.run import RunConfig
from megatron.config.settings import resolve
from megatron.planner.memory.layer_moves import layer_moves, nothing_moves
from megatron.planner.memory.levels import ManyBytes, levels_of
from megatron.planner.memory.model_states import (
    StateMemory,
    ends_with_embedding,
    quantized_weights,
    rank_buckets,
    state_memory,
)
from megatron.planner.memory.moments import (
    AWAY,
    BACKWARD,
    KEPT,
    LAST_OF_STAGE,
    OF_GROUPS,
    counts_per_class,
    moments_of,
)
from megatron.planner.memory.parts import EndParts, LayerParts, end_levels, layer_levels
from megatron.planner.memory.plan import RankMemory, check_planned, plan_memory
from megatron.planner.memory.rank_buckets import BucketSums, RankBuckets
from megatron.planner.memory.sizes import batch_bytes, microbatch_sizes
from megatron.planner.memory.stage import StageEvents, stage_memory
from megatron.planner.search.layout import Candidates, Layout
from megatron.planner.search.layout_table import LayoutTable, Numbers, distinct, groups_of
from megatron.schedule.partition import Stage
from megatron.schedule.spec import ScheduleSizes
from megatron.spec.decoder import LayerSpec, decoder_spec
from megatron.spec.delta_net import DeltaNetSpec
from megatron.spec.memory.trace import ACTIVATIONS
from megatron.spec.sizes import FP32, Sizes, Target

_PLAIN = Layout()


@dataclass(frozen=True)
class Peaks:
    """Bytes of device memory and of host memory of the rank that has the most of each; and all pipeline ranks."""

    device: int
    host: int
    ranks: tuple[RankMemory, ...]


@dataclass(frozen=True)
class LeastBytes:
    """Lower bounds of device memory, and of the activations in host memory, [N] each."""

    device: ManyBytes
    host: ManyBytes


@dataclass(frozen=True)
class StageKind:
    """Equal for stages that need the same memory. kinds: of the layers, in order."""

    kinds: tuple[int, ...]
    embedding: bool
    head: bool


@dataclass(frozen=True)
class _Rank:
    """Pipeline ranks that need the same memory. stages: their kinds. numbers: of the ranks. model: stages of the
    first."""

    stages: tuple[StageKind, ...]
    numbers: tuple[int, ...]
    model: tuple[Stage, ...]


class MemoryBounds:
    """The memory of layouts of a run on `world_size` devices of a kind. All other flags of the run stay.

    Raises ConfigError where `plan_memory` does for every layout.
    """

    def __init__(self, run: RunConfig, world_size: int, target: Target) -> None:
        check_planned(run)
        if run.model.lora_rank:
            raise ConfigError(f"--lora-rank {run.model.lora_rank}: layouts of adapters are not compared; leave it out")
        seq_length = run.data.seq_length
        assert seq_length
        self._run, self._world_size, self._target = run, world_size, target
        self._model = dataclasses.replace(
            run.model, max_position_embeddings=run.model.max_position_embeddings or seq_length
        )
        self._spec = decoder_spec(self._model)
        offload = run.activation_offload
        self._offloaded_layers = offload.offloaded_weight_layers
        fp8_layers = run.fp8.layers(len(self._spec.layers)) if run.fp8.enabled else range(0)
        self._kinds, self._kind_of = _kinds_of_layers(self._spec.layers, fp8_layers)
        self._buckets: dict[tuple[StageKind, ...], RankBuckets] = {}
        self._settings: dict[Hashable, DataParallelSettings] = {}
        self._exact: dict[Layout, Peaks] = {}
        self._runs: dict[Layout, RunConfig] = {}

    def exact(self, layouts: Sequence[Layout]) -> list[Peaks]:
        """Returns the plans of these layouts, each made once for all layouts that need the same memory."""
        found = []
        for layout in layouts:
            key = self._relevant(layout)
            if key not in self._exact:
                run = layout.apply(self._run)
                settings = resolve(run, mesh_of(run.parallel, self._world_size))
                ranks = plan_memory(run, settings, self._target)
                self._exact[key] = Peaks(max(r.peak for r in ranks), max(r.host for r in ranks), tuple(ranks))
            found.append(self._exact[key])
        return found

    def nbytes(self, candidates: Candidates) -> ManyBytes:
        """Returns the [N] lower bounds of the peak of the fullest rank, in bytes."""
        return self.bounds(candidates).device

    def bounds(self, candidates: Candidates) -> LeastBytes:
        """Returns the lower bounds of the fullest rank."""
        if not len(candidates):
            return LeastBytes(np.zeros(0), np.zeros(0))
        codes = [codes for axis, codes in candidates.codes.items() if axis != "tp_overlap"]
        first, alike = distinct(codes)
        found = self._bounds(candidates.take(first))
        return LeastBytes(found.device[alike], found.host[alike])

    def _bounds(self, candidates: Candidates) -> LeastBytes:
        table = LayoutTable(candidates, self._run, self._world_size)
        first, of_size = distinct(self._size_columns(table))
        sizes = [self._sizes(table, number) for number in first]
        # Whole layers are recomputed by group, but a prediction's with its stage.
        predicts = bool(self._spec.predictions)
        modules_of = [(recompute.modules, predicts and recompute.is_full) for recompute in table.recompute]
        again = list(dict.fromkeys(modules_of))
        again_of = np.array([again.index(modules) for modules in modules_of])[table.codes["recompute"]]
        first, of_layer = distinct([of_size, again_of])
        size_of, recomputed = of_size[first], [again[number] for number in again_of[first]]
        layers = [
            layer_levels(
                self._spec.layers[kind],
                [sizes[n].of_layer(kind) for n in size_of],
                [modules for modules, _ in recomputed],
                self._run.activation_offload,
            )
            for kind in self._kinds
        ]
        if predicts:
            ends = end_levels(self._spec, [sizes[number] for number in size_of], recomputed)
        else:
            ends = _taker(size_of)(end_levels(self._spec, sizes, [(frozenset(), False)] * len(sizes)))
        batch = np.array([batch_bytes(one) for one in sizes], np.float64)[of_size]
        found, host = np.zeros(len(candidates)), np.zeros(len(candidates))
        for places in groups_of(table.columns("pp", "schedule", "virtual_stages", "uneven_ends")):
            pipeline = candidates.layout(places[0]).apply(self._run).pipeline_settings()
            ranks = self._ranks(pipeline)
            stages = {kind: stage for rank in ranks for kind, stage in zip(rank.stages, rank.model, strict=True)}
            levels = self._stages(table, stages, layers, ends, places, of_layer[places])
            message = ends.residual[of_layer[places]]
            for rank in ranks:
                state = self._state(table, rank, places, sizes, of_size[places])
                used = self._used(table, rank, pipeline, places, levels, message, state.staging)
                in_step = state.gathered + state.quantized + used.device
                at_end = np.maximum(state.at_end, np.maximum(state.norm, state.prefetched))
                late = (
                    state.gathered + state.quantized + np.where(state.late_blocks > 0, state.late_blocks + message, 0)
                )
                peak = state.start + np.maximum(np.maximum(in_step, late), at_end)
                if pipeline.pairs:  # as in plan_memory
                    waiting = [
                        layers[kind].forward.peak[of_layer[places]] for stage in rank.stages for kind in stage.kinds
                    ]
                    peak += np.maximum.reduce(waiting) if waiting else 0.0
                found[places] = np.maximum(found[places], peak)
                host[places] = np.maximum(host[places], used.host)
        return LeastBytes(np.floor(found + batch * table.microbatches), host)

    def _sizes(self, table: LayoutTable, number: int) -> Sizes:
        run = self._run
        assert run.data.seq_length
        return microbatch_sizes(
            self._model,
            table.mesh(number),
            sequence_parallel=bool(table.sequence_parallel[number]),
            comm_type=table.value("cp_kind", number),
            cp_inner=table.value("cp_inner", number),
            split_backward=bool(table.split[number]),
            rounds_grads=self._data_parallel(table, number).rounds_grads,
            keeps_weights=bool(table.keeps_weights[number]),
            microbatches=int(table.microbatches[number]),
            seq_length=run.data.seq_length,
            micro_batch_size=table.value("micro_batch", number),
            loss_chunk=run.train.cross_entropy_chunk_size,
            mlp_chunk=run.recompute.mlp_chunk_size,
            documents=run.data.separate_documents,
            target=self._target,
            moe=run.moe,
            fp8=run.fp8,
        )

    def _ranks(self, pipeline: PipelineSettings) -> list[_Rank]:
        """The kinds of ranks of a pipeline."""
        found: dict[tuple[StageKind, ...], list[int]] = {}
        for rank in range(pipeline.placement.num_ranks):
            stages = tuple(
                StageKind(tuple(self._kind_of[layer] for layer in stage.layers), stage.embedding, stage.head)
                for stage in pipeline.stages_of(rank)
            )
            found.setdefault(stages, []).append(rank)
        return [_Rank(stages, tuple(ranks), pipeline.stages_of(ranks[0])) for stages, ranks in found.items()]

    def _stages(
        self,
        table: LayoutTable,
        stages: Mapping[StageKind, Stage],
        layers: Sequence[LayerParts],
        ends: EndParts,
        places: Numbers,
        of_layer: Numbers,
    ) -> dict[StageKind, ManyBytes]:
        """The [2, counts, N] bytes on the device and in host memory that each count of a class of stages stands for,
        see moments.py. stages: one of each kind."""
        levels = {kind: np.zeros((2, AWAY + 1, len(places))) for kind in stages}
        configs = [self._applied(Layout(offload=share)).activation_offload for share in table.choices("offload")]
        groupings = [_grouping(each) for each in table.recompute]
        shapes = np.array([groupings.index(each) for each in groupings])
        ratios = table.values("offload", places)
        for some in groups_of([shapes[table.codes["recompute"][places]], ratios > 0]):
            offload = configs[table.codes["offload"][places[some[0]]]]
            recompute = table.recompute[table.codes["recompute"][places[some[0]]]]
            used, alike = distinct([of_layer[some], table.codes["offload"][places[some]]])
            take, ratio = _taker(of_layer[some[used]]), ratios[some[used]]
            some_layers, some_ends = [take(layer) for layer in layers], take(ends)
            for kind, stage in stages.items():
                held = [some_layers[number] for number in kind.kinds]
                moves = still = nothing_moves(len(held))
                if offload.kind is not None and (offload.kind != "ratio" or ratio[0]):
                    moves = layer_moves(offload, recompute, held, some_ends, embedding=kind.embedding, ratio=ratio)
                events = (
                    StageEvents(stage, held, some_ends, recompute, some_moves, holds_input=offload.kind is None)
                    for some_moves in ([moves, still] if ratio[0] else [moves])
                )
                rows = [
                    row
                    for reported in events
                    for row in _counted(reported, kind, some_ends.residual, splits=bool(table.split[places[0]]))
                ]
                on_device, on_host = levels[kind]
                on_device[: len(rows), some] = np.array(rows)[:, alike]
                if ratio[0]:
                    away = ratio * rows[OF_GROUPS + KEPT]
                    on_device[AWAY, some], on_host[AWAY, some] = away[alike], -_rounded_down(away)[alike]
                    on_host[KEPT, some] = sum(map(_rounded_down, moves.by_layer), np.zeros(len(used)))[alike]
        return levels

    def _used(
        self,
        table: LayoutTable,
        rank: _Rank,
        pipeline: PipelineSettings,
        places: Numbers,
        levels: Mapping[StageKind, ManyBytes],
        message: ManyBytes,
        reduction: ManyBytes,
    ) -> LeastBytes:
        """The most that the computations of a step use on a rank."""
        kinds = list(dict.fromkeys(rank.stages))
        classes = [kinds.index(stage) for stage in rank.stages]
        found, host = np.zeros(len(places)), np.zeros(len(places))
        offloads = table.values("offload", places) > 0
        groups = table.values("group", places)
        p = pipeline.placement.num_ranks
        v, splits = pipeline.placement.num_stages // p, bool(table.split[places[0]])
        for some in groups_of([offloads, groups, table.microbatches[places]]):
            offload, group = bool(offloads[some[0]]), int(groups[some[0]])
            sizes = ScheduleSizes(p, v, int(table.microbatches[places[some[0]]]), group or p, pipeline.pairs)
            counts = moments_of(
                pipeline.schedule,
                sizes,
                rank.numbers,
                classes,
                offload=offload,
                overlap=pipeline.overlap,
                cpu=self._target.cpu,
            )
            rows = counts_per_class(offload=offload)
            parts = [levels[kind][0][:rows][:, some] for kind in kinds]
            for part, group in itertools.product(parts, range(0, rows - OF_GROUPS + 1, OF_GROUPS)):
                part[group + LAST_OF_STAGE] += reduction[some]
                if not splits:
                    part[group + LAST_OF_STAGE] = np.maximum(part[group + LAST_OF_STAGE], part[group + BACKWARD])
            found[some] = (counts @ np.concatenate([*parts, message[None, some]])).max(axis=0)
            if offload:
                on_host = np.concatenate([levels[kind][1][:rows][:, some] for kind in kinds])
                host[some] = (counts[:, :-1] @ on_host).max(axis=0)
        return LeastBytes(found, host)

    def _size_columns(self, table: LayoutTable) -> list[NDArray[Any]]:
        """What the sizes of a microbatch depend on."""
        axes = table.columns("tp", "cp", "cp_kind", "cp_inner", "micro_batch", "ep", "etp")
        of_fp8 = [table.keeps_weights, table.microbatches > 1] if self._run.fp8.enabled else []
        return [*axes, table.sequence_parallel, table.split, *of_fp8, *self._grad_columns(table)]

    def _grad_columns(self, table: LayoutTable) -> list[NDArray[Any]]:
        """What decides whether whole gradients are kept in bf16."""
        in_bf16 = self._run.optimizer.main_grads_dtype == "bf16"
        return [*table.columns("sharding", "reduce_mode"), table.split] if in_bf16 else []

    def _state(
        self, table: LayoutTable, rank: _Rank, places: Numbers, sizes: Sequence[Sizes], of_size: Numbers
    ) -> StateMemory:
        """The state of a rank."""
        shards = np.array([choice != "no_shard" for choice in table.choices("sharding")])[
            table.codes["sharding"][places]
        ]
        # Not cp: a parameter's copies are spread over cp x dp.
        first, of_bucket = distinct(
            [
                *(column[places] for column in table.columns("tp", "ep", "etp", "instances")),
                shards,
                *(column[places] for column in self._grad_columns(table)),
            ]
        )
        if rank.stages not in self._buckets:
            self._buckets[rank.stages] = rank_buckets(self._spec, rank.model, self._offloaded_layers)
        buckets = self._buckets[rank.stages]
        cut = [(table.mesh(number), self._data_parallel(table, number)) for number in places[first]]
        sums = BucketSums(*np.array([buckets.sums(*one, self._target) for one in cut]).T[:, of_bucket])
        kinds, of_kind = distinct(
            [column[places] for column in table.columns("sharding", "reduce_mode", "dp_overlap")]
            + [table.split[places]]
        )
        settings = [self._data_parallel(table, number) for number in places[kinds]]
        optimizer, width = self._run.optimizer, FP32 if self._model.dtype_name == "float32" else FP32 // 2
        of_choice = table.codes["optimizer_offload"][places]
        offloads = [
            offload_settings(optimizer, self._applied(Layout(optimizer_offload=value)).optimizer_offload)
            for value in table.choices("optimizer_offload")
        ]
        of_optimizer = [
            [buckets.optimizer(mesh, parts, optimizer, offload, half=width < FP32) for offload in offloads]
            for mesh, parts in cut
        ]
        weights = np.zeros(len(sizes), np.int64)
        if self._run.fp8.enabled:
            for number in np.unique(of_size):
                weights[number] = quantized_weights(self._spec, rank.model, sizes[number], self._offloaded_layers)
        return state_memory(
            sums,
            optimizer,
            width,
            shards_weights=np.array([each.shards == "optim_grads_params" for each in settings])[of_kind],
            keeps_gradients=np.array([each.mode == LAST for each in settings])[of_kind],
            overlaps=np.array([each.overlap_reduce for each in settings])[of_kind],
            updates_on_cpu=np.array([each.mode == UPDATE and each.fraction == 1.0 for each in offloads])[of_choice],
            ends_with_embedding=ends_with_embedding(self._spec, rank.model, pairs=hides_exchanges(self._run.parallel)),
            optimizer_bytes=np.array([[each.device + each.staging for each in row] for row in of_optimizer])[
                of_bucket, of_choice
            ],
            quantized=weights[of_size],
        )

    def _applied(self, layout: Layout) -> RunConfig:
        """The run under a layout."""
        if layout not in self._runs:
            self._runs[layout] = layout.apply(self._run)
        return self._runs[layout]

    def _data_parallel(self, table: LayoutTable, number: int) -> DataParallelSettings:
        key = tuple(
            table.value(axis, number)
            for axis in ("sharding", "reduce_mode", "dp_overlap", "instances", "pp", "schedule")
        )
        if key not in self._settings:
            self._settings[key] = table.data_parallel(number)
        return self._settings[key]

    def _relevant(self, layout: Layout) -> Layout:
        """A layout that needs the same memory, and the same one for all that do: axes without effect have their
        default."""
        unused = {"tp_overlap"}
        if layout.cp == 1:
            unused |= {"cp_kind", "cp_inner"}
        if layout.tp == 1:
            unused |= {"sequence_parallel"}
        if layout.pp == 1:
            unused |= {"schedule", "virtual_stages", "group", "uneven_ends"}
        run = layout.apply(self._run)
        converts = run.parallel.grad_reduce_in_bf16 or run.optimizer.main_grads_dtype == "bf16"
        if not self._target.cpu and not converts:
            unused |= {"dp_overlap"}  # it takes work space that only these have
        return dataclasses.replace(layout, **{axis: getattr(_PLAIN, axis) for axis in unused})


def _grouping(recompute: RecomputeConfig) -> Hashable:
    """What decides which layers of a stage backward recomputes together."""
    return (recompute.recompute_method, recompute.recompute_num_layers) if recompute.is_full else None


def _counted(events: StageEvents, kind: StageKind, residual: ManyBytes, *, splits: bool) -> list[ManyBytes]:
    """Bytes per microbatch of each count of moments.py; of LAST_OF_STAGE those behind the head.

    residual: of a message. splits: the schedule splits the backward.
    """
    stage = stage_memory(events, functools.partial(levels_of, zero=np.zeros_like(residual)))
    backward = stage.head.then(stage.backward)
    saved = stage.forward.kept + residual * (int(kind.head) - int(kind.embedding))
    deferred, last = stage.forward.kept + backward.kept, stage.head.kept + stage.backward.peak
    weight_grad = stage.weight_grad.peak
    return [saved, deferred, stage.forward.peak, backward.peak, weight_grad, weight_grad if splits else last]


def _rounded_down(moved: ManyBytes) -> ManyBytes:
    """A lower bound of bytes in host memory: those of each kind are rounded down."""
    return np.maximum(0.0, moved - len(ACTIVATIONS))


def _taker(numbers: Numbers) -> Callable[[Any], Any]:
    """Returns a function that takes some columns of a dataclass of columns."""

    def take(part: Any) -> Any:
        if isinstance(part, np.ndarray):
            return part[numbers]
        if isinstance(part, dict):
            return {key: take(value) for key, value in part.items()}
        return dataclasses.replace(part, **{f.name: take(getattr(part, f.name)) for f in dataclasses.fields(part)})

    return take


def _kinds_of_layers(layers: Sequence[LayerSpec], fp8: range) -> tuple[list[int], list[int]]:
    """Returns (the first layer of each kind, the kind of each layer). fp8: layers with FP8 products.

    Layers of a kind need the same memory; their windows may differ.
    """
    seen: dict[Hashable, int] = {}
    by_identity: dict[Hashable, int] = {}
    first, kind_of = [], []
    for number, layer in enumerate(layers):
        alike = (id(layer), number in fp8)
        if alike not in by_identity:
            attention = layer.attention
            if not isinstance(attention, DeltaNetSpec):
                core = dataclasses.replace(attention.core, window=None)
                attention = dataclasses.replace(attention, core=core)
            kind = (
                dataclasses.replace(layer, attention=attention),
                layer.dropout,
                layer.attention.core.dropout,
                number in fp8,
            )
            if kind not in seen:
                seen[kind] = len(seen)
                first.append(number)
            by_identity[alike] = seen[kind]
        kind_of.append(by_identity[alike])
    return first, kind_of
