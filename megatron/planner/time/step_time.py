"""The time of a whole step: microbatches in the schedule's order, gradients, parameters and the update."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron.base.errors import ConfigError
from megatron.config.data_parallel import EVERY
from megatron.config.optimizer_offload import OFF
from megatron.config.recompute import BALANCED
from megatron.config.run import RunConfig
from megatron.config.settings import RunSettings
from megatron.planner.memory.sizes import sizes_of
from megatron.planner.schedule.graph import ManyCosts, ScheduleGraph
from megatron.planner.time.constants import Constants, Number
from megatron.planner.time.hardware import Cluster, Place, place, stride
from megatron.planner.time.messages import ALL_GATHER, REDUCE_SCATTER, collective_seconds, hop_seconds
from megatron.planner.time.operations import LayerWork, Overlap, embedding_work, head_work, layer_work
from megatron.planner.time.software import Software
from megatron.planner.time.stage_time import DP, INTERFERENCE, MEMORY, NOTHING, STAGE_PARTS, Clock, Parts, Phases
from megatron.schedule.partition import Stage
from megatron.schedule.passes import with_transfers
from megatron.schedule.spec import ScheduleSpec
from megatron.spec.buckets import default_bucket_size
from megatron.spec.collectives import ALL_REDUCE
from megatron.spec.decoder import decoder_spec
from megatron.spec.flops import train_flops
from megatron.spec.parameter import local_numel
from megatron.spec.sizes import FP32, Target

PP, BUBBLE, OPTIMIZER, STEP, STRAGGLER = "pp", "bubble", "optimizer", "step", "straggler"
PARTS = (*STAGE_PARTS, PP, BUBBLE, OPTIMIZER, STEP, STRAGGLER)
# Per parameter of a rank's slice: fp32 master, gradient and two moments, read and written; bf16 weight.
UPDATE_BYTES = 36
# Bytes per parameter that are read and written around a collective that has buffers of its own.
_COPIED_GATHER, _COPIED_REDUCE = 4, 6
MOST_BUCKETS = 8  # reductions per stage that are followed one by one
_HALF = 2
_LEAST_PLAYED = 16  # microbatches; a schedule is played with at least 2 p or p + 16 of them, and extended from there


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of a step and their parts, which add up to them; arrays of K, if the constants are.

    model_flops: of all replicas, by spec/flops.py. tokens: of all replicas. ranks: of the world.
    """

    seconds: Number
    parts: Mapping[str, Number]
    model_flops: float
    tokens: int
    ranks: int

    @property
    def tokens_per_second(self) -> Number:
        """Per rank."""
        return self.tokens / (self.seconds * self.ranks)

    @property
    def flops_per_second(self) -> Number:
        """Model FLOP/s per rank."""
        return self.model_flops / (self.seconds * self.ranks)


@dataclass(frozen=True)
class _Held:
    """Parameters of a stage or a rank, by the view of the mesh whose ranks share them."""

    dense: int
    expert: int

    def plus(self, other: _Held) -> _Held:
        return _Held(self.dense + other.dense, self.expert + other.expert)


