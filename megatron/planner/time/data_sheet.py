"""A clock that knows a cluster from its data sheets, and everything else from the fitted constants."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron.planner.time.clock import Clock
from megatron.planner.time.constants import Constants, Number
from megatron.planner.time.hardware import BF16, Cluster, Place
from megatron.planner.time.kernels import attention_rate, attention_seconds, gemm_seconds, traffic_seconds
from megatron.planner.time.messages import collective_seconds, hop_latency, hop_seconds
from megatron.planner.time.operations import CAST, SCORE, Computation, FusedAttention, Gemm, LayerWork
from megatron.spec.collectives import SHIFT

# Per parameter of a rank's slice: fp32 master, gradient and two moments, read and written; bf16 weight.
UPDATE_BYTES = 36
# The same in host memory, whose gradient is not written: 30 bytes in one pass (docs/cpu_adam.md).
CPU_UPDATE_BYTES = 30
# The part of the main memory's rate that the CPU's Adam reaches: 0.95 of what plain copies of the same streams reach
# (benchmarks/results/cpu_adam.md), which reach about 0.8 of the data sheet.
CPU_UPDATE_RATE = 0.76
_OF_A_RING = 0.25  # a message between two ranks takes a quarter of the processors of a collective


@dataclass(frozen=True)
class DataSheetClock(Clock):
    """The formulas of kernels.py and messages.py. Constants that are arrays of K give K times at once."""

    constants: Constants
    cluster: Cluster

    def computation(self, operation: Computation) -> Number:
        """Returns the time of kernels on the device."""
        constants, device = self.constants, self.cluster.device
        if isinstance(operation, Gemm):
            return gemm_seconds(
                constants,
                device,
                operation.m,
                operation.n,
                operation.k,
                precision=operation.precision,
                count=operation.count,
                in_bytes=2 if operation.precision == BF16 else 1,
                out_bytes=8 if operation.accumulates else 2,
            )
        if isinstance(operation, FusedAttention):
            rate = attention_rate(constants, device)
            return attention_seconds(constants, rate, operation.operations, operation.keys, operation.head_dim)
        times: Number = 1.0
        if operation.kind == CAST:
            times = constants.cast
        elif operation.kind == SCORE:
            times = constants.score
        return times * self.traffic(operation.nbytes)

    def collective(self, place: Place, op: str, nbytes: float) -> Number:
        """Returns the time of a collective. nbytes: of the whole tensor, for all_to_all of a rank's part."""
        return collective_seconds(self.constants, self.cluster, place, op, nbytes)

    def hop(self, place: Place, nbytes: float) -> Number:
        """Returns the time of a message to a neighbour in a group, of which the slowest counts; 0 in a group of one."""
        return hop_seconds(self.constants, self.cluster, place, nbytes)

    def hop_latency(self, place: Place) -> Number:
        """Returns the part of `hop` that any number of messages spend at the same time."""
        return hop_latency(self.constants, place)

    def slowing(self, hidden: Number, place: Place, op: str) -> Number:
        """Returns what computation loses to `hidden` seconds of such messages, which it overlaps."""
        return (_OF_A_RING if op == SHIFT else 1.0) * self.constants.interference * hidden

    def queueing(self, work: LayerWork) -> Number:
        """Returns the time that the host needs to queue the kernels of a layer's forward."""
        return self.constants.host_experts if work.experts else self.constants.host

    def traffic(self, nbytes: float) -> Number:
        """Returns the time of kernels that read and write `nbytes` of device memory."""
        return traffic_seconds(self.constants, self.cluster.device, nbytes)

    def update(self, parameters: float) -> Number:
        """Returns the time in which the device updates so many parameters."""
        return self.traffic(UPDATE_BYTES * parameters)

    def cpu_update(self, parameters: float) -> Number:
        """Returns the time in which the CPU updates so many parameters, while every rank of the host does."""
        rate = CPU_UPDATE_RATE * self.cluster.host_rate / self.cluster.node
        return CPU_UPDATE_BYTES * parameters / rate

    def host_copy(self, nbytes: float) -> Number:
        """Returns the time of a copy between a device and the memory of its host, in one direction."""
        return nbytes / self.cluster.host

    def step(self) -> Number:
        """Returns the seconds of a step that belong to no microbatch."""
        return self.constants.step

    def straggling(self, ranks: int) -> Number:
        """Returns the part of a step that `ranks` wait for the slowest of them."""
        return self.constants.straggler * math.log2(max(1.0, ranks / self.cluster.node))
