"""The product of two quantized matrices."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from megatron.kernels.ops.fp8.quantize import Quantized


class Product(Protocol):
    """a [m, k] @ b [n, k].t(), in fp32 with one rounding."""

    @property
    def multiple(self) -> int:
        """Rows of activations and gradients come in multiples of this number: zeros are added."""
        ...

    def ready(self, q: Quantized) -> Quantized:
        """Puts the factors of an operand into the order in which this product reads them."""
        ...

    def __call__(self, a: Quantized, b: Quantized, out: Tensor, *, fast: bool, bias: Tensor | None = None) -> None:
        """Writes the product of two operands that are ready, plus bias [n], into `out` [m, n], whose dtype it is
        rounded to.

        fast: the sums may be less precise than fp32 where that is faster.
        """
        ...

    def add(self, a: Quantized, b: Quantized, out: Tensor) -> None:
        """Adds the product of two operands that are ready to `out` [m, n], fp32 and contiguous."""
        ...
