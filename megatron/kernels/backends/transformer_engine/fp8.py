"""FP8 products of a linear layer by Transformer Engine: its quantizers, and `general_gemm`, which adds to fp32
gradients.

A quantizer makes a tensor for products over its columns (rowwise) and over its rows (columnwise, for which it writes
the transpose) in one pass. `general_gemm` takes the direction that its layout needs (linear.py).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformer_engine.pytorch import is_fp8_available, is_fp8_block_scaling_available, is_mxfp8_available
from transformer_engine.pytorch.constants import TE_DType
from transformer_engine.pytorch.cpp_extensions import general_gemm
from transformer_engine.pytorch.tensor import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    MXFP8Quantizer,
)

from megatron.kernels.ops.fp8.formats import Formats
from megatron.kernels.ops.fp8.operands import MaxOver, Three
from megatron.kernels.ops.fp8.quantize import amax_of
from megatron.kernels.ops.linear import OutputGrad, RowProduct
from megatron.kernels.ops.weight_grad import WeightGrad

_VECTOR, _SQUARE = 1, 2  # dims of a block of 128 elements
# Tokens come in multiples of these: cuBLAS reads 16 bytes, MXFP8 has blocks of 32. Blocks of 128 may be cut off at the
# end: the package pads their factors, tests its GEMM with such sizes, and asks for whole blocks (`is_quantizable`) only
# where it gathers quantized tensors.
_ROWS, _MICRO_ROWS = 16, 32


class EngineOperand(NamedTuple):
    """Quantizes one operand of a layer. The number of its rows is padded with zeros to a multiple of `multiple`.

    both: whether the quantizer writes rowwise data in any case. max_over: a function that raises the magnitude of this
    rank's part to the magnitude of the whole operand.
    """

    quantizer: Any
    multiple: int
    both: bool
    max_over: MaxOver | None = None

    def __call__(self, x: Tensor, *, rows: bool, columns: bool) -> Any:
        """x [..., features], for products over its columns (`rows`) and over its rows. `max_over` may communicate."""
        x = x.flatten(0, -2)
        if len(x) % self.multiple:
            x = F.pad(x, (0, 0, 0, -len(x) % self.multiple))
        self.quantizer.set_usage(rowwise=rows or self.both, columnwise=columns)
        if isinstance(self.quantizer, Float8CurrentScalingQuantizer):
            self.quantizer.use_existing_amax = self.max_over is not None
        if self.max_over is not None:
            amax = amax_of(x)
            self.max_over(amax)
            self.quantizer.amax.copy_(amax)
        return self.quantizer(x.contiguous())

    def in_pieces(self) -> EngineOperand:
        """For some rows at a time: a magnitude of this piece alone, and no communication."""
        return self._replace(max_over=None)


class EngineOperands(NamedTuple):
    """The operands of a layer; `gradient` quantizes the gradient of its output."""

    input: EngineOperand
    weight: EngineOperand
    gradient: EngineOperand


def delayed(formats: Formats, scales: Three, amaxes: Three) -> EngineOperands:
    """Scales and magnitudes are the given tensors, fp32 [1]: every use of an operand raises its magnitude."""
    quantizers = [
        Float8Quantizer(scale, amax, dtype) for scale, amax, dtype in zip(scales, amaxes, _dtypes(formats), strict=True)
    ]
    return _operands(quantizers, _ROWS, both=(True, True, True))


def tensorwise(
    formats: Formats,
    device: torch.device,
    max_over: tuple[MaxOver | None, MaxOver | None, MaxOver | None] = (None, None, None),
) -> EngineOperands:
    """Returns operands with one scale per tensor, from its present values. `max_over` has a function for each
    operand."""
    quantizers = [Float8CurrentScalingQuantizer(dtype, device) for dtype in _dtypes(formats)]
    return _operands(quantizers, _ROWS, both=(True, True, True), max_over=max_over)


def blockwise(formats: Formats) -> EngineOperands:
    """Vectors of 128 elements of activations and gradients, and squares of weights; scales are powers of two."""
    dims = (_VECTOR, _SQUARE, _VECTOR)
    quantizers = [
        Float8BlockQuantizer(dtype, rowwise=True, columnwise=True, force_pow_2_scales=True, block_scaling_dim=dim)
        for dtype, dim in zip(_dtypes(formats), dims, strict=True)
    ]
    return _operands(quantizers, _ROWS, both=(False, True, False))


def mxfp8(formats: Formats) -> EngineOperands:
    """Vectors of 32 elements of each operand."""
    quantizers = [MXFP8Quantizer(dtype) for dtype in _dtypes(formats)]
    for quantizer in (quantizers[0], quantizers[2]):
        quantizer.optimize_for_gemm = True  # writes the scales in the order of the GEMM
    return _operands(quantizers, _MICRO_ROWS, both=(False, False, False))


def why_not(recipe: str) -> str | None:
    """Returns why the package cannot multiply with a recipe on the current GPU, or None."""
    available = {"blockwise": is_fp8_block_scaling_available, "mxfp8": is_mxfp8_available}.get(recipe, is_fp8_available)
    works, reason = available(return_reason=True)
    return None if works else str(reason).rstrip(".")


def layer(
    recipe: str,
    formats: Formats,
    device: torch.device,
    scales: Three | None,
    amaxes: Three | None,
    max_over: tuple[MaxOver | None, MaxOver | None, MaxOver | None],
    *,
    keep_weight: bool,
    weight_grad: WeightGrad | None,
) -> EngineFp8Linear:
    """Returns the products of a layer. `delayed` takes `scales` and `amaxes`, `tensorwise` takes `max_over`."""
    if recipe == "delayed":
        assert scales is not None and amaxes is not None
        operands = delayed(formats, scales, amaxes)
    elif recipe == "tensorwise":
        operands = tensorwise(formats, device, max_over)
    else:
        operands = blockwise(formats) if recipe == "blockwise" else mxfp8(formats)
    return EngineFp8Linear(operands, keep_weight=keep_weight, weight_grad=weight_grad)


class EngineFp8Linear:
    """The LinearKernel of one layer in FP8, with the contract of ops/fp8/linear.py's."""

    def __init__(self, operands: EngineOperands, *, keep_weight: bool, weight_grad: WeightGrad | None = None) -> None:
        """keep_weight: the quantized weight is kept from its first use to `forget`. weight_grad: computes the gradient
        of the weight in the activation dtype instead."""
        self._operands = operands
        self._keep_weight, self._weight_grad = keep_weight, weight_grad
        self._quantized: Any = None

    def forget(self) -> None:
        """Drops the quantized weight. Call it whenever the weight has changed."""
        self._quantized = None

    def output(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """See LinearKernel."""
        return _whole(self._output_rows(self._operands.input, weight, bias), x)

    def output_rows(self, weight: Tensor, bias: Tensor | None = None) -> RowProduct:
        """See LinearKernel."""
        return self._output_rows(self._operands.input.in_pieces(), weight, bias)

    def prepare(self, grad: Tensor, *, for_weight: bool) -> OutputGrad:
        """See LinearKernel. Quantizes the gradient in both directions at once."""
        columns = for_weight and self._weight_grad is None
        return OutputGrad(grad, _Prepared(self._operands.gradient(grad, rows=True, columns=columns), columns))

    def input_grad(self, grad: OutputGrad, weight: Tensor) -> Tensor:
        """See LinearKernel."""
        prepared: _Prepared | None = grad.operands
        quantized = None if prepared is None else prepared.quantized
        return _whole(self._input_grad_rows(self._operands.gradient, weight), grad.tensor, quantized)

    def input_grad_rows(self, weight: Tensor) -> RowProduct:
        """See LinearKernel."""
        return self._input_grad_rows(self._operands.gradient.in_pieces(), weight)

    def weight_grad(self, main_grad: Tensor, grad: OutputGrad, x: Tensor, overwrite: bool) -> None:
        """See LinearKernel. The product is added in the GEMM."""
        if self._weight_grad is not None:
            self._weight_grad(main_grad, grad.tensor.flatten(0, -2), x.flatten(0, -2), overwrite)
            return
        prepared: _Prepared | None = grad.operands
        if prepared is None or not prepared.columns:
            prepared = _Prepared(self._operands.gradient(grad.tensor, rows=False, columns=True), columns=True)
        general_gemm(
            self._operands.input(x, rows=False, columns=True),
            prepared.quantized,
            out_dtype=main_grad.dtype,
            accumulate=not overwrite,
            layout="NT",
            out=main_grad,
            use_split_accumulator=True,
            grad=True,
        )

    def _output_rows(self, operand: EngineOperand, weight: Tensor, bias: Tensor | None) -> _Fp8Rows:
        return _Fp8Rows(operand, self._matrix(weight, transposed=False), "TN", len(weight), bias)

    def _input_grad_rows(self, operand: EngineOperand, weight: Tensor) -> _Fp8Rows:
        return _Fp8Rows(operand, self._matrix(weight, transposed=True), "NN", weight.shape[1])

    def _matrix(self, weight: Tensor, *, transposed: bool) -> Any:
        if self._quantized is not None:
            return self._quantized
        keep = self._keep_weight
        quantized = self._operands.weight(weight, rows=keep or not transposed, columns=keep or transposed)
        if keep:
            self._quantized = quantized
        return quantized


class _Prepared(NamedTuple):
    """The gradient of the output. columns: for the gradient of the weight, too."""

    quantized: Any
    columns: bool


class _Fp8Rows:
    """A RowProduct with a quantized weight. Only the sums of the output, which is no gradient, may be less precise."""

    def __init__(
        self, operand: EngineOperand, matrix: Any, layout: str, columns: int, bias: Tensor | None = None
    ) -> None:
        self.columns = columns
        self._operand = operand
        self._matrix = matrix
        self._layout = layout
        self._bias = bias

    def __call__(self, x: Tensor, out: Tensor) -> None:
        """See RowProduct."""
        self.multiply(self._operand(x, rows=True, columns=False), out)

    def multiply(self, quantized: Any, out: Tensor) -> None:
        """Writes the product of the quantized rows, of which the last may be added zeros."""
        rows = -(-len(out) // self._operand.multiple) * self._operand.multiple
        into = out if rows == len(out) else out.new_empty(rows, self.columns)
        gradient = self._layout == "NN"
        inside = self._bias if out.dtype != torch.float32 else None  # the kernel adds none to an fp32 result
        general_gemm(
            self._matrix,
            quantized,
            out_dtype=out.dtype,
            layout=self._layout,
            out=into,
            bias=inside,
            use_split_accumulator=gradient,
            grad=gradient,
        )
        if self._bias is not None and inside is None:
            into.add_(self._bias)
        if into is not out:
            out.copy_(into.narrow(0, 0, len(out)))


def _whole(rows: _Fp8Rows, x: Tensor, quantized: Any = None) -> Tensor:
    """The product of x [..., features], which may be quantized already."""
    out = x.new_empty(*x.shape[:-1], rows.columns)
    if quantized is None:
        rows(x, out.flatten(0, -2))
    else:
        rows.multiply(quantized, out.flatten(0, -2))
    return out


def _operands(
    quantizers: list[Any],
    multiple: int,
    *,
    both: tuple[bool, bool, bool],
    max_over: tuple[MaxOver | None, MaxOver | None, MaxOver | None] = (None, None, None),
) -> EngineOperands:
    for quantizer in quantizers:
        quantizer.internal = True  # tensors that no one else sees, with less work on the host
    operands = [
        EngineOperand(quantizer, multiple, of, over)
        for quantizer, of, over in zip(quantizers, both, max_over, strict=True)
    ]
    return EngineOperands(*operands)


def _dtypes(formats: Formats) -> tuple[Any, Any, Any]:
    return TE_DType[formats.forward], TE_DType[formats.forward], TE_DType[formats.gradient]
