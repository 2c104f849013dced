"""The memory of the feed-forward layer (core/transformer/mlp.py), event by event."""

from __future__ import annotations

from megatron.spec.memory.linear import LinearMemory
from megatron.spec.memory.trace import BACKWARD, MLP, MLP_ACT, MLP_FC2, WORK, MemoryTrace
from megatron.spec.mlp import SQUARED_RELU, MLPSpec
from megatron.spec.sizes import Sizes


class MLPMemory:
    """From the input of fc1 to the output of fc2.

    act_again: fc2 computes the activation again in its backward. again: the backward computes all but fc2 again. input_kind:
    of the memory that fc1 reads.
    """

    def __init__(self, spec: MLPSpec, sizes: Sizes, *, act_again: bool, again: bool, input_kind: str) -> None:
        self._spec, self._act_again, self._again = spec, act_again, again
        self.fc1 = LinearMemory(spec.linear_fc1, sizes, (input_kind, MLP), MLP_ACT)
        self._fc2 = LinearMemory(spec.linear_fc2, sizes, (MLP, WORK))

    def activate(self, trace: MemoryTrace) -> None:
        """From the output of fc1, which is kept, to the input of fc2. Squared ReLU keeps its first result instead."""
        inner = self._fc2.kept
        trace.take(MLP, inner, MLP_FC2)
        if self._spec.activation == SQUARED_RELU:
            trace.use(MLP, inner)

    def forward(self, trace: MemoryTrace) -> None:
        """From the output of fc1 to that of fc2, which is left as work space."""
        self.activate(trace)
        self._fc2.forward(trace)
        if self._act_again:
            trace.free(MLP, self._fc2.kept, MLP_FC2)
        if self._again:
            trace.free(MLP, self.fc1.out, MLP_ACT)
            trace.free(MLP, 0 if self._act_again else self._fc2.kept, MLP_FC2)

    def backward(self, trace: MemoryTrace, grad: int) -> None:
        """As LinearMemory's, from the output of fc2 to that of fc1."""
        if self._act_again:
            if not self._again:
                self.activate(trace)
            self._fc2.backward(trace, grad, self._activation_backward)
        else:
            self._fc2.backward(trace, grad)
            self._activation_backward(trace)

    def _activation_backward(self, trace: MemoryTrace) -> None:
        """From the gradient of the input of fc2 to that of the output of fc1. Frees the output of fc1."""
        inner = self._fc2.kept
        if self._spec.gated:
            trace.take(BACKWARD, 2 * inner)
            trace.use(WORK, 2 * inner)
        else:
            trace.take(BACKWARD, inner)
            if self._spec.activation == SQUARED_RELU:
                trace.use(WORK, 2 * inner)
        trace.free(BACKWARD, inner)
        trace.free(MLP, self.fc1.out)
