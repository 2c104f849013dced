"""What measures the parts of a step: every second of `StepModel` comes from a `Clock`.

`DataSheetClock` (data_sheet.py) takes them from data sheets and fitted constants. The rules that combine them, such as
what a message in pieces hides behind, are here and hold for every clock.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping

import numpy as np

from megatron.planner.time.constants import Number
from megatron.planner.time.hardware import Place
from megatron.planner.time.operations import (
    Computation,
    FusedAttention,
    Gemm,
    LayerMessage,
    LayerOperation,
    LayerWork,
    Traffic,
)
from megatron.planner.time.stage_time import (
    ATTENTION,
    CP,
    EP,
    GEMM,
    HOST,
    INTERFERENCE,
    MEMORY,
    RECOMPUTE,
    TP,
    Parts,
    Phases,
)
from megatron.spec.collectives import ALL_GATHER, SHIFT, Collective

Places = Mapping[str, Place]  # where the ranks of each group of a collective are
_PART = {Gemm: GEMM, FusedAttention: ATTENTION, Traffic: MEMORY}
_PART_OF_GROUP = {"tp": TP, "cp": CP, "cp_inner": CP, "cp_outer": CP, "etp_ep": EP}
_COMPUTED = (GEMM, ATTENTION, MEMORY)


class Clock(ABC):
    """Seconds of each kind of work: numbers, or arrays of K. A clock serves any number of layouts."""

    @abstractmethod
    def computation(self, operation: Computation) -> Number:
        """Returns the time of kernels on the device."""

    @abstractmethod
    def collective(self, place: Place, op: str, nbytes: float) -> Number:
        """Returns the time of a collective. nbytes: of the whole tensor, for all_to_all of a rank's part."""

    @abstractmethod
    def hop(self, place: Place, nbytes: float) -> Number:
        """Returns the time of a message to a neighbour in a group, of which the slowest counts; 0 in a group of one."""

    @abstractmethod
    def hop_latency(self, place: Place) -> Number:
        """Returns the part of `hop` that any number of messages spend at the same time."""

    def sending(self, place: Place, nbytes: float) -> Number:
        """Returns what the computation of a stage loses to a message that it sends to a neighbour: 0 where the device
        sends by itself."""
        return 0.0

    @abstractmethod
    def slowing(self, hidden: Number, place: Place, op: str) -> Number:
        """Returns what computation loses to `hidden` seconds of such messages, which it overlaps."""

    @abstractmethod
    def queueing(self, work: LayerWork) -> Number:
        """Returns the time that the host needs to queue the kernels of a layer's forward."""

    @abstractmethod
    def traffic(self, nbytes: float) -> Number:
        """Returns the time of kernels that read and write `nbytes` of device memory."""

    @abstractmethod
    def update(self, parameters: float) -> Number:
        """Returns the time in which the device updates so many parameters."""

    @abstractmethod
    def cpu_update(self, parameters: float) -> Number:
        """Returns the time in which the CPU updates so many parameters, while every rank of the host does."""

    @abstractmethod
    def host_copy(self, nbytes: float) -> Number:
        """Returns the time of a copy between a device and the memory of its host, in one direction."""

    @abstractmethod
    def step(self) -> Number:
        """Returns the seconds of a step that belong to no microbatch."""

    @abstractmethod
    def straggling(self, ranks: int) -> Number:
        """Returns the part of a step that `ranks` wait for the slowest of them."""

    def bucket(self, place: Place, op: str, nbytes: float) -> Number:
        """Returns the time of a collective of parameters or gradients, whose transport may be another one."""
        return self.collective(place, op, nbytes)

    def bucket_slowing(self, hidden: Number, place: Place, op: str) -> Number:
        """Returns what computation loses to `hidden` seconds of such collectives."""
        return self.slowing(hidden, place, op)

    def sum_slowing(self, hidden: Number, place: Place, op: str) -> Number:
        """Returns what the last backward loses to sums of gradients that it hides: nothing, unless it was measured."""
        return 0.0

    def call(self, places: Places, call: Collective) -> Number:
        """Returns the time of a call of the decoder, whose bytes are those of each rank's input."""
        place = places[call.group]
        if call.op == SHIFT:
            return self.hop(place, call.nbytes)
        return self.collective(place, call.op, call.nbytes * place.size if call.op == ALL_GATHER else call.nbytes)

    def layer(self, work: LayerWork, places: Places, *, full: bool) -> Phases:
        """Returns the time of a layer. full: backward repeats the whole forward."""
        return self.with_repeated(work, self.layer_once(work, places), work.again, places, full=full)

    def layer_once(self, work: LayerWork, places: Places) -> Phases:
        """Returns the time of each operation of a layer once, without waiting for the host."""
        return self.end(work, places)

    def with_repeated(
        self, work: LayerWork, once: Phases, operations: Iterable[LayerOperation], places: Places, *, full: bool
    ) -> Phases:
        """Returns the time of a layer whose backward repeats `operations`, from that of `layer_once`. full: backward
        repeats the whole forward instead.

        The host needs as long for the kernels of backward as for those of forward, half of it for each kind of
        gradients.
        """
        again = once.forward if full else self.parts(operations, places)
        host = self.queueing(work)
        forward = Parts(once.forward)
        forward.add(HOST, np.maximum(0.0, host - forward.total))
        input_grad, weight_grad = Parts(once.input_grad), Parts(once.weight_grad)
        input_grad.add(RECOMPUTE, again.of(_COMPUTED))
        input_grad = input_grad.plus({part: again[part] for part in again if part not in _COMPUTED})
        input_grad.add(HOST, np.maximum(0.0, host * (1.5 if full else 0.5) - input_grad.total))
        weight_grad.add(HOST, np.maximum(0.0, host * 0.5 - weight_grad.total))
        return Phases(forward, input_grad, weight_grad)

    def end(self, work: LayerWork, places: Places) -> Phases:
        """Returns the time of the embedding or the head, whose kernels are few and large."""
        return Phases(
            *(self.parts(operations, places) for operations in (work.forward, work.input_grad, work.weight_grad))
        )

    def parts(self, operations: Iterable[LayerOperation], places: Places) -> Parts:
        """Returns the time of operations that run one after the other, with their messages."""
        parts = Parts()
        for operation in operations:
            if isinstance(operation, LayerMessage):
                self._message(parts, operation, places)
            else:
                parts.add(_PART[type(operation)], self.computation(operation))
        return parts

    def _message(self, found: Parts, message: LayerMessage, places: Places) -> None:
        """A message in pieces leaves at least one of them behind its computation, and one at its beginning has nothing
        to overlap."""
        seconds = self.call(places, message.call)
        exposed: Number = seconds
        if message.behind is not None:
            cover = self.computation(message.behind)
            if message.call.op == SHIFT:  # one of cp - 1 hops, behind one of cp parts of attention
                exposed = np.maximum(0.0, seconds - cover / message.pieces)
            elif message.pieces > 1:
                exposed = np.maximum(seconds / message.pieces, seconds - cover * (1 - 1 / message.pieces))
            else:
                exposed = np.maximum(0.0, seconds - cover)
            place = places[message.call.group]
            found.add(INTERFERENCE, self.slowing(seconds - exposed, place, message.call.op))
        found.add(_PART_OF_GROUP[message.call.group], exposed)
