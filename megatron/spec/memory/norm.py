"""The memory of a normalization layer (core/transformer/norm.py), event by event."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.spec.memory.linear import LinearMemory
from megatron.spec.memory.trace import BACKWARD, NORMS, RESIDUAL, WORK, MemoryTrace
from megatron.spec.norm import RMS_NORM, NormSpec
from megatron.spec.sizes import FP32, Sizes


@dataclass(frozen=True)
class NormMemory:
    """A norm of the residual stream. part: the one that its statistics count to; reader: the one that saves its output.

    deferred: the linear layer behind it applies it, and again in backward (GEMM-last).
    """

    spec: NormSpec
    sizes: Sizes
    part: str | None = None
    reader: str | None = None
    deferred: bool = False

    @property
    def kind(self) -> str:
        """The kind of the memory that the linear layer behind it reads."""
        return NORMS

    @property
    def rms(self) -> bool:
        """RMSNorm, and not LayerNorm."""
        return self.spec.kind == RMS_NORM

    @property
    def copies(self) -> bool:
        """LayerNorm in another dtype than its input's keeps a copy of that, and not the input itself."""
        return not self.rms and self.sizes.r != self.sizes.e

    @property
    def keeps_stream(self) -> bool:
        """Whether it keeps the residual stream itself, until its backward."""
        return not self.copies

    @property
    def out(self) -> int:
        """Bytes of its output."""
        return self.sizes.hidden

    @property
    def statistics(self) -> int:
        """Bytes that it keeps besides its input."""
        return self.saved_input + self._row_statistics

    @property
    def saved_input(self) -> int:
        """Bytes from which the rest can be computed again, besides the input: its copy and the weight."""
        return self._copied + shifted_weight(self.spec, self.sizes)

    @property
    def _copied(self) -> int:
        return self.out if self.copies else 0

    @property
    def _row_statistics(self) -> int:
        return self.sizes.rows * row_statistics(self.spec, self.sizes)

    def forward(self, trace: MemoryTrace) -> None:
        """Leaves its statistics and its output."""
        half = self.sizes.e < FP32
        fp32 = self.sizes.rows * self.spec.size * FP32
        if self.rms and not self.sizes.target.fused:
            converted = fp32 if half and not self._fp32_input else 0
            trace.use(WORK, converted + fp32 + (fp32 if not half else max(fp32, self.out)) - (0 if half else fp32))
        trace.take(NORMS, self.statistics, self.part)
        trace.take(NORMS, self.out, self.reader)

    def forward_over(self, trace: MemoryTrace) -> None:
        """After the forward of the linear layer behind it: if deferred, only the input or its copy is still needed."""
        if self.deferred:
            trace.free(NORMS, self._row_statistics, self.part)
            trace.free(NORMS, self.out, self.reader)

    def backward_behind(self, linears: Sequence[LinearMemory], trace: MemoryTrace) -> None:
        """The backward of the linear layers behind it, the last one first, and its own."""
        if not self.deferred:
            linears_backward(linears, trace)
            self.backward(trace)
            return
        for place, linear in reversed(list(enumerate(linears))):
            self.forward(trace)
            if place == 0:
                trace.free(NORMS, self.saved_input)
            linear.backward(trace, then=self.backward)
            if place < len(linears) - 1:  # added to the gradient that there is
                trace.free(BACKWARD, self.sizes.residual)

    def backward(self, trace: MemoryTrace) -> None:
        """From the gradient of its output to that of its input, which takes its place. Frees the statistics."""
        grad_in, fp32 = self.sizes.residual, self.sizes.rows * self.spec.size * FP32
        if self.rms and self.sizes.target.fused:
            trace.take(BACKWARD, grad_in)
        elif self.rms:
            converted = fp32 if self.sizes.e < FP32 else 0  # of the gradient
            # The input in fp32, until it is normalised.
            widened = fp32 if self.sizes.e < FP32 and not self._fp32_input else 0
            rounded = 0 if grad_in == fp32 else grad_in
            trace.use(WORK, converted + max(widened + fp32, 3 * fp32 + rounded))
            trace.take(BACKWARD, grad_in)
        else:
            trace.take(BACKWARD, self._copied)
            trace.take(BACKWARD, grad_in)
            trace.free(BACKWARD, self._copied)
        trace.free(NORMS, self.statistics)
        trace.free(BACKWARD, self.out)

    @property
    def _fp32_input(self) -> bool:
        return self.sizes.r == FP32


