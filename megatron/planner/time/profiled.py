"""A clock that takes all times from the profile of a machine.

Layers and ends of measured shapes take what was measured. Others take the nearest measured one, changed as the tables
of products and attention say, so a table decides about the difference alone. Messages lie between those of measured
sizes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron.base.errors import ConfigError
from megatron.config.recompute import CORE_ATTN, MLP_ACT, NORM, WHOLE_MLP
from megatron.config.run import RunConfig
from megatron.planner.time.clock import Clock, Places
from megatron.planner.time.constants import Number
from megatron.planner.time.hardware import BF16, Cluster, Device, Place
from megatron.planner.time.model_work import ModelWork, model_work
from megatron.planner.time.operations import (
    Computation,
    FusedAttention,
    Gemm,
    LayerMessage,
    LayerOperation,
    LayerWork,
    Traffic,
)
from megatron.planner.time.profile_file import (
    BUCKET_ALL_REDUCE,
    BUCKET_GATHER,
    BUCKET_REDUCE_SCATTER,
    EMBEDDING,
    HEAD,
    SEND,
    WHOLE_LAYER,
    EndRow,
    LayerRow,
    MachineProfile,
)
from megatron.planner.time.profile_tables import MessageTable, attention_seconds, product_seconds
from megatron.planner.time.profiled_run import run_in, settings_in
from megatron.planner.time.software import Software
from megatron.planner.time.stage_time import ATTENTION, GEMM, HOST, MEMORY, RECOMPUTE, Parts, Phases
from megatron.spec.collectives import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    ALL_TO_ALL_V,
    REDUCE_SCATTER,
    SHIFT,
    Collective,
)

_OF_BUCKETS = {
    ALL_GATHER: BUCKET_GATHER,
    REDUCE_SCATTER: BUCKET_REDUCE_SCATTER,
    ALL_REDUCE: BUCKET_ALL_REDUCE,
}
Signature = tuple[object, ...]


def cluster_of(profile: MachineProfile) -> Cluster:
    """Returns the machine as a cluster: its nodes, and a device whose peak is the best product that was measured."""
    best = {BF16: profile.product_flops_per_second}
    rates = [row.nbytes / row.seconds for row in profile.messages] or [profile.to_host_bytes_per_second]
    inside = [row.nbytes / row.seconds for row in profile.messages if row.ranks == row.together]
    device = Device(
        name=profile.device,
        architecture="measured",
        peak=best,
        reached=best,
        memory=float(profile.memory_bytes),
        bandwidth=profile.bytes_per_second,
        link=max(inside or rates),
        processors=profile.processors,
        domain=profile.devices_per_node,
    )
    outside = [row.nbytes / row.seconds for row in profile.messages if row.ranks > row.together]
    return Cluster(
        device=device,
        node=profile.devices_per_node,
        network=max(outside or rates),
        host=min(profile.to_host_bytes_per_second, profile.to_device_bytes_per_second),
        host_memory=float(profile.memory_bytes * profile.devices_per_node),
    )


def check_device(profile: MachineProfile, device: str, path: str) -> None:
    """Raises ConfigError if a profile was not taken on this device: a built-in name such as h100-pcie, or the
    driver's."""
    words = device.lower().split()[0].split("-")[0]
    if device != profile.device and words not in profile.device.lower():
        raise ConfigError(
            f"--profile {path} was taken on {profile.device}, and the run is for {device}; take a profile there with "
            "tools/profile_machine.py"
        )


@dataclass(frozen=True)
class _Known:
    """A measured layer or end: its operations, its row of the profile, and what the tables say about its phases."""

    work: LayerWork
    row: LayerRow | EndRow
    tables: tuple[float, float, float]

    @property
    def measured(self) -> tuple[float, float, float]:
        """Seconds of the phases."""
        return self.row.forward_seconds, self.row.input_grad_seconds, self.row.weight_grad_seconds


