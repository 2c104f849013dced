"""Products of quantized matrices on any device: in fp32, of the numbers that the quantized ones stand for."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.kernels.ops.fp8.quantize import Quantized, dequantize


class Emulated:
    """See Product. On the CPU it equals torch's own product with one scale per matrix, to the last bit."""

    multiple = 1

    def ready(self, q: Quantized) -> Quantized:
        """See Product."""
        return q

    def __call__(self, a: Quantized, b: Quantized, out: Tensor, *, fast: bool, bias: Tensor | None = None) -> None:
        """See Product."""
        product = torch.mm(dequantize(a), dequantize(b).t())
        out.copy_(product if bias is None else product.add_(bias.float()))

    def add(self, a: Quantized, b: Quantized, out: Tensor) -> None:
        """See Product."""
        out.add_(torch.mm(dequantize(a), dequantize(b).t()))
