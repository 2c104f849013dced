"""The products of one linear layer in FP8.

| product | operands | sums over |
|---|---|---|
| output | input, weight | in |
| gradient of the input | gradient of the output, transpose of the weight | out |
| gradient of the weight | transposes of the gradient of the output and of the input | tokens |

The input is quantized for the first product and again for the third: layers keep it in the activation dtype, so that
recomputation and offload need not know. The gradient of the output is quantized once for both of its products.

The first product may sum with less precision (`fast`), the gradients not: Hopper's tensor cores keep about 14 bits of
such sums. Gradients sum over many tokens with very different magnitudes, and then over microbatches, so their errors
would add up. Transformer Engine's defaults are the same.
"""

from __future__ import annotations

from functools import partial
from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from megatron.kernels.ops.fp8.operands import Operand, Operands
from megatron.kernels.ops.fp8.product import Product
from megatron.kernels.ops.fp8.quantize import Both, Quantized
from megatron.kernels.ops.fp8.weight import QuantizedWeight
from megatron.kernels.ops.linear import LinearKernel, OutputGrad
from megatron.kernels.ops.weight_grad import WeightGrad


class KeepsWeight(Protocol):
    """The products of one layer, which keep its quantized weight."""

    def forget(self) -> None:
        """Drops the quantized weight. Call it whenever the weight has changed."""
        ...


class QuantizingKernel(KeepsWeight, LinearKernel, Protocol):
    """The products of a linear layer, which keep its quantized weight."""


class Fp8Linear:
    """See LinearKernel. It belongs to one layer, whose scales `operands` holds.

    keep_weight: see QuantizedWeight. weight_grad: computes the gradient of the weight in the activation dtype instead
    of in FP8.
    """

    def __init__(
        self, operands: Operands, product: Product, *, keep_weight: bool, weight_grad: WeightGrad | None = None
    ) -> None:
        self._operands, self._product = operands, product
        self._weight_grad = weight_grad
        self.weight = QuantizedWeight(operands.weight, partial(_ready, product), keep=keep_weight)

    def forget(self) -> None:
        """Drops the quantized weight. Call it whenever the weight has changed."""
        self.weight.forget()

    def output(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """See LinearKernel."""
        return self._whole(self._rows(self._operands.input, weight, bias), x)

    def output_rows(self, weight: Tensor, bias: Tensor | None = None) -> Rows:
        """See LinearKernel."""
        return self._rows(self._operands.input.in_pieces(), weight, bias)

    def prepare(self, grad: Tensor, *, for_weight: bool) -> OutputGrad:
        """See LinearKernel. Quantizes the gradient."""
        columns = for_weight and self._weight_grad is None
        return OutputGrad(grad, self._quantize(self._operands.gradient, grad, rows=True, columns=columns))

    def input_grad(self, grad: OutputGrad, weight: Tensor) -> Tensor:
        """See LinearKernel."""
        quantized: Both | None = grad.operands
        if quantized is None or quantized.rows is None:
            quantized = self._quantize(self._operands.gradient, grad.tensor, rows=True, columns=False)
        assert quantized.rows is not None
        matrix = self.weight(weight, transposed=True)
        out = grad.tensor.new_empty(*grad.tensor.shape[:-1], len(matrix.data))
        _multiply(self._product, quantized.rows, matrix, out.flatten(0, -2), fast=False)
        return out

    def input_grad_rows(self, weight: Tensor) -> Rows:
        """See LinearKernel."""
        matrix = self.weight(weight, transposed=True)
        return Rows(self._product, self._operands.gradient.in_pieces(), matrix, None, fast=False)

    def weight_grad(self, main_grad: Tensor, grad: OutputGrad, x: Tensor, overwrite: bool) -> None:
        """See LinearKernel."""
        if self._weight_grad is not None:
            self._weight_grad(main_grad, grad.tensor.flatten(0, -2), x.flatten(0, -2), overwrite)
            return
        quantized: Both | None = grad.operands
        if quantized is None or quantized.columns is None:
            quantized = self._quantize(self._operands.gradient, grad.tensor, rows=False, columns=True)
        inputs = self._quantize(self._operands.input, x, rows=False, columns=True)
        assert quantized.columns is not None and inputs.columns is not None
        if overwrite:
            self._product(quantized.columns, inputs.columns, main_grad, fast=False)
        else:
            self._product.add(quantized.columns, inputs.columns, main_grad)

    def _rows(self, operand: Operand, weight: Tensor, bias: Tensor | None) -> Rows:
        return Rows(self._product, operand, self.weight(weight, transposed=False), bias, fast=True)

    def _quantize(self, operand: Operand, x: Tensor, *, rows: bool, columns: bool) -> Both:
        return _ready(self._product, operand(_padded(x, self._product), rows=rows, columns=columns))

    @staticmethod
    def _whole(rows: Rows, x: Tensor) -> Tensor:
        out = x.new_empty(*x.shape[:-1], rows.columns)
        rows(x.flatten(0, -2), out.flatten(0, -2))
        return out


class Rows:
    """See RowProduct: quantizes rows, and multiplies them by a quantized matrix."""

    def __init__(
        self, product: Product, operand: Operand, matrix: Quantized, bias: Tensor | None, *, fast: bool
    ) -> None:
        self._product, self._operand, self._matrix, self._bias = product, operand, matrix, bias
        self._fast = fast

    @property
    def columns(self) -> int:
        """See RowProduct."""
        return len(self._matrix.data)

    def __call__(self, x: Tensor, out: Tensor) -> None:
        """See RowProduct."""
        both = _ready(self._product, self._operand(_padded(x, self._product), rows=True, columns=False))
        assert both.rows is not None
        _multiply(self._product, both.rows, self._matrix, out, fast=self._fast, bias=self._bias)


def _padded(x: Tensor, product: Product) -> Tensor:
    """[..., features] -> [n, features], with rows of zeros up to a multiple. They change no scale and no sum."""
    x = x.flatten(0, -2)
    return x if len(x) % product.multiple == 0 else F.pad(x, (0, 0, 0, -len(x) % product.multiple))


def _ready(product: Product, both: Both) -> Both:
    rows, columns = (None if quantized is None else product.ready(quantized) for quantized in both)
    return Both(rows, columns)


def _multiply(
    product: Product, a: Quantized, b: Quantized, out: Tensor, *, fast: bool, bias: Tensor | None = None
) -> None:
    """Calls `product`, and leaves out the rows of the operand for which `out` has no row."""
    if len(a.data) == len(out):
        product(a, b, out, fast=fast, bias=bias)
        return
    padded = out.new_empty(len(a.data), out.shape[1])
    product(a, b, padded, fast=fast, bias=bias)
    out.copy_(padded.narrow(0, 0, len(out)))
