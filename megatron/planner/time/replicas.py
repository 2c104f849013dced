"""The time of what replicas do together: sums of gradients, gathers of parameters, and the update of each rank's
slice."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from megatron.base.mesh import COPY_AXES, DENSE, EXPERT, Mesh
from megatron.config.data_parallel import EVERY, DataParallelSettings
from megatron.planner.time.clock import Clock, Places
from megatron.planner.time.constants import Number
from megatron.planner.time.optimizer_update import OptimizerUpdate, RankPasses
from megatron.planner.time.stage_time import DP, INTERFERENCE, OFFLOAD, OPTIMIZER, STEP, Parts, Phases
from megatron.schedule.partition import Stage
from megatron.spec.buckets import default_bucket_size
from megatron.spec.collectives import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from megatron.spec.decoder import DecoderSpec
from megatron.spec.parameter import ParamSpec, local_numel
from megatron.spec.sizes import FP32

MOST_BUCKETS = 8  # reductions per stage that are followed one by one
_HALF = 2


@dataclass(frozen=True)
class Held:
    """Parameters of a stage or a rank, by the view of the mesh whose ranks share them."""

    dense: int
    expert: int

    @property
    def by_view(self) -> dict[str, int]:
        """Parameters by view, without views that have none."""
        return {view: numel for view, numel in ((DENSE, self.dense), (EXPERT, self.expert)) if numel}

    @property
    def all(self) -> int:
        """Both."""
        return self.dense + self.expert

    def sliced(self, places: Places) -> float:
        """Returns the parameters of the slices that a rank owns."""
        return sum(numel / places[f"{view}_shard"].size for view, numel in self.by_view.items())

    def plus(self, other: Held) -> Held:
        """Returns the sum."""
        return Held(self.dense + other.dense, self.expert + other.expert)


def held_by(spec: DecoderSpec, mesh: Mesh, stage: Stage) -> Held:
    """Returns the parameters of a stage on one rank."""
    ends = spec.rank_parameters([dataclasses.replace(stage, layers=range(0))])
    held = _held([placed.spec for placed in ends.values()], mesh)
    layers = [spec.layers[number] for number in stage.layers]
    for kind, count in Counter(map(id, layers)).items():  # alike layers are one object
        alike = next(layer for layer in layers if id(layer) == kind)
        layer = _held([parameter for _, parameter in alike.parameters()], mesh)
        held = held.plus(Held(count * layer.dense, count * layer.expert))
    return held


def _held(parameters: Iterable[ParamSpec], mesh: Mesh) -> Held:
    dense = expert = 0
    for parameter in parameters:
        numel = local_numel(parameter, mesh.sizes)
        if mesh.view(parameter.axis) == DENSE:
            dense += numel
        else:
            expert += numel
    return Held(dense, expert)


def shared_by_ends(spec: DecoderSpec, mesh: Mesh, stages: Sequence[Stage]) -> int:
    """Returns the parameters of a rank that another rank of the pipeline has, too. stages: of the rank."""
    placed = spec.rank_parameters(stages).values()
    return sum(local_numel(parameter.spec, mesh.sizes) for parameter in placed if parameter.on_both_ends)


@dataclass(frozen=True)
class Reductions:
    """Communication of a step. overlapped: of each stage, behind its last backward, or None. exposed: all other that no
    computation hides. slowing: what computation loses to what it hides.
    """

    overlapped: Sequence[Number] | None
    exposed: Number = 0.0
    slowing: Number = 0.0


@dataclass(frozen=True)
class Replicas:
    """The replicas of a run. held: parameters of each stage; rank_of: its rank of the pipeline.

    parameter_bytes: of a parameter that is gathered. shared_by_ends: parameters of which the first and the last rank of
    the pipeline each have a copy.
    """

    settings: DataParallelSettings
    places: Places
    held: Sequence[Held]
    rank_of: Sequence[int]
    parameter_bytes: int = _HALF
    shared_by_ends: int = 0

    @property
    def buckets(self) -> int:
        """The reductions of a stage that are followed one by one."""
        largest = max(held.all for held in self.held)
        return max(1, min(MOST_BUCKETS, math.ceil(largest / self.bucket_size)))

    @property
    def bucket_size(self) -> int:
        """Parameters of a bucket, at least."""
        rank = sum(held.all for held in self.held) // (max(self.rank_of) + 1)
        shards = max(self.places[f"{view}_shard"].size for view in COPY_AXES)
        return self.settings.bucket_size or default_bucket_size(rank, shards)

    def with_microbatch(self, clock: Clock, phases: Phases, stage: int) -> Phases:
        """Adds the communication of every microbatch: gathers of sharded parameters and sums of sharded gradients."""
        held, shards = self.held[stage], self.settings.shards
        gather: Number = 0.0
        reduce: Number = 0.0
        if shards == "optim_grads_params":
            gather = self._gather(clock, held)
        if self._every_microbatch:
            reduce = self.reduce(clock, held)
        if np.all(gather == 0.0) and np.all(reduce == 0.0):
            return phases
        forward, input_grad = Parts(phases.forward), Parts(phases.input_grad)
        backward = phases.input_grad.total + phases.weight_grad.total
        shard = self.places[f"{DENSE}_shard"]
        for parts, sent, cover, op in (
            (forward, gather, forward.total, ALL_GATHER),
            (input_grad, gather + reduce, backward, REDUCE_SCATTER),
        ):
            exposed = np.maximum(0.0, sent - cover)
            parts.add(DP, exposed)
            parts.add(INTERFERENCE, clock.bucket_slowing(sent - exposed, shard, op))
        return Phases(forward, input_grad, phases.weight_grad)

    def reductions(self, clock: Clock) -> Reductions:
        """Returns the communication of a step, without that of every microbatch."""
        settings = self.settings
        exposed: Number = 0.0
        slowing: Number = 0.0
        if self.shared_by_ends:  # slices of the sums over replicas
            nbytes = FP32 * self.shared_by_ends / self.places[f"{DENSE}_shard"].size
            exposed = exposed + clock.collective(self.places["ends"], ALL_REDUCE, nbytes)
        if all(self.places[f"{view}_{kind}"].size == 1 for view in COPY_AXES for kind in ("shard", "replicas")):
            return Reductions(None, exposed, slowing)
        if self._gathers_once:
            gathers = self._slowest_rank([self._gather(clock, held) for held in self.held])
            if settings.overlap_gather:
                slowing = slowing + clock.bucket_slowing(gathers, self.places[f"{DENSE}_shard"], ALL_GATHER)
            else:
                exposed = exposed + gathers
        if self._every_microbatch:
            return Reductions(None, exposed, slowing)
        stages = [self.reduce(clock, held) for held in self.held]
        if not settings.overlap_reduce:
            return Reductions(None, exposed + self._slowest_rank(stages), slowing)
        return Reductions(stages, exposed, slowing)

    def sum_slowing(self, clock: Clock, reductions: Reductions, stages: Sequence[Phases]) -> Number:
        """Returns what the last backward of the stages loses to the sums of gradients that it hides."""
        if reductions.overlapped is None:
            return 0.0
        shard = self.places[f"{DENSE}_shard"]
        place, op = (shard, REDUCE_SCATTER) if shard.size > 1 else (self.places[f"{DENSE}_replicas"], ALL_REDUCE)
        hidden = [
            np.minimum(seconds, phases.input_grad.total + phases.weight_grad.total)
            for seconds, phases in zip(reductions.overlapped, stages, strict=True)
        ]
        return self._slowest_rank([clock.sum_slowing(seconds, place, op) for seconds in hidden])

    def outside_schedule(
        self, clock: Clock, reductions: Reductions, optimizer: OptimizerUpdate, stages: Sequence[Phases]
    ) -> Parts:
        """Returns the seconds of a step outside of its schedule. stages: a microbatch in each."""
        return Parts(
            {
                DP: reductions.exposed + self.late_gathers(clock, stages),
                INTERFERENCE: reductions.slowing + self.sum_slowing(clock, reductions, stages),
                OPTIMIZER: self.update(clock, optimizer, stages),
                STEP: clock.step(),
            }
        )

    def late_gathers(self, clock: Clock, stages: Sequence[Phases]) -> Number:
        """Returns the seconds for which the step's first forward waits for parameters whose gather it overlaps.

        The gathers of a rank begin with the step, one bucket after the other, and each part of its first forwards needs
        one more: the first bucket hides nothing. stages: a microbatch in each. Waits for copies of activations do not
        count as cover, so that the bounds of a search, which leave them out, stay below.
        """
        latest: Number = 0.0
        if not (self._gathers_once and self.settings.overlap_gather):
            return latest
        ranks = range(max(self.rank_of) + 1)
        gathers: list[Number] = [0.0 for _ in ranks]
        forward: list[Number] = [0.0 for _ in ranks]
        parameters = [0 for _ in ranks]
        for rank, held, phases in zip(self.rank_of, self.held, stages, strict=True):
            gathers[rank] = gathers[rank] + self._gather(clock, held)
            forward[rank] = forward[rank] + phases.forward.total - phases.forward.of((OFFLOAD,))
            parameters[rank] += held.all
        for rank in ranks:
            first = 1 / max(1, math.ceil(parameters[rank] / self.bucket_size))  # part of the first bucket
            late = np.maximum(first * gathers[rank], gathers[rank] - (1 - first) * forward[rank])
            latest = np.maximum(latest, late)
        return latest

    @property
    def _gathers_once(self) -> bool:
        """Whether parameters are gathered once per step."""
        return self.settings.shards in ("optim", "optim_grads")

    def update(self, clock: Clock, optimizer: OptimizerUpdate, stages: Sequence[Phases]) -> Number:
        """Returns the update of each rank's slice, of which the slowest counts. stages: a microbatch in each."""
        ranks = range(max(self.rank_of) + 1)
        elements = [0.0 for _ in ranks]
        forward: list[Number] = [0.0 for _ in ranks]
        backward: list[Number] = [0.0 for _ in ranks]
        for rank, held, phases in zip(self.rank_of, self.held, stages, strict=True):
            elements[rank] += held.sliced(self.places)
            forward[rank] = forward[rank] + phases.forward.total
            backward[rank] = backward[rank] + phases.input_grad.total + phases.weight_grad.total
        times = [optimizer.seconds(clock, elements[rank], RankPasses(forward[rank], backward[rank])) for rank in ranks]
        return functools.reduce(np.maximum, times)

    @property
    def _every_microbatch(self) -> bool:
        return self.settings.mode == EVERY and self.settings.shards != "no_shard"

    @property
    def gradient_bytes(self) -> int:
        """Bytes of a gradient in a message."""
        return _HALF if self.settings.reduce_in_bf16 else FP32

    def _gather(self, clock: Clock, held: Held) -> Number:
        """Every rank's slice of the parameters goes to the ranks that share them."""
        seconds: Number = 0.0
        for view, numel in held.by_view.items():
            seconds = seconds + clock.bucket(self.places[f"{view}_shard"], ALL_GATHER, self.parameter_bytes * numel)
        return seconds

    def reduce(self, clock: Clock, held: Held) -> Number:
        """Returns the time of the sums of these parameters' gradients.

        A reduce-scatter between the ranks that share the optimizer, then an all-reduce of the slice over the others.
        """
        seconds: Number = 0.0
        for view, numel in held.by_view.items():
            shard, replicas, nbytes = (
                self.places[f"{view}_shard"],
                self.places[f"{view}_replicas"],
                self.gradient_bytes * numel,
            )
            seconds = seconds + clock.bucket(shard, REDUCE_SCATTER, nbytes)
            seconds = seconds + clock.bucket(replicas, ALL_REDUCE, nbytes / shard.size)
        return seconds

    def _slowest_rank(self, seconds: Sequence[Number]) -> Number:
        by_rank: list[Number] = [0.0] * (max(self.rank_of) + 1)
        for rank, value in zip(self.rank_of, seconds, strict=True):
            by_rank[rank] = by_rank[rank] + value
        return functools.reduce(np.maximum, by_rank)
