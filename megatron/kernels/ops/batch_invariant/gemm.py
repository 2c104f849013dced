"""Products in blocks of a fixed number of rows: see [Note: fixed shapes] in the package."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron.kernels.ops import gemm
from megatron.kernels.ops.assignments import Assignments
from megatron.kernels.ops.linear import PlainLinear, RowProduct
from megatron.kernels.ops.weight_grad import WeightGrad

ROWS = 32  # of a block: fewer multiply slowly in training, and more are computed in vain when few tokens are decoded
_ALIGNMENT = 64  # bytes, of the first row of every block


def padded_blocks(x: Tensor) -> Tensor:
    """x [n, w] -> [blocks, ROWS, w], aligned, with zeros behind the last row; a view of x if nothing is missing."""
    n, width = x.shape
    missing = -n % ROWS
    if missing or not x.is_contiguous() or x.data_ptr() % _ALIGNMENT:
        padded = x.new_empty(n + missing, width)
        padded[:n] = x
        padded[n:] = 0
        x = padded
    return x.view(-1, ROWS, width)


class BlockProduct:
    """The product of rows with one matrix, block by block. A conversion that the CPU needs happens once."""

    def __init__(self, matrix: Tensor, bias: Tensor | None = None) -> None:
        """matrix [in, out] with any strides; bias [out]."""
        self._wide = gemm.slow_half(matrix.device, matrix.dtype)
        self._matrix = matrix.float() if self._wide else matrix
        self._bias = bias.float() if self._wide and bias is not None else bias

    @property
    def columns(self) -> int:
        """Number of columns of the result."""
        return self._matrix.shape[1]

    def __call__(self, x: Tensor, out: Tensor) -> None:
        """Writes the product of x [n, in] into `out` [n, out]. Not differentiable."""
        start = 0
        for block in padded_blocks(x.float() if self._wide else x):
            product = block @ self._matrix if self._bias is None else torch.addmm(self._bias, block, self._matrix)
            stop = min(start + ROWS, len(x))
            out[start:stop] = product[: stop - start]
            start = stop


MakeProduct = Callable[[Tensor, Tensor | None], RowProduct]  # of a matrix [in, out] and a bias [out]


class InvariantLinear(PlainLinear):
    """A LinearKernel whose outputs do not depend on the number or place of the rows. Gradients are those of
    PlainLinear."""

    def __init__(self, weight_grad: WeightGrad, make_product: MakeProduct) -> None:
        super().__init__(weight_grad)
        self._make_product = make_product

    def output(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """See LinearKernel."""
        rows = x.flatten(0, -2)
        out = x.new_empty(len(rows), weight.shape[0])
        self._make_product(weight.t(), bias)(rows, out)
        return out.view(*x.shape[:-1], weight.shape[0])

    def output_rows(self, weight: Tensor, bias: Tensor | None = None) -> RowProduct:
        """See LinearKernel."""
        return self._make_product(weight.t(), bias)

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        """As `output`, differentiable."""
        result: Tensor = _Product.apply(x, weight, self)
        return result


class _Product(torch.autograd.Function):
    """x [..., in], weight [out, in] -> [..., out]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, linear: InvariantLinear) -> Tensor:
        ctx.save_for_backward(x, weight)
        return linear.output(x, weight)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        of_x = gemm.input_grad(grad, weight) if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return of_x, None, None
        return of_x, gemm.input_grad(grad.flatten(0, -2).t(), x.flatten(0, -2)), None


def grouped(values: Tensor, matrices: Tensor, assignments: Assignments) -> Tensor:
    """A GroupedGemm: the rows of every expert are in blocks of their own."""
    out = values.new_empty(values.shape[0], matrices.shape[-1])
    sizes = list(assignments.sizes)
    pieces = zip(sizes, values.split(sizes), matrices.unbind(), out.split(sizes), strict=True)
    for size, value, matrix, result in pieces:
        if size:
            BlockProduct(matrix)(value, result)
    return out
