"""Where the time of the slowest rank of a step goes, operation by operation, and how many bytes it sends on each
link."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from megatron.config.optimizer_offload import OFF, STATES
from megatron.config.run import RunConfig
from megatron.config.settings import RunSettings
from megatron.planner.time.activation_copies import activation_copies
from megatron.planner.time.clock import Clock
from megatron.planner.time.constants import Number, fitted
from megatron.planner.time.data_sheet import DataSheetClock
from megatron.planner.time.hardware import Cluster, Place
from megatron.planner.time.messages import wire_bytes
from megatron.planner.time.operations import LayerMessage, LayerOperation, LayerWork
from megatron.planner.time.optimizer_update import optimizer_update
from megatron.planner.time.stage_time import (
    ATTENTION,
    BUBBLE,
    DP,
    GEMM,
    HOST,
    INTERFERENCE,
    MEMORY,
    NOTHING,
    OFFLOAD,
    OPTIMIZER,
    PP,
    RECOMPUTE,
    STEP,
    STRAGGLER,
)
from megatron.planner.time.step_time import StepModel, StepTime
from megatron.spec.collectives import ALL_GATHER, SHIFT
from megatron.spec.sizes import FP32

NODE_LINK, NETWORK, HOST_LINK = "link in the node", "network", "copies to the host"
_COMPUTED = (GEMM, ATTENTION, MEMORY)
_LEAST = 1e-9  # part of a step that rounding leaves
# What is left of a part when its operations are taken off: it belongs to no single operation of a layer.
_REST = {
    HOST: "waiting for the host to queue kernels",
    DP: "sums of gradients and gathers of parameters",
    INTERFERENCE: "slowed by sums of gradients and gathers of parameters",
    OFFLOAD: "waiting for copies to and from host memory",
    PP: "messages between pipeline ranks",
    BUBBLE: "waiting for other pipeline ranks",
    OPTIMIZER: "update of the parameters",
    STEP: "fixed time of a step",
    STRAGGLER: "waiting for the slowest node",
}


@dataclass(frozen=True)
class OperationTime:
    """An operation of the slowest rank. part: of the step's time (PARTS) that it belongs to. seconds: per step. times:
    how often it runs per step, 0 if it is no operation of a layer."""

    name: str
    part: str
    seconds: float
    times: int


@dataclass(frozen=True)
class LinkLoad:
    """A link of a device. nbytes: that the slowest rank sends on it per step. rate: its bytes/s, of the data sheet."""

    link: str
    nbytes: float
    rate: float

    def busy(self, seconds: float) -> float:
        """Returns the part of a step that these bytes take at the link's full rate."""
        return self.nbytes / self.rate / seconds


def slowest_rank(model: StepModel, settings: RunSettings, clock: Clock) -> int:
    """Returns the pipeline rank with the most work per microbatch, whose parts a StepTime has."""
    placement = settings.pipeline.placement
    busy = np.zeros(placement.num_ranks)
    for stage, phases in enumerate(model.stages(clock)):
        busy[placement.rank_of[stage]] += sum(
            float(np.mean(parts.total)) for parts in (phases.forward, phases.input_grad, phases.weight_grad)
        )
    return int(busy.argmax())


def operations_by_time(model: StepModel, settings: RunSettings, clock: Clock, time: StepTime) -> list[OperationTime]:
    """Returns the operations of the slowest rank, longest first. Their seconds add up to the parts of `time`."""
    microbatches = settings.batches.final_num_microbatches
    seconds: dict[tuple[str, str], float] = defaultdict(float)
    times: dict[tuple[str, str], int] = defaultdict(int)
    for work, full, count in _works(model, settings, slowest_rank(model, settings, clock)):
        for operation, repeated in _operations(work, full):
            for part, spent in clock.parts((operation,), model.places).items():
                shown_part = RECOMPUTE if repeated and part in _COMPUTED else part
                slowed = "slowed by " if part == INTERFERENCE else ""
                key = f"{slowed}{name_of(operation)}{', repeated' if repeated else ''}", shown_part
                seconds[key] += microbatches * count * float(np.mean(spent))
                times[key] += microbatches * count
    items = [OperationTime(*key, spent, times[key]) for key, spent in seconds.items()]
    for part, spent in time.parts.items():
        remainder = float(np.mean(spent)) - sum(item.seconds for item in items if item.part == part)
        if abs(remainder) > _LEAST * float(np.mean(time.seconds)):
            items.append(OperationTime(_REST.get(part, part), part, remainder, 0))
    return sorted(items, key=lambda item: -item.seconds)


