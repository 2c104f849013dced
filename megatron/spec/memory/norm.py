"""The memory of a normalization layer (core/transformer/norm.py), event by event."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.spec.memory.trace import BACKWARD, NORMS, WORK, MemoryTrace
from megatron.spec.norm import RMS_NORM, NormSpec
from megatron.spec.sizes import FP32, Sizes


@dataclass(frozen=True)
class NormMemory:
    """A norm of the residual stream. part: the one that its statistics count to; reader: the one that saves its output."""

    spec: NormSpec
    sizes: Sizes
    part: str | None = None
    reader: str | None = None

    @property
    def rms(self) -> bool:
        """RMSNorm, and not LayerNorm."""
        return self.spec.kind == RMS_NORM

    @property
    def copies(self) -> bool:
        """LayerNorm in another dtype than its input's keeps a copy of that, and not the input itself."""
        return not self.rms and self.sizes.r != self.sizes.e

    @property
    def out(self) -> int:
        """Bytes of its output."""
        return self.sizes.hidden

    @property
    def statistics(self) -> int:
        """Bytes that it keeps besides its input."""
        return self.kept_input + self._row_statistics

    @property
    def kept_input(self) -> int:
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
        if self.rms:
            converted = fp32 if half and not self._fp32_input else 0
            trace.use(WORK, converted + fp32 + (fp32 if not half else max(fp32, self.out)) - (0 if half else fp32))
        trace.take(NORMS, self.statistics, self.part)
        trace.take(NORMS, self.out, self.reader)

    def forget(self, trace: MemoryTrace) -> None:
        """Free the tensors that can be computed again from the input or its copy."""
        trace.free(NORMS, self._row_statistics, self.part)
        trace.free(NORMS, self.out, self.reader)

    def again(self, trace: MemoryTrace) -> None:
        """As `forward`, after `forget`."""
        self.forward(trace)
        trace.free(NORMS, self.kept_input)

    def backward(self, trace: MemoryTrace) -> None:
        """From the gradient of its output to that of its input, which takes its place. Frees the statistics."""
        grad_in, fp32 = self.sizes.residual, self.sizes.rows * self.spec.size * FP32
        if self.rms:
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


def row_statistics(spec: NormSpec, sizes: Sizes) -> int:
    """Bytes per normalised row: RMSNorm's factor, or LayerNorm's mean and factor."""
    if spec.kind == RMS_NORM:
        return FP32
    return 2 * (sizes.e if sizes.target.cpu else FP32)


def shifted_weight(spec: NormSpec, sizes: Sizes) -> int:
    """Bytes of the sum of one and the parameter, where that is the weight."""
    return spec.size * sizes.e if spec.zero_centered else 0