class ProfiledClock(Clock):
    """See the file. It serves all layouts of a model."""

    def __init__(self, profile: MachineProfile, run: RunConfig, software: Software, path: str) -> None:
        """run: any layout of the model. path: of the profile, for messages. Raises ConfigError for a model whose layers
        were not measured."""
        profile.check_model(run.model, path)
        self.profile, self._run, self._software = profile, run, software
        self._messages = MessageTable(profile.messages, path)
        self._computations: dict[Computation, float] = {}
        self._found: dict[Signature, _Known] = {}

    def layer_once(self, work: LayerWork, places: Places) -> Phases:
        """Returns the time of each operation of a layer once, without waiting for the host."""
        return self._phases(work, self._nearest(work, self._layers), places)

    def with_repeated(
        self, work: LayerWork, once: Phases, operations: Iterable[LayerOperation], places: Places, *, full: bool
    ) -> Phases:
        """Returns the time of a layer whose backward repeats `operations`, from that of `layer_once`. full: backward
        repeats the whole forward instead."""
        nearest = self._nearest(work, self._layers)
        assert isinstance(nearest.row, LayerRow)
        forward, input_grad, weight_grad = Parts(once.forward), Parts(once.input_grad), once.weight_grad
        repeated = work.forward if full else tuple(operations)
        if repeated:
            messages = [operation for operation in repeated if isinstance(operation, LayerMessage)]
            input_grad = input_grad.plus(self.parts(messages, places))
            input_grad.add(RECOMPUTE, self._whole_again(work, nearest) if full else self._again(repeated, nearest))
        host = self.queueing(work)
        forward.add(HOST, np.maximum(0.0, host - forward.total))
        host = nearest.row.host_backward_seconds + full * host
        input_grad.add(HOST, np.maximum(0.0, host - input_grad.total - weight_grad.total))
        return Phases(forward, input_grad, weight_grad)

    def end(self, work: LayerWork, places: Places) -> Phases:
        """Returns the time of the embedding or the head."""
        return self._phases(work, self._nearest(work, self._heads if _has_products(work) else self._embeddings), places)

    def computation(self, operation: Computation) -> Number:
        """Returns the time of kernels on the device, by the tables."""
        if operation not in self._computations:
            if isinstance(operation, Gemm):
                seconds = product_seconds(self.profile.products, operation)
            elif isinstance(operation, FusedAttention):
                seconds = attention_seconds(self.profile.attention, operation)
            else:
                seconds = operation.nbytes / self.profile.bytes_per_second
            self._computations[operation] = seconds
        return self._computations[operation]

    def call(self, places: Places, call: Collective) -> Number:
        """Returns the time of a call of the decoder, whose bytes are those of each rank's input."""
        if call.op == SHIFT:
            return self._messages.seconds(SHIFT, places[call.group], call.nbytes)
        return super().call(places, call)

    def collective(self, place: Place, op: str, nbytes: float) -> Number:
        """Returns the time of a collective. nbytes: of the whole tensor, for all_to_all of a rank's part."""
        return self._messages.seconds(_measured_name(op), place, nbytes)

    def bucket(self, place: Place, op: str, nbytes: float) -> Number:
        """Returns the time of a collective of buckets, as `collective`."""
        return self._messages.seconds(_OF_BUCKETS[op], place, nbytes)

    def hop(self, place: Place, nbytes: float) -> Number:
        """Returns the time of a message to the next pipeline rank."""
        return self._messages.seconds(SEND, place, nbytes)

    def hop_latency(self, place: Place) -> Number:
        """Returns the part of `hop` that any number of messages spend at the same time."""
        return self._messages.latency(SEND, place)

    def sending(self, place: Place, nbytes: float) -> Number:
        """Returns what the computation of a stage loses to a message that it sends to a neighbour."""
        return self._messages.slowing(SEND, place, self.hop(place, nbytes))

    def slowing(self, hidden: Number, place: Place, op: str) -> Number:
        """Returns what computation loses to `hidden` seconds of such messages, which it overlaps."""
        return self._messages.slowing(_measured_name(op), place, hidden)

    def bucket_slowing(self, hidden: Number, place: Place, op: str) -> Number:
        """Returns what computation loses to `hidden` seconds of such collectives of buckets."""
        return self._messages.slowing(_OF_BUCKETS[op], place, hidden)

    def sum_slowing(self, hidden: Number, place: Place, op: str) -> Number:
        """Returns what the last backward loses to sums of gradients that it hides."""
        return self.bucket_slowing(hidden, place, op)

    def host_copy(self, nbytes: float) -> Number:
        """Returns the time of a copy between a device and the memory of its host, in the slower direction."""
        return nbytes / min(self.profile.to_host_bytes_per_second, self.profile.to_device_bytes_per_second)

    def queueing(self, work: LayerWork) -> Number:
        """Returns the time that the host needs to queue the kernels of a layer's forward."""
        row = self._nearest(work, self._layers).row
        assert isinstance(row, LayerRow)
        return row.host_forward_seconds

    def traffic(self, nbytes: float) -> Number:
        """Returns the time of kernels that read and write `nbytes` of device memory."""
        return nbytes / self.profile.bytes_per_second

    def update(self, parameters: float) -> Number:
        """Returns the time in which the device updates so many parameters."""
        return parameters / self.profile.update_parameters_per_second

    def cpu_update(self, parameters: float) -> Number:
        """Returns the time in which the CPU updates so many parameters."""
        return parameters / self.profile.cpu_adam_parameters_per_second

    def step(self) -> Number:
        """Returns the seconds of a step that belong to no microbatch."""
        return self.profile.step_seconds

    def straggling(self, ranks: int) -> Number:
        """Returns 0: the times of messages are those of the slowest rank already."""
        return 0.0

    def _phases(self, work: LayerWork, nearest: _Known, places: Places) -> Phases:
        """The parts by the tables, with computation changed to what was measured."""
        wanted = [self._computed(operations) for operations in _phases_of(work)]
        whole = sum(wanted) / sum(nearest.tables) if sum(nearest.tables) else 1.0
        phases = []
        for operations, seconds, table, measured in zip(
            _phases_of(work), wanted, nearest.tables, nearest.measured, strict=True
        ):
            parts = self.parts(operations, places)
            if seconds > 0 and table > 0:
                factor = measured / table
                parts = Parts(
                    {part: seconds * (factor if part in _COMPUTED else 1.0) for part, seconds in parts.items()}
                )
            else:  # the tables know of no kernels here
                parts.add(MEMORY, measured * whole - seconds)
            phases.append(parts)
        return Phases(*phases)

    def _again(self, operations: Iterable[LayerOperation], nearest: _Known) -> Number:
        """Seconds that the repeated modules add to backward."""
        assert isinstance(nearest.row, LayerRow)
        repeated = _by_module(operations)
        if WHOLE_MLP in repeated:
            repeated[WHOLE_MLP] += repeated.pop(MLP_ACT, [])
        by_module = _by_module(nearest.work.forward)
        by_module[WHOLE_MLP] = [*by_module.get(WHOLE_MLP, []), *by_module.get(MLP_ACT, [])]
        seconds = 0.0
        for module, operations in repeated.items():
            wanted, table = self._computed(operations), self._computed(by_module.get(module, []))
            measured = nearest.row.again_seconds.get(module)
            seconds += wanted if measured is None or not table else measured * wanted / table
        return seconds

    def _whole_again(self, work: LayerWork, nearest: _Known) -> Number:
        """Seconds that a second forward adds to backward."""
        assert isinstance(nearest.row, LayerRow)
        wanted, table = self._computed(work.forward), self._computed(nearest.work.forward)
        return nearest.row.again_seconds[WHOLE_LAYER] * wanted / table

    def _computed(self, operations: Iterable[LayerOperation]) -> float:
        """Seconds of the kernels among these operations, by the tables."""
        return math.fsum(
            float(self.computation(operation)) for operation in operations if not isinstance(operation, LayerMessage)
        )

    @cached_property
    def _layers(self) -> Sequence[_Known]:
        return [self._known(row, self._work_of(row).layer(row.layer)) for row in self.profile.layers]

    @cached_property
    def _heads(self) -> Sequence[_Known]:
        return [self._known(row, self._work_of(row).head) for row in self.profile.ends if row.end == HEAD]

    @cached_property
    def _embeddings(self) -> Sequence[_Known]:
        return [self._known(row, self._work_of(row).embedding) for row in self.profile.ends if row.end == EMBEDDING]

    def _work_of(self, row: LayerRow | EndRow) -> ModelWork:
        placed = run_in(self._run, row.layout, row.seq_length)
        return model_work(placed, settings_in(placed), self._software)

    def _known(self, row: LayerRow | EndRow, work: LayerWork) -> _Known:
        forward, input_grad, weight_grad = (self._computed(operations) for operations in _phases_of(work))
        return _Known(work, row, (forward, input_grad, weight_grad))

    def _nearest(self, work: LayerWork, layers: Sequence[_Known]) -> _Known:
        """The same layer or end, or else the most similar one."""
        signature = _signature(work)
        if signature not in self._found:
            same = (layer for layer in layers if _signature(layer.work) == signature)
            features = _features(work)
            similar = min(layers, key=lambda layer: math.dist(_features(layer.work), features))
            self._found[signature] = next(same, similar)
        return self._found[signature]


