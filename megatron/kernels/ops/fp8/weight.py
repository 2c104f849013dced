"""The quantized weight of a layer, in both directions."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from megatron.kernels.ops.fp8.operands import Operand
from megatron.kernels.ops.fp8.quantize import Both, Quantized


class QuantizedWeight:
    """If `keep`, both directions are kept from their first use to `forget`: 2 bytes per parameter. Else each use
    quantizes the weight again.
    """

    def __init__(self, operand: Operand, ready: Callable[[Both], Both], *, keep: bool) -> None:
        """ready: puts the factors into the order in which the layer's product reads them."""
        self.keep = keep
        self._operand, self._ready = operand, ready
        self._kept = Both(None, None)

    def forget(self) -> None:
        """Drops what is kept. Call it whenever the weight has changed."""
        self._kept = Both(None, None)

    def __call__(self, weight: Tensor, *, transposed: bool) -> Quantized:
        """weight [out, in] -> itself, or its transpose."""
        both = self._kept
        if both.rows is None:
            both = self._ready(self._operand(weight, rows=self.keep or not transposed, columns=self.keep or transposed))
            if self.keep:
                self._kept = both
        quantized = both.columns if transposed else both.rows
        assert quantized is not None
        return quantized