class StepModel:
    """The operations of a run, from which `time` computes the step for any constants.

    `config.rules` accept the run, and its vocabulary is known. Raises ConfigError for runs that are not planned.
    """

    def __init__(self, run: RunConfig, settings: RunSettings, cluster: Cluster, software: Software) -> None:
        _refuse(run, settings)
        cluster.check(settings.mesh.world_size)
        cluster.device.flops(software.precision)
        model = run.model
        assert run.data.seq_length and run.train.micro_batch_size
        model = dataclasses.replace(model, max_position_embeddings=model.max_position_embeddings or run.data.seq_length)
        self._settings, self._cluster, self._software = settings, cluster, software
        self._spec = decoder_spec(model)
        self._sizes = sizes_of(
            model,
            settings,
            seq_length=run.data.seq_length,
            micro_batch_size=run.train.micro_batch_size,
            documents=False,
            target=Target(cpu=False),
            moe=run.moe,
        )
        self._microbatches = settings.batches.final_num_microbatches
        self._full = run.recompute
        mesh = settings.mesh
        self.places = {
            "tp": place(mesh, cluster, ("tp",)),
            "cp": place(mesh, cluster, ("cp",)),
            "cp_inner": Place(
                settings.context_inner, min(settings.context_inner, place(mesh, cluster, ("cp",)).together)
            ),
            "cp_outer": place(mesh, cluster, ("cp",)),
            "etp_ep": place(mesh, cluster, ("etp", "ep")),
            "dense": place(mesh, cluster, ("cp", "dp")),
            "expert": place(mesh, cluster, ("edp",)),
        }
        pieces = run.parallel.tp_comm_overlap
        split = settings.pipeline.schedule.splits_backward
        overlap = Overlap(
            gathers=pieces and run.parallel.tp_comm_overlap_ag,
            sums=pieces and run.parallel.tp_comm_overlap_rs,
            bulk_gather=software.bulk_overlap and run.parallel.tp_comm_bulk_dgrad,
            bulk_sum=software.bulk_overlap and run.parallel.tp_comm_bulk_wgrad and not split,
        )
        # Most layers are alike, and alike layers are one object.
        kinds: dict[int, int] = {}
        self._works: list[LayerWork] = []
        self._kind: list[int] = []  # of each layer: its place in the list above
        for number, layer in enumerate(self._spec.layers):
            if id(layer) not in kinds:
                kinds[id(layer)] = len(self._works)
                again = run.recompute.parts_of(number)
                self._works.append(layer_work(layer, self._sizes, software, overlap, again))
            self._kind.append(kinds[id(layer)])
        self._head = head_work(self._spec, self._sizes, software)
        self._embedding = embedding_work(self._sizes)
        self._held = [self._parameters(stage) for stage in settings.pipeline.stages]
        largest = max(held.dense + held.expert for held in self._held)
        rank = sum(held.dense + held.expert for held in self._held) // mesh.pp
        bucket = settings.data_parallel.bucket_size or default_bucket_size(rank, self.places["dense"].size)
        # The reductions of a stage that are followed one by one.
        self._buckets = max(1, min(MOST_BUCKETS, math.ceil(largest / bucket)))
        samples = settings.batches.final_global_batch_size
        self.tokens = samples * run.data.seq_length
        self.model_flops = train_flops(self._spec, run.data.seq_length, samples)

    def layer(self, constants: Constants, number: int, *, full: bool = False) -> Phases:
        """Returns the time of one layer for a microbatch."""
        clock = Clock(constants, self._cluster, self._software, self.places)
        return clock.layer(self._works[self._kind[number]], full=full)

    def stages(self, constants: Constants) -> list[Phases]:
        """Returns the time of a microbatch in each stage."""
        clock = Clock(constants, self._cluster, self._software, self.places)
        layers: dict[tuple[int, bool], Phases] = {}
        found = []
        for stage, held in zip(self._settings.pipeline.stages, self._held, strict=True):
            counts: dict[tuple[int, bool], int] = {}
            for group, full in self._full.groups(stage.layers):
                for number in group:
                    key = self._kind[number], full
                    counts[key] = counts.get(key, 0) + 1
            phases = NOTHING
            for key, count in counts.items():
                if key not in layers:
                    layers[key] = clock.layer(self._works[key[0]], full=key[1])
                phases = phases.plus(layers[key], count)
            if stage.embedding:
                phases = phases.plus(clock.end(self._embedding))
            if stage.head:
                phases = phases.plus(clock.end(self._head))
            found.append(self._with_sharded(constants, phases, held))
        return found

    def time(self, constants: Constants) -> StepTime:
        """Returns the time of a step."""
        stages = self.stages(constants)
        pipeline = self._settings.pipeline
        busy = [Parts() for _ in range(pipeline.placement.num_ranks)]
        for stage, phases in enumerate(stages):
            rank = pipeline.placement.rank_of[stage]
            for parts in (phases.forward, phases.input_grad, phases.weight_grad):
                busy[rank] = busy[rank].plus(parts, self._microbatches)
        slowest = max(busy, key=lambda parts: float(np.mean(parts.total)))
        reductions, exposed, hidden = self._reductions(constants)
        whole, without_dp, without_pp = makespans(
            [
                self._play(constants, stages, transfers=True, reductions=reductions),
                self._play(constants, stages, transfers=True, reductions=None),  # the buckets cost nothing
                self._play(constants, stages, transfers=False, reductions=None),
            ]
        )
        result = Parts(slowest)
        result.add(PP, without_dp - without_pp)
        result.add(BUBBLE, without_pp - slowest.total)
        result.add(DP, whole - without_dp + exposed)
        result.add(INTERFERENCE, constants.interference * hidden)
        result.add(OPTIMIZER, self._update(constants))
        result.add(STEP, constants.step)
        result.add(STRAGGLER, result.total * self._straggling(constants))
        if np.ndim(constants.gemm) == 0:
            result = Parts({part: float(np.squeeze(seconds)) for part, seconds in result.items()})
        return StepTime(
            seconds=result.total,
            parts=result,
            model_flops=self.model_flops,
            tokens=self.tokens,
            ranks=self._settings.mesh.world_size,
        )

    def seconds(self, constants: Constants) -> Number:
        """Returns the seconds of a step alone, in a third of the time."""
        play, rest, factor = self.prepare(constants)
        return (makespans([play])[0] + rest) * factor

    def prepare(self, constants: Constants) -> tuple[Play, Number, Number]:
        """Returns the schedule with its costs, the seconds of the step outside of it, and the factor on both."""
        reductions, exposed, hidden = self._reductions(constants)
        play = self._play(constants, self.stages(constants), transfers=True, reductions=reductions)
        rest = exposed + constants.interference * hidden + self._update(constants) + constants.step
        return play, rest, 1 + self._straggling(constants)

    def _straggling(self, constants: Constants) -> Number:
        nodes = self._settings.mesh.world_size / self._cluster.node
        return constants.straggler * math.log2(max(1.0, nodes))

    def _parameters(self, stage: Stage) -> _Held:
        """Parameters of a stage on one rank."""
        mesh, sizes = self._settings.mesh, self._settings.mesh.sizes
        dense = expert = 0
        for placed in self._spec.rank_parameters([stage]).values():
            numel = local_numel(placed.spec, sizes)
            if mesh.view(placed.spec.axis) == "dense":
                dense += numel
            else:
                expert += numel
        return _Held(dense, expert)

    def _with_sharded(self, constants: Constants, phases: Phases, held: _Held) -> Phases:
        """Adds the communication of every microbatch: gathers of sharded parameters and sums of sharded gradients."""
        settings = self._settings.data_parallel
        gather: Number = 0.0
        reduce: Number = 0.0
        if settings.shards == "optim_grads_params":
            gather = self._collective(constants, ALL_GATHER, held, _HALF)
        if settings.mode == EVERY and settings.shards != "no_shard":
            reduce = self._collective(constants, REDUCE_SCATTER, held, self._gradient_bytes)
        if np.all(gather == 0.0) and np.all(reduce == 0.0):
            return phases
        forward, input_grad = Parts(phases.forward), Parts(phases.input_grad)
        backward = phases.input_grad.total + phases.weight_grad.total
        if self._software.copies_sharded:
            moved = (held.dense + held.expert) / (constants.bandwidth * self._cluster.device.bandwidth)
            if settings.shards == "optim_grads_params":
                forward.add(MEMORY, _COPIED_GATHER * moved)
                input_grad.add(MEMORY, _COPIED_GATHER * moved)
            input_grad.add(MEMORY, _COPIED_REDUCE * moved)
        for parts, sent, cover in ((forward, gather, forward.total), (input_grad, gather + reduce, backward)):
            exposed = np.maximum(0.0, sent - cover)
            parts.add(DP, exposed)
            parts.add(INTERFERENCE, constants.interference * (sent - exposed))
        return Phases(forward, input_grad, phases.weight_grad)

    @property
    def _gradient_bytes(self) -> int:
        given = self._software.gradient_bytes
        if given is not None:
            return given
        return _HALF if self._settings.data_parallel.reduce_in_bf16 else FP32

    def _collective(self, constants: Constants, op: str, held: _Held, width: int) -> Number:
        seconds: Number = 0.0
        for view, numel in (("dense", held.dense), ("expert", held.expert)):
            if numel:
                seconds = seconds + collective_seconds(constants, self._cluster, self.places[view], op, width * numel)
        return seconds

    def _reductions(self, constants: Constants) -> tuple[list[Number] | None, Number, Number]:
        """Returns the reduction of each stage's gradients if it is overlapped with its last backward; the communication of
        gradients and parameters that is not overlapped; and that which is overlapped."""
        settings, mesh = self._settings.data_parallel, self._settings.mesh
        if max(self.places[view].size for view in ("dense", "expert")) == 1:
            return None, 0.0, 0.0
        op = ALL_REDUCE if settings.shards == "no_shard" else REDUCE_SCATTER
        rank_of = self._settings.pipeline.placement.rank_of
        per_stage = [self._collective(constants, op, held, self._gradient_bytes) for held in self._held]
        gathers = [self._collective(constants, ALL_GATHER, held, _HALF) for held in self._held]

        def most(seconds: Sequence[Number]) -> Number:
            by_rank: list[Number] = [0.0] * mesh.pp
            for stage, value in enumerate(seconds):
                by_rank[rank_of[stage]] = by_rank[rank_of[stage]] + value
            return functools.reduce(np.maximum, by_rank)

        exposed: Number = 0.0
        hidden: Number = 0.0
        if settings.shards == "optim":
            if settings.overlap_gather:
                hidden = hidden + most(gathers)
            else:
                exposed = exposed + most(gathers)
        if settings.mode == EVERY and settings.shards != "no_shard":
            return None, exposed, hidden  # every microbatch has its own
        if not settings.overlap_reduce:
            return None, exposed + most(per_stage), hidden
        return per_stage, exposed, hidden

    def _update(self, constants: Constants) -> Number:
        """The slice of the optimizer on the rank with the most parameters."""
        held = [_Held(0, 0)] * self._settings.mesh.pp
        for stage, more in enumerate(self._held):
            rank = self._settings.pipeline.placement.rank_of[stage]
            held[rank] = held[rank].plus(more)
        sharded = self._settings.data_parallel.shards != "no_shard"
        dense = self.places["dense"].size if sharded else 1
        expert = self.places["expert"].size if sharded else 1
        most = max(each.dense / dense + each.expert / expert for each in held)
        seconds: Number = UPDATE_BYTES * most / (constants.bandwidth * self._cluster.device.bandwidth)
        return seconds

    def _play(
        self,
        constants: Constants,
        stages: Sequence[Phases],
        *,
        transfers: bool,
        reductions: Sequence[Number] | None,
    ) -> Play:
        pipeline, size = self._settings.pipeline, np.size(stages[0].forward.total)

        def rows(values: Sequence[Number]) -> NDArray[np.float64]:
            return np.array([np.broadcast_to(value, (size,)) for value in values]).reshape(len(values), size)

        nothing = [0.0] * len(stages)
        boundary = [self._transfer(constants) if transfers else (0.0, 0.0)] * (len(stages) - 1)
        costs = ManyCosts(
            forward=rows([phases.forward.total for phases in stages]),
            input_grad=rows([phases.input_grad.total for phases in stages]),
            weight_grad=rows([phases.weight_grad.total for phases in stages]),
            backward=rows([phases.input_grad.total + phases.weight_grad.total for phases in stages]),
            transfer=rows([transfer for transfer, _ in boundary]),
            latency=rows([latency for _, latency in boundary]),
            offload=rows(nothing),
            reload=rows(nothing),
            bucket=rows([seconds / self._buckets for seconds in reductions] if reductions is not None else nothing),
        )
        blocking = self._software.blocking_pipeline or not pipeline.overlap
        p = pipeline.placement.num_ranks
        shape = PlayShape(
            pipeline.schedule,
            p,
            len(stages) // p,
            pipeline.group,
            overlap=pipeline.overlap and not blocking,
            blocking=blocking,
            buckets=self._buckets,
        )
        return Play(shape, self._microbatches, costs)

    def _transfer(self, constants: Constants) -> tuple[Number, Number]:
        """(time on the link, time until the data is there) of the hidden states between pipeline ranks."""
        mesh = self._settings.mesh
        if mesh.pp == 1:
            return 0.0, 0.0
        inside = stride(mesh, "pp") * mesh.pp <= self._cluster.node
        hop = Place(mesh.pp, mesh.pp if inside else 1)
        latency: Number = constants.link_latency if inside else constants.network_latency
        return hop_seconds(constants, self._cluster, hop, self._sizes.residual) - latency, latency


