"""The products of one linear layer of all experts in FP8: output, and gradient of the input.

The matrices [E, out, in] are quantized as one matrix [E * out, in]: with one scale for the whole weight, or one per
block. So blocks of 128 rows lie within an expert where `out` is a multiple of 128.

Rows that are picked for several experts are quantized once, and picked by the product. So a magnitude of theirs is also
that of rows that no expert takes.

The gradient of the weight sums over the rows of an expert, which begin and end anywhere, so that blocks of 128 rows
would hold rows of several experts. It is not taken in FP8.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from megatron.kernels.ops.assignments import Assignments, Picked, gather
from megatron.kernels.ops.fp8.operands import Operand, Operands
from megatron.kernels.ops.fp8.quantize import Quantized, dequantize
from megatron.kernels.ops.fp8.weight import QuantizedWeight


class ExpertStack(NamedTuple):
    """The quantized matrices of `experts` experts, contiguous along their last dimension, which a product sums over.

    quantized: [E * out, in]; or, if `transposed`, [in, E * out], which holds the matrices [in, out] side by side.
    """

    quantized: Quantized
    experts: int
    transposed: bool

    def by_expert(self, flat: Tensor) -> Tensor:
        """A tensor with the rows and columns of the matrices or of their blocks -> [E, rows, columns], a view."""
        if self.transposed:
            return flat.unflatten(1, (self.experts, -1)).transpose(0, 1)
        return flat.unflatten(0, (self.experts, -1))


class GroupedProduct(Protocol):
    """Multiplies rows by the matrices of their experts, in fp32 with one rounding."""

    def __call__(
        self, a: Quantized, picked: Tensor | None, b: ExpertStack, out: Tensor, assignments: Assignments
    ) -> None:
        """a [M, k], matrices [n, k] -> out [A, n], of which every row is written. A is not 0.

        picked: rows of a, [A] int64; None for all of them, in their order.
        """
        ...


def emulated(a: Quantized, picked: Tensor | None, b: ExpertStack, out: Tensor, assignments: Assignments) -> None:
    """See GroupedProduct: on any device, in fp32, of the numbers that the quantized ones stand for."""
    values = Picked(dequantize(a), picked).gathered(gather)
    matrices = b.by_expert(dequantize(b.quantized))
    sizes = list(assignments.sizes)
    for value, matrix, result in zip(values.split(sizes), matrices, out.split(sizes), strict=True):
        if len(value):
            result.copy_(torch.mm(value, matrix.t()))


class Fp8Grouped:
    """See GroupedLinear. It belongs to one layer, whose scales `operands` holds.

    keep_weight: see QuantizedWeight. Operands may communicate once per call, also in a call without rows.
    """

    def __init__(self, operands: Operands, product: GroupedProduct, *, keep_weight: bool) -> None:
        self._operands, self._product = operands, product
        self.weight = QuantizedWeight(operands.weight, lambda both: both, keep=keep_weight)

    def forget(self) -> None:
        """Drops the quantized weight. Call it whenever the weight has changed."""
        self.weight.forget()

    def output(self, values: Picked, weight: Tensor, assignments: Assignments) -> Tensor:
        """See GroupedLinear."""
        return self._multiply(self._operands.input, values, weight, assignments, transposed=False)

    def input_grad(self, grads: Picked, weight: Tensor, assignments: Assignments) -> Tensor:
        """See GroupedLinear."""
        return self._multiply(self._operands.gradient, grads, weight, assignments, transposed=True)

    def _multiply(
        self, operand: Operand, rows: Picked, weight: Tensor, assignments: Assignments, *, transposed: bool
    ) -> Tensor:
        experts, outputs, inputs = weight.shape
        matrices = ExpertStack(self.weight(weight.flatten(0, 1), transposed=transposed), experts, transposed)
        source, picked = rows
        count = len(source if picked is None else picked)
        out = source.new_empty(count, inputs if transposed else outputs)
        # A row of zeros stands for none: it changes no scale, and ranks with rows may wait for this one's magnitude.
        rows_or_zeros = source if len(source) else source.new_zeros(1, source.shape[1])
        quantized = operand(rows_or_zeros, rows=True, columns=False).rows
        assert quantized is not None
        if count:
            self._product(quantized, picked, matrices, out, assignments)
        return out
