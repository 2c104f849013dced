"""The memory of a linear layer (core/tensor_parallel/linear.py), event by event.

A column layer's input is gathered where sequence parallelism divides it, and gathered again in backward, so that only
the part is kept; a row layer's output is summed. Where halves are multiplied in fp32 (Target.wide) copies of the
operands and of the result exist for the time of the GEMM.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from megatron.spec.linear import COLUMN, REPLICATED, LinearSpec
from megatron.spec.memory.fp8 import Fp8Work
from megatron.spec.memory.trace import BACKWARD, COMMUNICATION, WORK, MemoryTrace
from megatron.spec.sizes import FP32, Sizes


@dataclass(frozen=True)
class LinearMemory:
    """kinds: the kinds of memory of its input, which it keeps, and of its output. reader: the part of the layer that
    saves the output.

    strided: the input's memory is not in the order of its dims, so that GEMMs take a copy.
    """

    spec: LinearSpec
    sizes: Sizes
    kinds: tuple[str, str]
    reader: str | None = None
    strided: bool = False

    @property
    def column(self) -> bool:
        """Its outputs are sharded, and not its inputs."""
        return self.spec.parallel == COLUMN

    @property
    def replicated(self) -> bool:
        """Every rank of tp holds it, and multiplies its part of the sequence."""
        return self.spec.parallel == REPLICATED

    @functools.cached_property
    def tokens(self) -> int:
        """Tokens that are multiplied."""
        return self.sizes.rows if self.replicated else self.sizes.tokens

    @functools.cached_property
    def inputs(self) -> int:
        """Input features of this rank."""
        return self.spec.local_features(self.sizes.tp)[0]

    @functools.cached_property
    def outputs(self) -> int:
        """Output features of this rank."""
        return self.spec.local_features(self.sizes.tp)[1]

    @functools.cached_property
    def out(self) -> int:
        """Bytes of the result."""
        return self.tokens * self.outputs * self.sizes.e

    @functools.cached_property
    def kept(self) -> int:
        """Bytes of the input as it is kept."""
        rows = self.sizes.rows if self.column else self.tokens
        return rows * self.inputs * self.sizes.e

    @functools.cached_property
    def gathered(self) -> int:
        """Bytes of a column layer's input once sequence parallelism has gathered it; 0 without it."""
        return self.sizes.tokens * self.inputs * self.sizes.e if self.column and self.sizes.sp > 1 else 0

    @property
    def frees_input(self) -> bool:
        """Whether its backward frees the input as it is kept; else the weight gradient needs it later."""
        return not self.sizes.split_backward or self.gathered > 0

    def forward(self, trace: MemoryTrace) -> None:
        """Its input, which it keeps, is in use already. Leaves the output; a row layer's, summed, as work space."""
        trace.take(COMMUNICATION, self.gathered)
        if self._fp8 is None:
            self._gemm(trace, self.inputs, self.outputs, self.out)
        else:
            self._fp8_output(trace, self._fp8)
        trace.free(COMMUNICATION, self.gathered)
        if self._narrow:  # the layer's own output, the adapters' and their parts or the sum
            trace.take(self.kinds[0], self._narrow)
            trace.use(WORK, 3 * self.out)
        if self.column or self.replicated:
            trace.take(self.kinds[1], self.out, self.reader)
            return
        trace.take(WORK, self.out)
        if self.sizes.sp > 1:
            self._scatter(trace, WORK)
        elif self.spec.has_bias and self.sizes.tp > 1:
            trace.use(WORK, self.out)

    def backward(
        self, trace: MemoryTrace, grad: int | None = None, then: Callable[[MemoryTrace], None] = lambda trace: None
    ) -> None:
        """From the gradient of the output, of `grad` bytes (those of the output by default, 0 when it belongs to
        another), to the gradient of the input, which takes its place. Frees the input.

        `then`: what the layer's backward goes on with before it returns (GEMM-last).
        """
        grad = self.out if grad is None else grad
        sizes = self.sizes
        around = 0
        if sizes.sp > 1 and not self.replicated:
            around = self.gathered if self.column else self.out  # the input, or the gradient, whole
            trace.take(COMMUNICATION, around)
        whole, quantized = self.tokens * self.inputs * sizes.e, 0
        trace.take(BACKWARD, self.kept if self._narrow else 0)  # the input's gradient from the adapters
        if self._fp8 is None:
            self._gemm(trace, self.outputs, self.inputs, whole)
            trace.take(BACKWARD, whole)
        else:
            quantized = self._fp8_input_grad(trace, self._fp8, whole)
        scattered, part = self.column and sizes.sp > 1, whole // sizes.sp
        if scattered:
            trace.take(COMMUNICATION, part + (whole if sizes.target.cpu else 0))
        if not self.sizes.split_backward:
            self._weight_grad(trace)
        if scattered:
            trace.use(WORK, part if sizes.target.cpu else 0)  # the sum, before it is rounded
            trace.free(BACKWARD, whole - part)
            trace.take(COMMUNICATION, whole - part)
        trace.free(BACKWARD, self.kept if self._narrow else 0)
        trace.free(self.kinds[0], self._narrow)
        then(trace)
        if scattered:
            trace.free(COMMUNICATION, whole + (whole if sizes.target.cpu else 0))
        trace.free(BACKWARD, quantized)
        if self.sizes.split_backward:
            self._defer(trace, around)
        else:
            trace.free(self.kinds[0], self.kept)
            trace.free(COMMUNICATION, around)
        if not self.sizes.split_backward or (around and not self.column):
            trace.free(BACKWARD, grad)

    def _defer(self, trace: MemoryTrace, around: int) -> None:
        """The operands of the weight gradient stay for it: the input and the gradient, both whole."""
        trace.free(COMMUNICATION, around)
        if around and self.column:
            trace.free(self.kinds[0], self.kept)
            trace.take(self.kinds[0], around)
        elif around:
            trace.take(BACKWARD, around)

    def _gemm(self, trace: MemoryTrace, inputs: int, outputs: int, out: int) -> None:
        """Work space of x [tokens, inputs] times a matrix, including the result."""
        tokens = self.tokens
        if self.sizes.target.wide:
            operands = FP32 * (tokens * inputs + inputs * outputs)
            result = FP32 * tokens * outputs
            trace.use(WORK, result + max(operands, out))
        elif self.strided and inputs == self.inputs and self.sizes.b > 1:
            trace.use(WORK, tokens * inputs * self.sizes.e + out)
        else:
            trace.use(WORK, out)

    def _fp8_output(self, trace: MemoryTrace, fp8: Fp8Work) -> None:
        """Work space of the FP8 product that computes the layer's output, including the result."""
        tokens, inputs, outputs = self.tokens, self.inputs, self.outputs
        held = fp8.weights(trace)
        trace.take(WORK, self.out + self._copy)
        quantized = fp8.quantize(trace, WORK, tokens * inputs)
        fp8.multiply(trace, tokens * inputs, inputs * outputs, tokens * outputs)
        trace.free(WORK, held + self.out + self._copy + quantized)

    def _fp8_input_grad(self, trace: MemoryTrace, fp8: Fp8Work, whole: int) -> int:
        """Takes the gradient of the input, of `whole` bytes, and the quantized gradient of the output, whose bytes it
        returns."""
        tokens, inputs, outputs = self.tokens, self.inputs, self.outputs
        directions = 2 if fp8.fp8.weight_grads and not self.sizes.split_backward else 1
        quantized = fp8.quantize(trace, BACKWARD, tokens * outputs, directions)
        held = 0 if fp8.fp8.keeps_weights else fp8.weights(trace)
        trace.take(BACKWARD, whole)
        fp8.multiply(trace, tokens * outputs, inputs * outputs, tokens * inputs)
        trace.free(WORK, held)
        return quantized

    def _fp8_weight_grad(self, trace: MemoryTrace, fp8: Fp8Work) -> None:
        tokens, inputs, outputs = self.tokens, self.inputs, self.outputs
        quantized = fp8.quantize(trace, WORK, tokens * inputs)
        # Where cuBLASLt adds it, which set-up finds out on the GPU, there is none.
        product = FP32 * inputs * outputs if fp8.fp8.accumulates and not self.sizes.target.cpu else 0
        trace.take(WORK, product)
        fp8.multiply(trace, tokens * outputs, tokens * inputs, inputs * outputs)
        trace.free(WORK, quantized + product)

    @functools.cached_property
    def _fp8(self) -> Fp8Work | None:
        fp8 = self.sizes.fp8
        return None if fp8 is None else Fp8Work(self.sizes, fp8, self.inputs * self.outputs)

    @functools.cached_property
    def _copy(self) -> int:
        """Bytes of a copy of the input in the order that products need."""
        return self.tokens * self.inputs * self.sizes.e if self.strided and self.sizes.b > 1 else 0

    @functools.cached_property
    def _narrow(self) -> int:
        """Bytes that adapters keep: their inputs' products of `rank` channels for every projection."""
        lora = self.sizes.lora
        if lora is None:
            return 0
        adapted = sum(projection.name in lora.projections for projection in self.spec.projections)
        return self.tokens * lora.rank * adapted * self.sizes.e

    def _weight_grad(self, trace: MemoryTrace) -> None:
        if self.sizes.lora is not None:  # it is frozen
            return
        tokens, e, elements = self.tokens, self.sizes.e, self.inputs * self.outputs
        total = self.sizes.grad_sum(elements)
        trace.take(WORK, self._copy + total)
        if self._fp8 is not None and self._fp8.fp8.weight_grads:
            self._fp8_weight_grad(trace, self._fp8)
        elif not self.sizes.fused_weight_grad or (self.sizes.target.cpu and e < FP32 and not self.sizes.target.wide):
            trace.use(WORK, self.inputs * self.outputs * e)
        elif self.sizes.target.wide:
            trace.use(WORK, FP32 * tokens * (self.inputs + self.outputs))
        trace.free(WORK, self._copy)
        trace.use(WORK, self.sizes.grad_bits(elements, in_columns=not self.column and self.sizes.tp > 1))
        trace.free(WORK, total)

    def _scatter(self, trace: MemoryTrace, kind: str) -> None:
        """The result becomes this rank's part of its sum."""
        part = self.out // self.sizes.sp
        trace.take(kind, part)
        if self.sizes.target.cpu:  # the chunks of all ranks are received and summed here
            trace.use(COMMUNICATION, self.out)
        trace.free(kind, self.out)
