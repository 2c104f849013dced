"""What a linear layer takes and frees: core/tensor_parallel/linear.py, event by event.

A column layer's input is gathered where sequence parallelism cuts it, and gathered again in backward, so that only the
part is kept; a row layer's output is summed. Where halves are multiplied in fp32 (Target.wide) copies of the operands
and of the product exist for the time of the product.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megatron.planner.sizes import BACKWARD, COMMUNICATION, FP32, WORK, Sizes
from megatron.planner.tally import Tally


@dataclass(frozen=True)
class LinearMemory:
    """inputs, outputs: features here, /tp where sharded. kinds: of its input, which it keeps, and of its output.

    put_off: the weight gradient is taken later (split backward), so its operands wait for it. fusion: it is accumulated by
    its product. strided: the input's memory is not in the order of its dims, so that products take a copy.
    """

    sizes: Sizes
    kinds: tuple[str, str]
    inputs: int
    outputs: int
    column: bool
    fusion: bool
    bias: bool
    strided: bool = False
    put_off: bool = False

    @property
    def out(self) -> int:
        """Bytes of the product."""
        return self.sizes.tokens * self.outputs * self.sizes.e

    @property
    def kept(self) -> int:
        """Bytes of the input as it is kept."""
        rows = self.sizes.rows if self.column else self.sizes.tokens
        return rows * self.inputs * self.sizes.e

    @property
    def gathered(self) -> int:
        """Bytes of what sequence parallelism gathers before the product of a column layer; 0 without it."""
        return self.sizes.tokens * self.inputs * self.sizes.e if self.column and self.sizes.sp > 1 else 0

    def forward(self, tally: Tally) -> None:
        """Its input, which it keeps, is in use already. Leaves the output; a row layer's, summed, as work space."""
        tally.take(COMMUNICATION, self.gathered)
        self._product(tally, self.inputs, self.outputs, self.out)
        tally.free(COMMUNICATION, self.gathered)
        if self.column:
            tally.take(self.kinds[1], self.out)
            return
        tally.take(WORK, self.out)
        if self.sizes.sp > 1:
            self._scatter(tally, WORK)
        elif self.bias and self.sizes.tp > 1:
            tally.brief(WORK, self.out)

    def backward(
        self, tally: Tally, grad: int | None = None, then: Callable[[Tally], None] = lambda tally: None
    ) -> None:
        """From the gradient of the output, of `grad` bytes (those of the output by default, 0 when somebody else owns
        it), to the gradient of the input, which takes its place. Frees the input.

        `then`: what the layer's backward goes on with before it returns (GEMM-last).
        """
        grad = self.out if grad is None else grad
        sizes = self.sizes
        around = 0
        if sizes.sp > 1:
            around = self.gathered if self.column else self.out  # the input, or the gradient, whole
            tally.take(COMMUNICATION, around)
        whole = sizes.tokens * self.inputs * sizes.e
        self._product(tally, self.outputs, self.inputs, whole)
        tally.take(BACKWARD, whole)
        scattered = self.column and sizes.sp > 1
        if scattered:
            tally.take(COMMUNICATION, sizes.hidden + (whole if sizes.target.cpu else 0))
        if not self.put_off:
            self._weight_grad(tally)
        if scattered:
            tally.brief(WORK, sizes.hidden if sizes.target.cpu else 0)  # the sum, before it is rounded
            tally.free(BACKWARD, whole - sizes.hidden)
            tally.take(COMMUNICATION, whole - sizes.hidden)
        then(tally)
        if scattered:
            tally.free(COMMUNICATION, whole + (whole if sizes.target.cpu else 0))
        if self.put_off:
            self._wait(tally, around)
        else:
            tally.free(self.kinds[0], self.kept)
            tally.free(COMMUNICATION, around)
        if not self.put_off or (around and not self.column):
            tally.free(BACKWARD, grad)

    def _wait(self, tally: Tally, around: int) -> None:
        """The operands of the weight gradient stay: the input and the gradient, both whole."""
        tally.free(COMMUNICATION, around)
        if around and self.column:
            tally.free(self.kinds[0], self.kept)
            tally.take(self.kinds[0], around)
        elif around:
            tally.take(BACKWARD, around)

    def _product(self, tally: Tally, inputs: int, outputs: int, out: int) -> None:
        """Work space of x [tokens, inputs] times a matrix, beside the result."""
        tokens = self.sizes.tokens
        if self.sizes.target.wide:
            operands = FP32 * (tokens * inputs + inputs * outputs)
            product = FP32 * tokens * outputs
            tally.brief(WORK, product + max(operands, out))
        elif self.strided and inputs == self.inputs and self.sizes.b > 1:
            tally.brief(WORK, tokens * inputs * self.sizes.e + out)
        else:
            tally.brief(WORK, out)

    def _weight_grad(self, tally: Tally) -> None:
        tokens, e = self.sizes.tokens, self.sizes.e
        if self.strided and self.sizes.b > 1:
            tally.take(WORK, tokens * self.inputs * e)
        if not self.fusion or (self.sizes.target.cpu and e < FP32 and not self.sizes.target.wide):
            tally.brief(WORK, self.inputs * self.outputs * e)
        elif self.sizes.target.wide:
            tally.brief(WORK, FP32 * tokens * (self.inputs + self.outputs))
        if self.strided and self.sizes.b > 1:
            tally.free(WORK, tokens * self.inputs * e)

    def _scatter(self, tally: Tally, kind: str) -> None:
        """A product becomes this rank's part of its sum."""
        part = self.out // self.sizes.sp
        tally.take(kind, part)
        if self.sizes.target.cpu:  # pieces of all ranks are received and summed here
            tally.brief(COMMUNICATION, self.out)
        tally.free(kind, self.out)
