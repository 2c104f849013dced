"""Transformer Engine's matrix products in half precision: cuBLASLt, which adds weight gradients to fp32 matrices
itself.

`general_gemm(A, B, layout)` computes op(B) @ op(A), as seen from row-major matrices, where a letter T transposes: "TN"
is B @ A^T, "NN" is B @ A, "NT" is B^T @ A. It ignores strides, so operands and results are contiguous.
"""

from __future__ import annotations

from torch import Tensor
from transformer_engine.pytorch.cpp_extensions import general_gemm

from megatron.kernels.ops.linear import OutputGrad, RowProduct
from megatron.kernels.ops.weight_grad import WeightGrad


def weight_grad(main_grad: Tensor, grad: Tensor, x: Tensor, overwrite: bool) -> None:
    """See WeightGrad. The product is accumulated in the GEMM."""
    general_gemm(
        x.contiguous(),
        grad.contiguous(),
        out_dtype=main_grad.dtype,
        accumulate=not overwrite,
        layout="NT",
        out=main_grad,
        use_split_accumulator=True,
        grad=True,
    )


class EngineLinear:
    """A LinearKernel in the activation dtype. It keeps nothing, so layers share one."""

    def __init__(self, weight_grad: WeightGrad) -> None:
        self._weight_grad = weight_grad

    def output(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """See LinearKernel."""
        return _product(weight, x, "TN", bias=bias)

    def output_rows(self, weight: Tensor, bias: Tensor | None = None) -> RowProduct:
        """See LinearKernel."""
        return _Rows(weight, "TN", len(weight), bias)

    def prepare(self, grad: Tensor, *, for_weight: bool) -> OutputGrad:
        """See LinearKernel."""
        return OutputGrad(grad)

    def input_grad(self, grad: OutputGrad, weight: Tensor) -> Tensor:
        """See LinearKernel."""
        return _product(weight, grad.tensor, "NN", grad=True)

    def input_grad_rows(self, weight: Tensor) -> RowProduct:
        """See LinearKernel."""
        return _Rows(weight, "NN", weight.shape[1])

    def weight_grad(self, main_grad: Tensor, grad: OutputGrad, x: Tensor, overwrite: bool) -> None:
        """See LinearKernel."""
        self._weight_grad(main_grad, grad.tensor.flatten(0, -2), x.flatten(0, -2), overwrite)


class _Rows:
    """A RowProduct with a weight. layout: as the module explains."""

    def __init__(self, weight: Tensor, layout: str, columns: int, bias: Tensor | None = None) -> None:
        self.columns = columns
        self._weight = weight
        self._layout = layout
        self._bias = bias

    def __call__(self, x: Tensor, out: Tensor) -> None:
        """See RowProduct."""
        _product(self._weight, x, self._layout, bias=self._bias, out=out)


def _product(
    weight: Tensor, x: Tensor, layout: str, *, bias: Tensor | None = None, out: Tensor | None = None, grad: bool = False
) -> Tensor:
    """x [..., features] times the weight or its transpose, in x's dtype. grad: x is a gradient."""
    product, *_ = general_gemm(
        weight.contiguous(), x.contiguous(), out_dtype=x.dtype, layout=layout, out=out, bias=bias, grad=grad
    )
    result: Tensor = product
    return result
