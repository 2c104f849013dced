"""The memory of the exchange of tokens (core/expert_parallel), event by event.

One rank that has all experts exchanges nothing: its rows are the tokens, and its sums the result.
"""

from __future__ import annotations

from megatron.spec.expert_rows import ExpertRows
from megatron.spec.memory.trace import BACKWARD, COMMUNICATION, EXPERTS, MLP, ROUTING, WORK, MemoryTrace
from megatron.spec.sizes import FP32, INT32, INT64, Sizes


class ExchangeMemory:
    """Tokens to the ranks of their experts, and sums of results back."""

    def __init__(self, sizes: Sizes, load: ExpertRows) -> None:
        self._sizes, self._load, self._row = sizes, load, sizes.h * sizes.e

    @property
    def alone(self) -> bool:
        """Whether this rank has all experts."""
        return self._load.ranks == 1

    @property
    def plan(self) -> int:
        """Bytes of the indices of a plan, and of the row of each assignment."""
        load = self._load
        if self.alone:
            return INT64 * (load.assigned + load.worked)
        return INT64 * (load.sent + load.assigned + 3 * load.worked) + INT32 * load.assigned

    @property
    def received(self) -> int:
        """Bytes of the rows that are received, and of the results that are sent back."""
        return 0 if self.alone else self._load.received * self._row

    def make_plan(self, trace: MemoryTrace) -> None:
        """From the choices; kept until the backward of the layer."""
        trace.take(ROUTING, self.plan, ROUTING)

    def start(self, trace: MemoryTrace) -> None:
        """Sends the tokens, and takes the memory of the rows to be received."""
        if not self.alone:
            trace.take(COMMUNICATION, self._sent + self._pairs)
            trace.take(MLP, self.received, EXPERTS)

    def finish(self, trace: MemoryTrace) -> None:
        """Leaves the received rows."""
        if not self.alone:
            trace.free(COMMUNICATION, self._sent + self._pairs)

    def combine(self, trace: MemoryTrace) -> None:
        """From the sums, which stay, to the result, which is left as work space: the sums themselves where they are
        it."""
        if not self.alone:
            trace.take(COMMUNICATION, self._sent)
            self._sum(trace, WORK)
            trace.free(COMMUNICATION, self._sent)

    def combine_backward(self, trace: MemoryTrace) -> int:
        """From the gradient of the result, which stays, to that of the sums. Returns its bytes: 0 when it is the
        former."""
        if self.alone:
            return 0
        trace.take(COMMUNICATION, self._sent)
        trace.take(BACKWARD, self.received)
        trace.free(COMMUNICATION, self._sent)
        return self.received

    def finish_backward(self, trace: MemoryTrace) -> None:
        """Sends the gradient of the rows."""
        if not self.alone:
            trace.take(COMMUNICATION, self._sent)

    def start_backward(self, trace: MemoryTrace) -> None:
        """From the gradient of the rows to that of the tokens, which takes its place."""
        if not self.alone:
            self._sum(trace, BACKWARD)
            trace.free(COMMUNICATION, self._sent)
            trace.free(BACKWARD, self.received)
            trace.free(MLP, 0 if self._sizes.split_backward else self.received)

    def _sum(self, trace: MemoryTrace, kind: str) -> None:
        """Adds what came from the ranks, one after the other."""
        sizes, load = self._sizes, self._load
        total, halves = sizes.rows * sizes.h * FP32, sizes.e < FP32
        trace.take(WORK, total)
        trace.use(WORK, -(-load.sent // load.ranks) * sizes.h * FP32 if halves else 0)
        trace.use(WORK, sizes.hidden if halves else 0)
        trace.free(WORK, total)
        trace.take(kind, sizes.hidden)

    @property
    def _sent(self) -> int:
        return self._load.sent * self._row

    @property
    def _pairs(self) -> int:
        """Bytes of row and weight of each assignment, sent and received."""
        return (self._load.assigned * self._load.etp + self._load.worked) * (INT32 + FP32)
