"""The time of a whole step: microbatches in the schedule's order, gradients, parameters and the update."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from megatron.base.errors import ConfigError
from megatron.config.optimizer_offload import OFF
from megatron.config.recompute import BALANCED
from megatron.config.run import RunConfig
from megatron.config.settings import RunSettings
from megatron.planner.time.activation_copies import activation_copies, copies_of_layers, scheduled_copies
from megatron.planner.time.balanced_layers import BalancedLayers, balanced_layers
from megatron.planner.time.boundaries import boundaries, chain_in_node
from megatron.planner.time.clock import Clock
from megatron.planner.time.constants import Constants, Number
from megatron.planner.time.data_sheet import DataSheetClock
from megatron.planner.time.hardware import Cluster
from megatron.planner.time.model_work import model_work, places_of
from megatron.planner.time.optimizer_update import optimizer_update
from megatron.planner.time.pipeline_stages import LayerKey, PipelineStages, columns, totals
from megatron.planner.time.play import Play, makespans
from megatron.planner.time.replicas import Replicas, held_by, shared_by_ends
from megatron.planner.time.software import Software
from megatron.planner.time.stage_time import (
    BUBBLE,
    DP,
    EP,
    INTERFERENCE,
    OFFLOAD,
    OPTIMIZER,
    PP,
    STAGE_PARTS,
    STEP,
    STRAGGLER,
    Parts,
    Phases,
)
from megatron.planner.time.weight_copies import weight_copies
from megatron.schedule.partition import Stage
from megatron.spec.flops import train_flops
from megatron.spec.sizes import FP32

PARTS = (*STAGE_PARTS, PP, BUBBLE, OPTIMIZER, STEP, STRAGGLER)


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of a step and their parts, which add up to them; arrays of K, if the clock's times are.

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
class PreparedStep:
    """A step before its schedule is played: (schedule + outside) x factor seconds."""

    play: Play
    outside: Number
    factor: Number


class StepModel:
    """The operations of a run, from which `time` computes the step for any clock.

    `config.rules` accept the run, and its vocabulary is known. Raises ConfigError for runs that are not planned.
    """

    def __init__(
        self,
        run: RunConfig,
        settings: RunSettings,
        cluster: Cluster,
        software: Software,
        balanced: BalancedLayers | None = None,
    ) -> None:
        """balanced: the choice of a run with --recompute-policy balanced."""
        _refuse(run, settings)
        if run.recompute.recompute_policy == BALANCED and balanced is None:
            raise ConfigError(
                "the time of layers that are chosen by measuring (--recompute-policy balanced) is planned for single "
                "runs only, with tools/plan.py time; leave the flag out, and add it to the run afterwards"
            )
        cluster.check(settings.mesh.world_size)
        cluster.device.flops(software.precision)
        self._settings, self._cluster = settings, cluster
        choices = None if balanced is None else balanced.choices
        self._recompute = choices or run.recompute
        self.work = model_work(run, settings, software, choices)
        self._pipeline = PipelineStages.separate(settings.pipeline, self.work.kinds)
        self.places = places_of(settings, cluster)
        self.boundaries = boundaries(chain_in_node(settings.mesh, cluster), settings.pipeline.placement.rank_of)
        self.replicas = Replicas(
            settings.data_parallel,
            self.places,
            [held_by(self.work.spec, settings.mesh, stage) for stage in settings.pipeline.stages],
            settings.pipeline.placement.rank_of,
            self.work.sizes.e,
            shared_by_ends(self.work.spec, settings.mesh, settings.pipeline.stages_of(0)),
        )
        self._copies = (
            activation_copies(run, settings, self.work.spec)
            if balanced is None
            else copies_of_layers(settings, balanced.offloaded)
        )
        self._weights = weight_copies(run, settings, self.work.spec, self.replicas, self.work.sizes.e)
        self._update = optimizer_update(
            run.optimizer,
            settings,
            half=self.work.sizes.e < FP32,
            away=self._weights.share(self.replicas.held) if self._weights else 0.0,
            weight_buckets=max(self._weights.buckets) if self._weights else 1,
        )
        self._microbatches = settings.batches.final_num_microbatches
        self.shape = self._pipeline.shape(
            self.replicas.buckets, offload=self._copies is not None and self._copies.ratio > 0
        )
        samples = settings.batches.final_global_batch_size
        assert run.data.seq_length
        self.tokens = samples * run.data.seq_length
        self.model_flops = train_flops(self.work.spec, run.data.seq_length, samples)

    def clock(self, constants: Constants) -> DataSheetClock:
        """Returns the clock of the run's own cluster."""
        return DataSheetClock(constants, self._cluster)

    def layer(self, clock: Clock, number: int, *, full: bool = False) -> Phases:
        """Returns the time of one layer for a microbatch."""
        return clock.layer(self.work.layer(number), self.places, full=full)

    def counts(self, stage: Stage) -> Mapping[LayerKey, int]:
        """Returns the number of layers of each key in a stage."""
        return Counter(self._pipeline.layers(stage, self._recompute))

    def stages(self, clock: Clock) -> list[Phases]:
        """Returns the time of a microbatch in each stage."""
        layer = cache(lambda kind, full: clock.layer(self.work.works[kind], self.places, full=full))
        embedding, head = (clock.end(end, self.places) for end in (self.work.embedding, self.work.head))
        stages, pipeline = [], self._pipeline
        for number, phases in enumerate(pipeline.phases(self._recompute, layer, embedding, head)):
            stage = pipeline.examples[number]
            # Predictions copy nothing.
            keys = pipeline.layers(stage, self._recompute)[: len(stage.layers)]
            in_order = [layer(*key) for key in keys]
            if self._copies is not None and any(self._copies.by_layer[number]):
                phases = self._copies.waits(clock, phases, number, in_order, self._share_by_layer(number))
            if self._weights is not None:
                phases = self._weights.waits(clock, self.places, phases, number, in_order)
            phases = self._with_sends(clock, phases, number)
            stages.append(self.replicas.with_microbatch(clock, phases, number))
        return stages

    def _with_sends(self, clock: Clock, phases: Phases, number: int) -> Phases:
        """Adds what a stage loses to the messages that it sends to those after and before it."""
        forward, input_grad = Parts(phases.forward), Parts(phases.input_grad)
        for parts, boundary in ((forward, number), (input_grad, number - 1)):
            if 0 <= boundary < len(self.boundaries):
                parts.add(INTERFERENCE, clock.sending(self.boundaries[boundary], self.work.sizes.residual))
        return Phases(forward, input_grad, phases.weight_grad)

    def offload_ratio(self, clock: Clock) -> float | None:
        """Returns the ratio that --pipeline-offload-ratio auto will choose, None without this flag. It costs no
        time."""
        if self._copies is None or not self._copies.is_auto:
            return None
        pipeline = self._settings.pipeline
        schedule = pipeline.schedule_of(self._microbatches)
        return self._copies.hidden_ratio(
            clock, schedule, self.stages(clock), [len(stage.layers) for stage in pipeline.stages]
        )

    def time(self, clock: Clock) -> StepTime:
        """Returns the time of a step."""
        stages = self.stages(clock)
        pipeline = self._settings.pipeline
        busy = [Parts() for _ in range(pipeline.placement.num_ranks)]
        for stage, phases in enumerate(stages):
            rank = pipeline.placement.rank_of[stage]
            for parts in (phases.forward, phases.input_grad, phases.weight_grad):
                busy[rank] = busy[rank].plus(parts, self._microbatches)
        slowest = max(busy, key=lambda parts: float(np.mean(parts.total)))
        reductions = self.replicas.reductions(clock)
        hiding = [self._play(clock, stages, copies=False, transfers=False, exchanges=False)] * self.shape.pairs
        whole, without_dp, without_copies, without_pp, *without_ep = makespans(
            [
                self._play(clock, stages, reductions=reductions.overlapped),
                self._play(clock, stages),
                self._play(clock, stages, copies=False),
                self._play(clock, stages, copies=False, transfers=False),
                *hiding,
            ]
        )
        result, computed = Parts(slowest), without_pp
        if without_ep:
            slowest = Parts({part: seconds for part, seconds in slowest.items() if part != EP})
            result, (computed,) = Parts(slowest), without_ep
            result.add(EP, without_pp - computed)
        result.add(OFFLOAD, without_dp - without_copies)
        result.add(PP, without_copies - without_pp)
        result.add(BUBBLE, computed - slowest.total)
        result.add(DP, whole - without_dp)
        result = result.plus(self.replicas.outside_schedule(clock, reductions, self._update, stages))
        result.add(STRAGGLER, result.total * clock.straggling(self._settings.mesh.world_size))
        if np.ndim(slowest.total) == 0:
            result = Parts({part: float(np.squeeze(seconds)) for part, seconds in result.items()})
        return StepTime(
            seconds=result.total,
            parts=result,
            model_flops=self.model_flops,
            tokens=self.tokens,
            ranks=self._settings.mesh.world_size,
        )

    def seconds(self, clock: Clock) -> Number:
        """Returns the seconds of a step alone, in a third of the time."""
        return clocked_seconds([self], [clock])[0]

    def prepare(self, clock: Clock) -> PreparedStep:
        """Returns the step without playing its schedule."""
        reductions, stages = self.replicas.reductions(clock), self.stages(clock)
        play = self._play(clock, stages, reductions=reductions.overlapped)
        outside = self.replicas.outside_schedule(clock, reductions, self._update, stages)
        return PreparedStep(play, outside.total, 1 + clock.straggling(self._settings.mesh.world_size))

    def _share_by_layer(self, stage: int) -> float:
        """Returns the share of a stage's microbatches whose activations move layer by layer."""
        if not self.shape.offload:
            return 1.0
        return 1 - scheduled_copies(self.shape, self._microbatches)[stage] / self._microbatches

    def _play(
        self,
        clock: Clock,
        stages: Sequence[Phases],
        *,
        transfers: bool = True,
        copies: bool = True,
        exchanges: bool = True,
        reductions: Sequence[Number] | None = None,
    ) -> Play:
        """transfers, copies: whether messages between stages, and copies of activations, take time. exchanges: whether
        those of tokens do, where two microbatches hide each other's. reductions: of each stage."""
        size = np.size(stages[0].forward.total)
        nothing: list[Number] = [0.0] * len(stages)
        copied = self._copies.scheduled(clock) if self._copies is not None and copies else nothing
        hops = [clock.hop(place, self.work.sizes.residual) if transfers else 0.0 for place in self.boundaries]
        latencies = [clock.hop_latency(place) if transfers else 0.0 for place in self.boundaries]
        buckets = nothing if reductions is None else [seconds / self.shape.buckets for seconds in reductions]
        seconds, exchanged = totals(stages, size), None
        if self.shape.pairs:
            exchanged = np.stack(
                [columns([phases.forward.get(EP, 0.0) for phases in stages], size)]
                + [columns([phases.input_grad.get(EP, 0.0) for phases in stages], size)]
            )
            seconds[:2] -= exchanged
            exchanged = exchanged * exchanges
        costs = self._pipeline.costs(
            seconds,
            columns([hop - latency for hop, latency in zip(hops, latencies, strict=True)], size),
            columns(latencies, size),
            columns(buckets, size),
            columns(copied, size),
            exchanged,
        )
        return Play(self.shape, self._microbatches, costs)