def step_seconds(models: Sequence[StepModel], constants: Constants) -> NDArray[np.float64]:
    """Returns [models, K] seconds of a step of each model, for K constants."""
    prepared = [model.prepare(constants) for model in models]
    played = makespans([play for play, _, _ in prepared])
    return np.array([(time + rest) * factor for time, (_, rest, factor) in zip(played, prepared, strict=True)])


@dataclass(frozen=True)
class PlayShape:
    """A schedule without its number of microbatches. v: virtual stages per rank. buckets: per stage."""

    schedule: ScheduleSpec
    p: int
    v: int
    group: int | None
    overlap: bool
    blocking: bool
    buckets: int

    def lengths(self, m: int) -> tuple[int, int]:
        """Returns the numbers of microbatches with which the schedule of m is played, equal if m is one of them.

        With many microbatches a schedule repeats itself: it is played with two small numbers of them that are one period
        apart, and the time of a period is added for all others.
        """
        step = (self.group or self.p) if self.schedule.takes_groups else 1
        few = max(_LEAST_PLAYED, min(2 * self.p, self.p + _LEAST_PLAYED))
        few += (m - few) % step
        return (m, m) if m <= few + step else (few, few + step)


@dataclass(frozen=True)
class Play:
    """A schedule of m microbatches, with K costs."""

    shape: PlayShape
    m: int
    costs: ManyCosts


