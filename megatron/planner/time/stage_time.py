"""The time of one microbatch in a pipeline stage: forward, input gradients and weight gradients, by part."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from megatron.planner.time.constants import Constants, Number
from megatron.planner.time.hardware import BF16, Cluster, Place
from megatron.planner.time.kernels import attention_seconds, gemm_seconds, traffic_seconds
from megatron.planner.time.messages import call_seconds
from megatron.planner.time.operations import FusedAttention, Gemm, LayerMessage, LayerOperation, LayerWork, Traffic
from megatron.planner.time.software import Software

# Parts of a microbatch's time. tp, cp, ep, dp: communication that is not overlapped. interference: the computation that is
# slower because of the overlapped one. host: waiting for the host to queue kernels.
GEMM, ATTENTION, MEMORY, RECOMPUTE, HOST = "gemm", "attention", "memory", "recompute", "host"
INTERFERENCE, TP, CP, EP, DP = "interference", "tp", "cp", "ep", "dp"
STAGE_PARTS = (GEMM, ATTENTION, MEMORY, RECOMPUTE, HOST, INTERFERENCE, TP, CP, EP, DP)
_PART_OF_GROUP = {"tp": TP, "cp": CP, "cp_inner": CP, "cp_outer": CP, "etp_ep": EP}


class Parts(dict[str, Number]):
    """Seconds by part."""

    def add(self, part: str, seconds: Number) -> None:
        """Adds to one part."""
        self[part] = self.get(part, 0.0) + seconds

    def plus(self, other: Mapping[str, Number], times: float = 1.0) -> Parts:
        """Returns the sum of both, the other one `times` times."""
        result = Parts(self)
        for part, seconds in other.items():
            result.add(part, times * seconds)
        return result

    @property
    def total(self) -> Number:
        """Seconds of all parts."""
        return sum(self.values(), 0.0)

    def of(self, parts: Iterable[str]) -> Number:
        """Returns the seconds of some parts."""
        return sum((self[part] for part in parts if part in self), 0.0)


@dataclass(frozen=True)
class Phases:
    """A microbatch in a layer or a stage. input_grad includes recompute."""

    forward: Parts
    input_grad: Parts
    weight_grad: Parts

    def plus(self, other: Phases, times: float = 1.0) -> Phases:
        """Returns the sum of both, the other one `times` times."""
        return Phases(
            self.forward.plus(other.forward, times),
            self.input_grad.plus(other.input_grad, times),
            self.weight_grad.plus(other.weight_grad, times),
        )


NOTHING = Phases(Parts(), Parts(), Parts())


@dataclass(frozen=True)
class Clock:
    """Measures operations: constants, the cluster, the software, and where the ranks of each group are."""

    constants: Constants
    cluster: Cluster
    software: Software
    places: Mapping[str, Place]

    def seconds(self, operation: Gemm | FusedAttention | Traffic) -> Number:
        """Returns the time of a computation."""
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
            return attention_seconds(
                constants, device, operation.operations, operation.keys, operation.head_dim, self.software.attention
            )
        times: Number = 1.0
        if operation.kind == "unfused":
            times = constants.unfused
        elif operation.kind == "cast":
            times = constants.cast
        elif operation.kind == "score":
            times = constants.score
        return times * traffic_seconds(constants, device, operation.nbytes)

    def parts(self, operations: Iterable[LayerOperation]) -> Parts:
        """Returns the time of operations that run one after the other, with their messages."""
        found = Parts()
        for operation in operations:
            if isinstance(operation, LayerMessage):
                self._message(found, operation)
            else:
                found.add(_PART[type(operation)], self.seconds(operation))
        return found

    def _message(self, found: Parts, message: LayerMessage) -> None:
        """A message in pieces leaves at least one of them behind its computation, and one at its beginning has nothing to
        overlap."""
        seconds = call_seconds(self.constants, self.cluster, self.places[message.call.group], message.call)
        exposed: Number = seconds
        if message.behind is not None:
            cover = self.seconds(message.behind)
            if message.call.op == "shift":  # one of cp - 1 hops, behind one of cp parts of attention
                exposed = np.maximum(0.0, seconds - cover / message.pieces)
            elif message.pieces > 1:
                exposed = np.maximum(seconds / message.pieces, seconds - cover * (1 - 1 / message.pieces))
            else:
                exposed = np.maximum(0.0, seconds - cover)
            slowing = _OF_A_RING if message.call.op == "shift" else 1.0
            found.add(INTERFERENCE, slowing * self.constants.interference * (seconds - exposed))
        found.add(_PART_OF_GROUP[message.call.group], exposed)

    def layer(self, work: LayerWork, *, full: bool) -> Phases:
        """Returns the time of a layer. full: backward repeats the whole forward."""
        forward, input_grad = self.parts(work.forward), self.parts(work.input_grad)
        weight_grad = self.parts(work.weight_grad)
        fused = self.software.fused_norm and self.software.fused_pointwise
        host = self.constants.host if fused else self.constants.host_unfused
        if work.experts:
            host = self.constants.host_experts
        again = Parts(forward) if full else self.parts(work.again)
        forward.add(HOST, np.maximum(0.0, host - forward.total))
        backward = input_grad.total + weight_grad.total + again.total
        input_grad.add(RECOMPUTE, again.of(_COMPUTED))
        input_grad = input_grad.plus({part: again[part] for part in again if part not in _COMPUTED})
        input_grad.add(HOST, np.maximum(0.0, host * (2.0 if full else 1.0) - backward))
        return Phases(forward, input_grad, weight_grad)

    def end(self, work: LayerWork) -> Phases:
        """Returns the time of the embedding or the head, whose kernels are few and large."""
        return Phases(self.parts(work.forward), self.parts(work.input_grad), self.parts(work.weight_grad))


_PART = {Gemm: GEMM, FusedAttention: ATTENTION, Traffic: MEMORY}
_OF_A_RING = 0.25  # a message between two ranks takes a quarter of the processors of a collective
_COMPUTED = (GEMM, ATTENTION, MEMORY)