_COMPUTED = (GEMM, ATTENTION, MEMORY)
_MODULE_OF = {
    "attention norm": NORM,
    "MLP norm": NORM,
    "post norm": NORM,
    "residual": NORM,
    "fc1": WHOLE_MLP,
    "fc2": WHOLE_MLP,
    "activation": MLP_ACT,
    "rotary": CORE_ATTN,
    "attention": CORE_ATTN,
    "scores": CORE_ATTN,
    "values": CORE_ATTN,
    "softmax": CORE_ATTN,
}


def _by_module(operations: Iterable[LayerOperation]) -> dict[str, list[LayerOperation]]:
    """The kernels by the module whose recompute repeats them; those of no such module are under ""."""
    operations_by_module: dict[str, list[LayerOperation]] = {}
    for operation in operations:
        if not isinstance(operation, LayerMessage):
            operations_by_module.setdefault(_MODULE_OF.get(operation.name, ""), []).append(operation)
    return operations_by_module


def _phases_of(work: LayerWork) -> tuple[tuple[LayerOperation, ...], ...]:
    return work.forward, work.input_grad, work.weight_grad


def _signature(work: LayerWork) -> Signature:
    """Equal for layers whose kernels and kinds of messages are the same."""
    return tuple(
        tuple(
            (operation.call.group, operation.call.op, operation.pieces)
            if isinstance(operation, LayerMessage)
            else operation
            for operation in operations
        )
        for operations in _phases_of(work)
    )


def _features(work: LayerWork) -> tuple[float, ...]:
    """What makes layers similar: the logarithms of their operations and bytes."""
    products = attention = traffic = 0.0
    sent: dict[str, float] = {}
    for operation in (*work.forward, *work.input_grad, *work.weight_grad):
        if isinstance(operation, Gemm):
            products += operation.count * operation.m * operation.n * operation.k
        elif isinstance(operation, FusedAttention):
            attention += operation.operations
        elif isinstance(operation, Traffic):
            traffic += operation.nbytes
        else:
            group = operation.call.group
            sent[group] = sent.get(group, 0.0) + operation.call.nbytes
    figures = (products, attention, traffic, sent.get("tp", 0.0), sum(sent.values()) - sent.get("tp", 0.0))
    return tuple(math.log1p(figure) for figure in figures)


def _has_products(work: LayerWork) -> bool:
    return any(isinstance(operation, Gemm) for operations in _phases_of(work) for operation in operations)


def _measured_name(op: str) -> str:
    """Exchanges of pieces of any size are measured with pieces of one size."""
    return ALL_TO_ALL if op == ALL_TO_ALL_V else op