def name_of(operation: LayerOperation) -> str:
    """Returns the name of an operation; that of a message has its collective and its group."""
    if not isinstance(operation, LayerMessage):
        return operation.name
    group = operation.call.group.removesuffix("_inner").removesuffix("_outer").removeprefix("etp_")
    return f"{operation.call.op.replace('_', '-')} over {group}"


def links_by_load(run: RunConfig, model: StepModel, settings: RunSettings, cluster: Cluster) -> list[LinkLoad]:
    """Returns the links of a device of the slowest rank, with the bytes that it sends in a step."""
    clock = _RecordingClock(fitted(), cluster)
    rank = slowest_rank(model, settings, clock)
    sent = np.zeros(2)
    for place, op, nbytes, times in _messages(model, settings, clock, rank):
        sent += times * np.array(wire_bytes(place, op, nbytes))
    return [
        LinkLoad(NODE_LINK, float(sent[0]), cluster.device.link),
        LinkLoad(NETWORK, float(sent[1]), cluster.network),
        LinkLoad(HOST_LINK, _host_bytes(run, model, settings, rank), cluster.host),
    ]


def _host_bytes(run: RunConfig, model: StepModel, settings: RunSettings, rank: int) -> float:
    """Bytes of activations, gradients and states of the optimizer that a pipeline rank copies to its host in a step.

    At most as many come back.
    """
    copies, stages = activation_copies(run, settings, model.work.spec), settings.pipeline.stages_of(rank)
    nbytes = 0.0
    if copies is not None:
        copied = [copies.ratio * copies.saved[stage.number] or sum(copies.by_layer[stage.number]) for stage in stages]
        nbytes += settings.batches.final_num_microbatches * sum(copied)
    offload = settings.optimizer_offload
    if offload.mode != OFF:
        elements = sum(
            numel / model.places[f"{view}_shard"].size
            for stage in stages
            for view, numel in model.replicas.held[stage.number].by_view.items()
        )
        update = optimizer_update(run.optimizer, settings, half=run.model.dtype_name != "float32")
        nbytes += elements * (update.states if offload.mode == STATES else offload.fraction * FP32)
    return nbytes


@dataclass(frozen=True)
class _RecordingClock(DataSheetClock):
    """Remembers the collectives whose time it is asked for."""

    calls: list[tuple[Place, str, float]] = field(default_factory=list)

    def collective(self, place: Place, op: str, nbytes: float) -> Number:
        self.calls.append((place, op, nbytes))
        return super().collective(place, op, nbytes)


def _messages(
    model: StepModel, settings: RunSettings, clock: _RecordingClock, rank: int
) -> Iterator[tuple[Place, str, float, int]]:
    """(group, collective, bytes as `wire_bytes` takes them, times per step) of all that a pipeline rank sends."""
    microbatches = settings.batches.final_num_microbatches
    for work, full, count in _works(model, settings, rank):
        for operation, _ in _operations(work, full):
            if isinstance(operation, LayerMessage):
                place, call = model.places[operation.call.group], operation.call
                whole = call.nbytes * (place.size if call.op == ALL_GATHER else 1)
                yield place, call.op, whole, microbatches * count
    for stage in settings.pipeline.stages_of(rank):
        replicas = dataclasses.replace(model.replicas, held=[model.replicas.held[stage.number]], rank_of=[0])
        clock.calls.clear()
        replicas.reductions(clock)
        yield from ((*call, 1) for call in clock.calls)
        clock.calls.clear()
        replicas.with_microbatch(clock, NOTHING, 0)
        # Sharded parameters are gathered for forward and again for backward, which take the same time.
        yield from ((*call, microbatches * (2 if call[1] == ALL_GATHER else 1)) for call in clock.calls)
        for boundary in (stage.number, stage.number - 1):  # outputs go on, gradients go back
            if 0 <= boundary < len(model.boundaries):
                yield model.boundaries[boundary], SHIFT, model.work.sizes.residual, microbatches


def _works(model: StepModel, settings: RunSettings, rank: int) -> Iterator[tuple[LayerWork, bool, int]]:
    """(layers or ends of a pipeline rank, whether backward repeats all of their forward, how many)."""
    for stage in settings.pipeline.stages_of(rank):
        for (kind, full), count in model.counts(stage).items():
            yield model.work.works[kind], full, count
        if stage.embedding:
            yield model.work.embedding, False, 1
        if stage.head:
            yield model.work.head, False, 1


def _operations(work: LayerWork, full: bool) -> Iterator[tuple[LayerOperation, bool]]:
    """(operation of a microbatch, whether it is one that backward repeats)."""
    for operation in (*work.forward, *work.input_grad, *work.weight_grad):
        yield operation, False
    for operation in work.forward if full else work.again:
        yield operation, True
