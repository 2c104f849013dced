"""Linear layers whose products are not yet in FP8, because nothing is known about the size of their values."""

from __future__ import annotations

from torch import Tensor

from megatron.kernels.ops.assignments import Assignments, Picked
from megatron.kernels.ops.fp8.quantize import amax_of
from megatron.kernels.ops.grouped_linear import GroupedLinear
from megatron.kernels.ops.linear import LinearKernel, OutputGrad, RowProduct


class MeasuredLinear:
    """The products of another kernel, and the largest absolute values of input, weight and gradient: a LinearKernel."""

    def __init__(self, kernel: LinearKernel, amaxes: tuple[Tensor, Tensor, Tensor]) -> None:
        """amaxes: cells [1], fp32, which take the maximum of what they hold and of the values."""
        self._kernel = kernel
        self._input, self._weight, self._gradient = amaxes

    def output(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """See LinearKernel."""
        _measure(x, self._input)
        _measure(weight, self._weight)
        return self._kernel.output(x, weight, bias)

    def output_rows(self, weight: Tensor, bias: Tensor | None = None) -> RowProduct:
        """See LinearKernel."""
        _measure(weight, self._weight)
        return _MeasuredRows(self._kernel.output_rows(weight, bias), self._input)

    def prepare(self, grad: Tensor, *, for_weight: bool) -> OutputGrad:
        """See LinearKernel."""
        _measure(grad, self._gradient)
        return self._kernel.prepare(grad, for_weight=for_weight)

    def input_grad(self, grad: OutputGrad, weight: Tensor) -> Tensor:
        """See LinearKernel."""
        return self._kernel.input_grad(grad, weight)

    def input_grad_rows(self, weight: Tensor) -> RowProduct:
        """See LinearKernel."""
        return _MeasuredRows(self._kernel.input_grad_rows(weight), self._gradient)

    def weight_grad(self, main_grad: Tensor, grad: OutputGrad, x: Tensor, overwrite: bool) -> None:
        """See LinearKernel."""
        _measure(grad.tensor, self._gradient)  # not prepared where no input gradient is wanted
        self._kernel.weight_grad(main_grad, grad, x, overwrite)


class MeasuredGrouped:
    """The products of another kernel, and the largest absolute values of input, weight and gradient: a
    GroupedLinear."""

    def __init__(self, kernel: GroupedLinear, amaxes: tuple[Tensor, Tensor, Tensor]) -> None:
        """`amaxes` are the tensors in which MeasuredLinear collects the largest magnitudes."""
        self._kernel = kernel
        self._input, self._weight, self._gradient = amaxes

    def output(self, values: Picked, weight: Tensor, assignments: Assignments) -> Tensor:
        """See GroupedLinear."""
        _measure(values.source, self._input)
        _measure(weight, self._weight)
        return self._kernel.output(values, weight, assignments)

    def input_grad(self, grads: Picked, weight: Tensor, assignments: Assignments) -> Tensor:
        """See GroupedLinear."""
        _measure(grads.source, self._gradient)
        return self._kernel.input_grad(grads, weight, assignments)


class _MeasuredRows:
    """A RowProduct."""

    def __init__(self, product: RowProduct, amax: Tensor) -> None:
        self._product, self._amax = product, amax

    @property
    def columns(self) -> int:
        """See RowProduct."""
        return self._product.columns

    def __call__(self, x: Tensor, out: Tensor) -> None:
        """See RowProduct."""
        _measure(x, self._amax)
        self._product(x, out)


def _measure(x: Tensor, amax: Tensor) -> None:
    if x.numel():  # else the largest value has no definition
        amax.copy_(amax.maximum(amax_of(x)))
