"""The three products of a linear layer behind one interface, so that their precision is one object of the layer.

Shapes: n rows (tokens), in/out features of the local weight [out, in]. The gradient of the output is an operand of two
products. A kernel that multiplies in fewer bits quantises it once for both (`prepare`).
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from megatron.kernels.ops import gemm
from megatron.kernels.ops.weight_grad import WeightGrad


class OutputGrad(NamedTuple):
    """The gradient of a layer's output [..., out], with the operands that a kernel has made from it, for itself
    alone."""

    tensor: Tensor
    operands: Any = None

    @property
    def plain(self) -> OutputGrad:
        """The gradient alone, for a product that is computed later: the operands take memory."""
        return OutputGrad(self.tensor)


class RowProduct(Protocol):
    """A product with one matrix, which is prepared once, for some of the rows at a time."""

    @property
    def columns(self) -> int:
        """Number of columns of the result."""
        ...

    def __call__(self, x: Tensor, out: Tensor) -> None:
        """Writes the product of x [rows, features] into `out` [rows, columns]. Not differentiable."""
        ...


class LinearKernel(Protocol):
    """The products of one linear layer. Not differentiable, and without communication of their operands."""

    def output(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [..., in], weight [out, in], bias [out] -> [..., out]."""
        ...

    def output_rows(self, weight: Tensor, bias: Tensor | None = None) -> RowProduct:
        """`output` for some rows at a time."""
        ...

    def prepare(self, grad: Tensor, *, for_weight: bool) -> OutputGrad:
        """grad [..., out], for `input_grad` and, if asked for, `weight_grad`."""
        ...

    def input_grad(self, grad: OutputGrad, weight: Tensor) -> Tensor:
        """Gradient of the input [..., in]."""
        ...

    def input_grad_rows(self, weight: Tensor) -> RowProduct:
        """`input_grad` for some rows of the gradient at a time."""
        ...

    def weight_grad(self, main_grad: Tensor, grad: OutputGrad, x: Tensor, overwrite: bool) -> None:
        """Writes the weight's gradient to main_grad [out, in] fp32, or adds it. grad [..., out], prepared or not; x
        [..., in]."""
        ...


class PlainLinear:
    """Products in the activation dtype: the LinearKernel of layers without FP8. It keeps nothing, so layers share
    one."""

    def __init__(self, weight_grad: WeightGrad) -> None:
        self._weight_grad = weight_grad

    def output(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """See LinearKernel."""
        return gemm.linear(x, weight, bias)

    def output_rows(self, weight: Tensor, bias: Tensor | None = None) -> RowProduct:
        """See LinearKernel."""
        return gemm.RowGemm(weight.t(), bias)

    def prepare(self, grad: Tensor, *, for_weight: bool) -> OutputGrad:
        """See LinearKernel."""
        return OutputGrad(grad)

    def input_grad(self, grad: OutputGrad, weight: Tensor) -> Tensor:
        """See LinearKernel."""
        return gemm.input_grad(grad.tensor, weight)

    def input_grad_rows(self, weight: Tensor) -> RowProduct:
        """See LinearKernel."""
        return gemm.RowGemm(weight)

    def weight_grad(self, main_grad: Tensor, grad: OutputGrad, x: Tensor, overwrite: bool) -> None:
        """See LinearKernel."""
        self._weight_grad(main_grad, grad.tensor.flatten(0, -2), x.flatten(0, -2), overwrite)


def new_weight_grad(kernel: LinearKernel, weight: Tensor, grad: OutputGrad, x: Tensor) -> Tensor:
    """The gradient of a weight in a tensor of its own, in the weight's shape and dtype."""
    main_grad = torch.empty(weight.shape, dtype=torch.float32, device=weight.device)
    kernel.weight_grad(main_grad.flatten(0, -2), grad, x, True)
    return main_grad.to(weight.dtype)