def makespans(plays: Sequence[Play]) -> list[NDArray[np.float64]]:
    """Returns the [K] seconds of each. Those of the same shape are computed together."""
    together: dict[tuple[PlayShape, int], list[int]] = {}
    for number, play in enumerate(plays):
        for length in set(play.shape.lengths(play.m)):
            together.setdefault((play.shape, length), []).append(number)
    times: dict[tuple[int, int], NDArray[np.float64]] = {}
    for (shape, length), numbers in together.items():
        found = _graph(shape, length).makespans(ManyCosts.joined([plays[number].costs for number in numbers]))
        ends = np.cumsum([plays[number].costs.forward.shape[1] for number in numbers])[:-1]
        for number, part in zip(numbers, np.split(found, ends), strict=True):
            times[number, length] = part
    results = []
    for number, play in enumerate(plays):
        few, more = play.shape.lengths(play.m)
        short, longer = times[number, few], times[number, more]
        results.append(short if few == more else short + (play.m - few) / (more - few) * (longer - short))
    return results


@functools.lru_cache(maxsize=1024)
def _graph(shape: PlayShape, m: int) -> ScheduleGraph:
    schedule = shape.schedule
    asked = shape.v if schedule.virtual_stages is None else None
    played = with_transfers(schedule.build(shape.p, m, v=asked, group=shape.group), overlap=shape.overlap)
    return ScheduleGraph(played, num_buckets=shape.buckets, blocking=shape.blocking)


def _refuse(run: RunConfig, settings: RunSettings) -> None:
    """Raises ConfigError for runs whose time is not planned."""
    if run.model.vocab_size is None:
        raise ConfigError("the size of the vocabulary decides about the time of the head; give --vocab-size")
    unplanned = {
        "of adapters (--lora-rank)": bool(run.model.lora_rank),
        "of copies to host memory (activation offload)": run.activation_offload.kind is not None,
        "of copies to host memory (--cpu-offloading-weights)": run.activation_offload.cpu_offloading_weights,
        "of an update on the CPU, or of states in host memory (optimizer offload)": settings.optimizer_offload.mode
        != OFF,
        "of layers that are chosen by measuring (--recompute-policy balanced)": run.recompute.recompute_policy
        == BALANCED,
    }
    for what, asked in unplanned.items():
        if asked:
            raise ConfigError(f"the time {what} is not planned; leave the flag out, and add it to the run afterwards")
