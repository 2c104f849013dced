"""The time of one microbatch in a pipeline stage: forward, input gradients and weight gradients, by part."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from megatron.planner.time.constants import Number

# Parts of a microbatch's time. tp, cp, ep, dp: communication that is not overlapped. interference: the computation that
# is slower because of the overlapped one. host: waiting for the host to queue kernels. offload: waiting
# for copies to or from host memory.
GEMM, ATTENTION, MEMORY, RECOMPUTE, HOST = "gemm", "attention", "memory", "recompute", "host"
INTERFERENCE, TP, CP, EP, DP, OFFLOAD = "interference", "tp", "cp", "ep", "dp", "offload"
# Parts of a step outside of its microbatches. pp: messages between stages that are not overlapped. bubble: waiting for
# other pipeline ranks. step: a fixed time. straggler: waiting for the slowest node.
PP, BUBBLE, OPTIMIZER, STEP, STRAGGLER = "pp", "bubble", "optimizer", "step", "straggler"
STAGE_PARTS = (GEMM, ATTENTION, MEMORY, RECOMPUTE, HOST, INTERFERENCE, TP, CP, EP, DP, OFFLOAD)


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
