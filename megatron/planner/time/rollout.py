"""The time of a step of train_rl.py: answers, log-probabilities and training steps, from the lengths of the answers.

A decoding step reads the weights and the cache once, so it is limited by the memory of the device, or by the host that
queues its kernels. Only one pipeline stage works at a time, because a token follows from the one before.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron.config.run import RunConfig
from megatron.config.settings import RunSettings, resolve
from megatron.planner.memory.model_states import RankState, rank_state
from megatron.planner.memory.sampling import forward_sizes, samples, sampling_shape
from megatron.planner.time.clock import Clock
from megatron.planner.time.continuous_batch import Batching, batching
from megatron.planner.time.hardware import Cluster
from megatron.planner.time.operations import (
    FusedAttention,
    Gemm,
    LayerMessage,
    LayerOperation,
    Overlap,
    Traffic,
    embedding_work,
    layer_work,
)
from megatron.planner.time.software import Software
from megatron.planner.time.step_time import StepModel
from megatron.schedule.partition import Stage
from megatron.spec.collectives import ALL_GATHER
from megatron.spec.sizes import Sizes, Target

READING, DECODING, LOG_PROBABILITIES, REFERENCE, TRAINING = (
    "reading prompts",
    "decoding",
    "log-probabilities",
    "log-probabilities of the reference",
    "training steps",
)
_PLAIN = Overlap(gathers=False, sums=False, bulk_gather=False, bulk_sum=False)
# Bytes of device memory that are moved per logit until a token is drawn: fp64 scores, probabilities, their sums.
_DRAWN = 80


@dataclass(frozen=True)
class RolloutTime:
    """Seconds of each phase of a step, of the slowest replica. batching: its forwards, None where pairs are read."""

    phases: dict[str, float]
    batching: Batching | None

    @property
    def seconds(self) -> float:
        """Seconds of all phases."""
        return sum(self.phases.values())


class RolloutModel:
    """The phases of a run on a cluster. Raises ConfigError for runs that are not planned.

    lengths: tokens of all answers of a rollout, in their order; none for pairs of answers.
    """

    def __init__(
        self, run: RunConfig, settings: RunSettings, cluster: Cluster, software: Software, lengths: Sequence[int]
    ) -> None:
        self._run, self._settings, self._software, self._lengths = run, settings, software, lengths
        self._shape = sampling_shape(run, settings) if samples(run) else None
        packed = with_packed_rows(run, settings, lengths) if samples(run) else settings
        self._model = StepModel(run, packed, cluster, software)
        self._microbatches = packed.batches.final_num_microbatches
        self._spec, self._stages = self._model.work.spec, settings.pipeline.stages

    def time(self, clock: Clock) -> RolloutTime:
        """Returns the time of a step with all of its phases."""
        rl = self._run.rl
        forward = self.log_probabilities(clock)
        step = float(np.squeeze(self._model.seconds(clock)))
        reference = forward + self._exchange(clock)
        if self._shape is None:
            return RolloutTime({LOG_PROBABILITIES: forward, REFERENCE: reference, TRAINING: step}, None)
        steps = rl.answers_per_rollout // self._settings.batches.final_global_batch_size
        updates = steps * rl.grpo_iterations
        # The first step after a rollout uses the log-probabilities that the rollout has; each further one computes some.
        phases, batch = self.sampling(clock)
        phases[LOG_PROBABILITIES] = forward * (steps + updates - 1)
        if rl.grpo_kl_beta:
            phases[REFERENCE] = forward * steps + self._exchange(clock) * steps
        phases[TRAINING] = step * updates
        return RolloutTime(phases, batch)

    def sampling(self, clock: Clock) -> tuple[dict[str, float], Batching]:
        """Returns the seconds of reading prompts and of decoding of the slowest replica, and its forwards."""
        assert self._shape is not None
        shape, mesh = self._shape, self._settings.mesh
        count, replicas = len(self._lengths), mesh.dp * mesh.cp
        replicas_seconds = []
        for replica in range(replicas):
            answers = self._lengths[replica * count // replicas : (replica + 1) * count // replicas]
            batch = batching(answers, shape.slots, shape.prompt)
            reading = sum(self.forward(clock, shape.prompt, part.prompts, 0.0) for part in batch.readings)
            decoding = sum(part.steps * self.forward(clock, 1, part.rows, part.columns) for part in batch.decodings)
            replicas_seconds.append((reading + decoding, {READING: reading, DECODING: decoding}, batch))
        _, phases, batch = max(replicas_seconds, key=lambda entry: entry[0])
        return phases, batch

    def forward(self, clock: Clock, s: int, b: int, columns: float) -> float:
        """Returns the seconds of a forward of b sequences of s new tokens, which read so many columns of the cache, and
        of the choice of their next tokens. Stages work one after the other."""
        sizes, places, mesh = self._sizes(s, b), self._model.places, self._settings.mesh
        total = 0.0
        for stage in self._stages:
            alike = Counter(id(self._spec.layers[number]) for number in stage.layers)
            for number in {id(self._spec.layers[number]): number for number in stage.layers}.values():
                parts = clock.parts(self._operations(number, sizes, columns), places)
                queued = clock.queueing(self._model.work.layer(number))
                seconds = max(float(parts.total), float(queued), self._reads(clock, number))
                total += alike[id(self._spec.layers[number])] * seconds
        ends = list(embedding_work(self._spec.embedding, sizes).forward)
        inputs, outputs = self._spec.output.local_features(sizes.tp)
        ends += [Gemm("head", b, outputs, inputs), Traffic("drawing", _DRAWN * b * self._spec.softmax_size)]
        total += float(clock.parts(ends, places).total)
        if mesh.tp > 1:
            total += float(clock.collective(places["tp"], ALL_GATHER, mesh.tp * b * outputs * sizes.e))
        hops = [clock.hop(place, sizes.residual) for place in self._model.boundaries]
        # The logits return to the first stage over all boundaries.
        back = [clock.hop(place, b * outputs * sizes.e) for place in self._model.boundaries]
        return total + float(sum(hops)) + float(sum(back))

    def log_probabilities(self, clock: Clock) -> float:
        """Returns the seconds of a forward without gradients over the rows of a step."""
        stages = [float(np.squeeze(phases.forward.total)) for phases in self._model.stages(clock)]
        head = [op for op in self._model.work.head.input_grad if isinstance(op, Gemm | Traffic)]
        losses = [op for op in head if op.name in ("head", "loss")]
        stages[-1] += float(clock.parts(losses, self._model.places).total)
        by_rank = [0.0] * self._settings.pipeline.placement.num_ranks
        for rank, seconds in zip(self._settings.pipeline.placement.rank_of, stages, strict=True):
            by_rank[rank] += seconds
        hops = sum(float(clock.hop(place, self._model.work.sizes.residual)) for place in self._model.boundaries)
        return (self._microbatches - 1) * max(by_rank) + sum(stages) + hops

    def _exchange(self, clock: Clock) -> float:
        """Seconds in which the reference takes the place of the trained weights, and these return: three copies."""
        pipeline = self._settings.pipeline
        trained = max(self._state(pipeline.stages_of(rank)).trained for rank in range(pipeline.placement.num_ranks))
        return 3 * float(clock.host_copy(trained))

    def _state(self, stages: Sequence[Stage]) -> RankState:
        return rank_state(self._spec, stages, self._settings, self._run.optimizer, self._model.work.sizes, 0)

    def _sizes(self, s: int, b: int) -> Sizes:
        return forward_sizes(self._run, self._settings, Target(cpu=False), s=s, b=b)

    def _operations(self, number: int, sizes: Sizes, columns: float) -> list[LayerOperation]:
        """The operations of a layer. Of new tokens of running answers, attention reads the cache."""
        operations = layer_work(self._spec.layers[number], sizes, self._software, _PLAIN, frozenset()).forward
        if not columns:
            return list(operations)
        cache = sizes.b * self._spec.layers[number].attention.cached.step_bytes(sizes.tp, columns, sizes.e)
        return [*_without_attention(operations), Traffic("cache", cache)]

    def _reads(self, clock: Clock, number: int) -> float:
        """Seconds in which the weights of a layer are read once."""
        return float(clock.traffic(self._weights[number]))

    @cached_property
    def _weights(self) -> dict[int, int]:
        """Bytes of the weights of each layer on a rank."""
        whole = {}
        for stage in self._stages:
            for number in stage.layers:
                alone = Stage(stage.number, range(number, number + 1), embedding=False, head=False)
                whole[number] = self._state([alone]).memory.parameters
        return whole


def with_packed_rows(run: RunConfig, settings: RunSettings, lengths: Sequence[int]) -> RunSettings:
    """Returns the settings of a step whose answers, of these lengths, fill rows of --seq-length tokens."""
    shape = sampling_shape(run, settings)
    assert run.data.seq_length and run.train.micro_batch_size
    dp, micro_batch = settings.mesh.dp, run.train.micro_batch_size
    steps = run.rl.answers_per_rollout // settings.batches.final_global_batch_size
    tokens = (sum(lengths) + shape.prompt * len(lengths)) / (steps * dp)
    rows = max(1, -(-int(tokens) // run.data.seq_length))
    microbatches = -(-rows // micro_batch)
    train = dataclasses.replace(run.train, global_batch_size=microbatches * micro_batch * dp)
    return resolve(dataclasses.replace(run, train=train), settings.mesh)


def _without_attention(operations: Sequence[LayerOperation]) -> Iterator[LayerOperation]:
    for operation in operations:
        is_attention = isinstance(operation, FusedAttention) or (
            not isinstance(operation, LayerMessage) and operation.name in ("scores", "values", "softmax")
        )
        if not is_attention:
            yield operation