@dataclass(frozen=True)
class NoNormMemory:
    """Stands for a norm that a layer does not have: the linear layer `part` reads the residual stream itself, or a copy
    in its own dtype, and saves what it reads. See NormMemory for the methods."""

    sizes: Sizes
    part: str

    deferred, keeps_stream, saved_input = False, False, 0

    @property
    def copies(self) -> bool:
        """Whether the linear layer reads a copy, so that nothing keeps the residual stream itself."""
        return self.sizes.r != self.sizes.e

    @property
    def kind(self) -> str:
        """The kind of the memory that the linear layer reads."""
        return NORMS if self.copies else RESIDUAL

    def forward(self, trace: MemoryTrace) -> None:
        """Leaves the copy, if there is one."""
        trace.take(NORMS, self.sizes.hidden if self.copies else 0, self.part)

    def forward_over(self, trace: MemoryTrace) -> None:
        """Nothing more is left."""

    def backward_behind(self, linears: Sequence[LinearMemory], trace: MemoryTrace) -> None:
        """The backward of the linear layers, the last one first, and of the copy."""
        linears_backward(linears, trace)
        self.backward(trace)

    def backward(self, trace: MemoryTrace) -> None:
        """The backward of the copy."""
        if self.copies:
            trace.take(BACKWARD, self.sizes.residual)
            trace.free(BACKWARD, self.sizes.hidden)


@dataclass(frozen=True)
class SharedNormMemory:
    """Stands for the norm before an MLP that reads the output of the norm before attention, which that one leaves. See
    NormMemory for the methods."""

    sizes: Sizes

    part, kind = None, NORMS
    deferred, keeps_stream, copies, saved_input = False, False, False, 0

    def forward(self, trace: MemoryTrace) -> None:
        """Leaves nothing."""

    def forward_over(self, trace: MemoryTrace) -> None:
        """Nothing more is left."""

    def backward_behind(self, linears: Sequence[LinearMemory], trace: MemoryTrace) -> None:
        """The backward of the linear layers, the last one first. Attention still needs their input."""
        linears_backward(linears, trace)
        if linears[0].frees_input:
            self.backward(trace)

    def backward(self, trace: MemoryTrace) -> None:
        """The input that the linear layer of the MLP has freed is still there."""
        trace.take(NORMS, self.sizes.hidden)


BeforeMemory = NormMemory | NoNormMemory | SharedNormMemory  # between the residual stream and a part of the layer


@dataclass(frozen=True)
class PostNormMemory:
    """A norm of the output of attention or of the MLP, which it keeps. part: the one that it counts to."""

    spec: NormSpec
    sizes: Sizes
    part: str

    def forward(self, trace: MemoryTrace) -> None:
        """Its input is work space, and so is the output that it leaves. The input is kept as bytes of norms."""
        self._norm.forward(trace)

    def backward(self, trace: MemoryTrace, grad: int) -> int:
        """From the gradient of its output, of `grad` bytes (0 when it belongs to another), to that of its input, which
        takes its place and whose bytes are returned. Frees the input."""
        self._norm.backward(trace)
        trace.free(NORMS, self._norm.out)
        if not grad:
            trace.take(BACKWARD, self._norm.out)
        return self._norm.out

    @property
    def _norm(self) -> NormMemory:
        """Such a norm of a stream in the dtype of the activations. It leaves as many bytes: of its output, not its
        input."""
        return NormMemory(self.spec, dataclasses.replace(self.sizes, r=self.sizes.e), self.part, self.part)


def linears_backward(linears: Sequence[LinearMemory], trace: MemoryTrace) -> None:
    """The backward of linear layers that read one input, the last one first: their gradients of it are added."""
    for place, linear in reversed(list(enumerate(linears))):
        if place and linear.frees_input:
            trace.take(linear.kinds[0], linear.kept)  # which the others still need
        linear.backward(trace)
        if place < len(linears) - 1:
            trace.free(BACKWARD, linear.sizes.hidden)


def row_statistics(spec: NormSpec, sizes: Sizes) -> int:
    """Bytes per normalised row: RMSNorm's factor, or LayerNorm's mean and factor."""
    if spec.kind == RMS_NORM:
        return FP32
    return 2 * (sizes.e if sizes.target.cpu else FP32)


def shifted_weight(spec: NormSpec, sizes: Sizes) -> int:
    """Bytes of the sum of one and the parameter, where that is the weight."""
    return spec.local_channels(sizes.tp) * sizes.e if spec.zero_centered else 0
