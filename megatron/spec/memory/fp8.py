"""The memory of quantized operands, event by event (kernels/ops/fp8).

A GPU quantizes in one pass over the operand, and multiplies the result. The CPU emulates: it rounds in fp32, and
multiplies in fp32 the numbers that the quantized ones stand for.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.spec.fp8_sizes import Fp8Sizes
from megatron.spec.memory.trace import WORK, MemoryTrace
from megatron.spec.sizes import FP32, MASK, Sizes


@dataclass(frozen=True)
class Fp8Work:
    """The products of one linear layer, or of one of all experts of a rank, with `fp8` and a microbatch of `sizes`."""

    sizes: Sizes
    fp8: Fp8Sizes
    weight: int  # elements

    def quantize(self, trace: MemoryTrace, kind: str, elements: int, directions: int = 1) -> int:
        """Takes, and returns, the bytes of an activation or gradient, quantized in one direction or in both."""
        size = self.fp8.operand(elements)
        for number in range(directions):
            if number == 0 or self.fp8.blocks:
                trace.use(WORK, self._rounding(elements))
            trace.take(kind, size)
        return directions * size

    def weights(self, trace: MemoryTrace) -> int:
        """Takes, and returns, the bytes of a weight that is not kept; a weight that is kept is quantized in its
        place."""
        trace.use(WORK, self._rounding(self.weight))
        size = 0 if self.fp8.keeps_weights else self.fp8.weight(self.weight)
        trace.take(WORK, size)
        return size

    def multiply(self, trace: MemoryTrace, first: int, second: int, out: int, picked: int = 0) -> None:
        """The product of operands of so many elements; the result, of `out` elements, has its memory already.

        picked: elements of the first operand's rows, some of which are taken several times; 0 if it is taken as it is.
        """
        if self.sizes.target.cpu:
            values = 3 if self.fp8.blocks else 2  # the numbers in fp32, their factors, the products of both
            trace.use(WORK, FP32 * values * first)
            trace.take(WORK, FP32 * first)
            if picked:
                trace.take(WORK, FP32 * picked)
                trace.free(WORK, FP32 * first)
                first = picked
            trace.use(WORK, FP32 * values * second)
            trace.take(WORK, FP32 * second)
            trace.use(WORK, FP32 * out)
            trace.free(WORK, FP32 * (first + second))

    def _rounding(self, elements: int) -> int:
        """Bytes of work space to quantize an operand in one direction."""
        if not self.sizes.target.cpu:
            return 0
        e = self.sizes.e
        copy = e if self.fp8.blocks else 0  # in whole blocks
        if e < FP32:
            return (copy + 2 * FP32) * elements  # converted, and times the scale
        return (copy + 2 * FP32 + MASK) * elements  # times the scale, magnitudes, and which are infinite
