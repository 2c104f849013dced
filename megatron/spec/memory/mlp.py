"""The memory of the feed-forward layer (core/transformer/mlp.py), event by event."""

from __future__ import annotations

import dataclasses

from megatron.config.recompute import MLP_ACT as ACT_AGAIN
from megatron.config.recompute import WHOLE_MLP
from megatron.spec.memory.linear import LinearMemory
from megatron.spec.memory.norm import BeforeMemory
from megatron.spec.memory.trace import BACKWARD, MLP, MLP_ACT, MLP_FC2, MLP_NORM, NORMS, WORK, MemoryTrace
from megatron.spec.mlp import SQUARED_RELU, XIELU, MLPSpec, activation_copies
from megatron.spec.sizes import Sizes


class ChunkedMemory:
    """An MLP that is computed for some tokens at a time, and again in backward, and the norm before it."""

    def __init__(self, spec: MLPSpec, sizes: Sizes, norm: BeforeMemory) -> None:
        self._sizes, self._norm = sizes, norm
        self._chunk = sizes.chunk(sizes.mlp_chunk)
        self._norm_of_chunk = dataclasses.replace(norm, sizes=self._chunk)
        self._mlp = MLPMemory(spec, self._chunk, recompute_act=False, recompute=True, input_kind=norm.kind)
        self.keeps_stream = norm.keeps_stream or norm.deferred
        self.frees_gradient = False

    def forward(self, trace: MemoryTrace) -> None:
        """See DenseMemory."""
        norm = self._norm_of_chunk
        if not norm.deferred:
            self._norm.forward(trace)
        trace.take(WORK, self._sizes.hidden)  # the output
        if norm.deferred:
            norm.forward(trace)
        self._mlp.fc1.forward(trace)
        norm.forward_over(trace)
        self._mlp.forward(trace)
        if norm.deferred:
            trace.free(NORMS, norm.saved_input, MLP_NORM)
        trace.free(WORK, self._chunk.hidden)  # the output of a chunk

    def backward(self, trace: MemoryTrace, grad: int) -> None:
        """See DenseMemory."""
        sizes, chunk, norm, fc1 = self._sizes, self._chunk, self._norm_of_chunk, self._mlp.fc1
        several = chunk.s < sizes.s
        of_input = sizes.residual if norm.deferred else sizes.hidden
        of_chunk = chunk.residual if norm.deferred else chunk.hidden
        trace.take(BACKWARD, of_input if several else 0)
        if norm.deferred:
            norm.forward(trace)
        fc1.forward(trace)
        norm.forward_over(trace)
        self._mlp.activate(trace)
        trace.take(WORK, chunk.hidden)  # the output, whose values are undefined
        self._mlp.backward(trace, 0)
        if norm.deferred:
            norm.backward_behind((fc1,), trace)
        else:
            fc1.backward(trace)
            trace.take(fc1.kinds[0], fc1.kept)  # a part of the input of all tokens, which is freed below
        trace.free(WORK, chunk.hidden)
        trace.free(BACKWARD, of_chunk if several else 0)
        trace.free(BACKWARD, grad)
        if not norm.deferred:
            trace.free(fc1.kinds[0], sizes.hidden)
            self._norm.backward(trace)


class DenseMemory:
    """An MLP and the norm before it. modules: parts that are computed again in backward."""

    def __init__(self, spec: MLPSpec, sizes: Sizes, norm: BeforeMemory, modules: frozenset[str]) -> None:
        self._norm, self._recompute = norm, WHOLE_MLP in modules
        self._mlp = MLPMemory(
            spec, sizes, recompute_act=ACT_AGAIN in modules, recompute=self._recompute, input_kind=norm.kind
        )
        # A region of norm and MLP keeps its input alone, which is the residual stream.
        self.keeps_stream = norm.keeps_stream or (norm.deferred and self._recompute)
        self.frees_gradient = False

    def forward(self, trace: MemoryTrace) -> None:
        """From the residual stream to the output of fc2, which is left as work space."""
        self._first_half(trace)
        self._mlp.forward(trace)
        if self._norm.deferred and self._recompute:
            trace.free(NORMS, self._norm.saved_input, MLP_NORM)

    def backward(self, trace: MemoryTrace, grad: int) -> None:
        """From the gradient of the output, of `grad` bytes (0 when it belongs to another), to that of the residual
        stream, which takes its place."""
        if self._recompute:
            if self._norm.deferred:
                self._first_half(trace)
            else:
                self._mlp.fc1.forward(trace)
            self._mlp.activate(trace)
        self._mlp.backward(trace, grad)
        self._norm.backward_behind((self._mlp.fc1,), trace)

    def _first_half(self, trace: MemoryTrace) -> None:
        self._norm.forward(trace)
        self._mlp.fc1.forward(trace)
        self._norm.forward_over(trace)


class MLPMemory:
    """From the input of fc1 to the output of fc2.

    recompute_act: whether fc2 computes the activation again in its backward. recompute: whether the backward computes
    all but fc2 again. input_kind: the kind of the memory that fc1 reads. parts: the names under which the outputs of
    fc1 and of the activation are saved.
    """

    def __init__(
        self,
        spec: MLPSpec,
        sizes: Sizes,
        *,
        recompute_act: bool,
        recompute: bool,
        input_kind: str,
        parts: tuple[str, str] = (MLP_ACT, MLP_FC2),
    ) -> None:
        self._spec, self._recompute_act, self._recompute, self._parts = spec, recompute_act, recompute, parts
        self._fused = sizes.target.fused
        self.fc1 = LinearMemory(spec.linear_fc1, sizes, (input_kind, MLP), parts[0])
        self._fc2 = LinearMemory(spec.linear_fc2, sizes, (MLP, WORK))

    def activate(self, trace: MemoryTrace) -> None:
        """From the output of fc1, which is kept, to the input of fc2. Squared ReLU keeps its first result instead."""
        inner = self._fc2.kept
        trace.take(MLP, inner, self._parts[1])
        if self._spec.gated:
            trace.use(WORK, activation_copies(self._spec.activation, self._spec.gate, backward=False) * inner)
        if self._spec.activation == SQUARED_RELU:
            trace.use(MLP, inner)
        if self._spec.activation == XIELU:
            trace.use(WORK, inner)

    def forward(self, trace: MemoryTrace) -> None:
        """From the output of fc1 to that of fc2, which is left as work space."""
        self.activate(trace)
        self._fc2.forward(trace)
        if self._recompute_act:
            trace.free(MLP, self._fc2.kept, self._parts[1])
        if self._recompute:
            trace.free(MLP, self.fc1.out, self._parts[0])
            trace.free(MLP, 0 if self._recompute_act else self._fc2.kept, self._parts[1])

    def backward(self, trace: MemoryTrace, grad: int) -> None:
        """As LinearMemory's, from the output of fc2 to that of fc1."""
        if self._recompute_act:
            if not self._recompute:
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
            copies = activation_copies(self._spec.activation, self._spec.gate, backward=True)
            trace.use(WORK, 0 if self._fused and copies == 2 else copies * inner)
        else:
            trace.take(BACKWARD, inner)
            if self._spec.activation == SQUARED_RELU:
                trace.use(WORK, 2 * inner)
            if self._spec.activation == XIELU:
                trace.use(WORK, inner)
        trace.free(BACKWARD, inner)
        trace.free(MLP, self.fc1.out)