def model_of_run(
    run: RunConfig, settings: RunSettings, cluster: Cluster, software: Software, clock: Clock
) -> StepModel:
    """Returns the model of any run, also of one that leaves recompute to a measurement: by the times of a clock."""
    balanced = None
    if run.recompute.recompute_policy == BALANCED:
        _refuse(run, settings)
        balanced = balanced_layers(run, settings, software, clock, places_of(settings, cluster))
    return StepModel(run, settings, cluster, software, balanced)


def clocked_seconds(models: Sequence[StepModel], clocks: Sequence[Clock]) -> NDArray[np.float64]:
    """Returns [models, K] seconds of a step of each model, for clocks with K times."""
    prepared = [model.prepare(clock) for model, clock in zip(models, clocks, strict=True)]
    played = makespans([step.play for step in prepared])
    return np.array([(time + step.outside) * step.factor for time, step in zip(played, prepared, strict=True)])


def step_seconds(models: Sequence[StepModel], constants: Constants) -> NDArray[np.float64]:
    """Returns [models, K] seconds of a step of each model on its own cluster, for K constants."""
    return clocked_seconds(models, [model.clock(constants) for model in models])


def _refuse(run: RunConfig, settings: RunSettings) -> None:
    """Raises ConfigError for runs whose time is not planned."""
    if run.model.vocab_size is None:
        raise ConfigError("the size of the vocabulary decides about the time of the head; give --vocab-size")
    offload = settings.optimizer_offload
    unplanned = {
        "of adapters (--lora-rank)": bool(run.model.lora_rank),
        "of an update on the CPU that depends on free memory (--optimizer-offload-policy auto)": offload.is_auto,
        "of documents on groups of different sizes (--dynamic-context-parallel)": settings.dynamic_context is not None,
        "of optimizer state in files (--offload-dir)": offload.mode != OFF and offload.directory is not None,
    }
    for what, is_set in unplanned.items():
        if is_set:
            raise ConfigError(f"the time {what} is not planned; leave the flag out, and add it to the run afterwards")
