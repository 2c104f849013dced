"""Quantization to fp8 by three recipes, in plain torch on any device, and the product of quantized matrices.

tensorwise: one scale per matrix. rowwise: one per row. blockwise: one per 1 x 128 elements of an activation or gradient,
and per 128 x 128 of a weight. A scale makes the largest element the largest number of the format.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

RECIPES = ("tensorwise", "rowwise", "blockwise")
BLOCK = 128
SMALLEST = 2.0**-40  # largest element of a block that is taken as zero


class Quantized(NamedTuple):
    """data [m, k] in fp8, and the factors that give the values back: [], [m, 1], or one per block of `block` rows."""

    data: Tensor
    inverse: Tensor
    block: int


def quantize(x: Tensor, recipe: str, *, gradient: bool = False, weight: bool = False) -> Quantized:
    """Quantizes [m, k]. Gradients with one scale per tensor take e5m2, whose range is wider; all else takes e4m3."""
    dtype = torch.float8_e5m2 if gradient and recipe == "tensorwise" else torch.float8_e4m3fn
    largest = torch.finfo(dtype).max
    wide = x.float()
    if recipe == "tensorwise":
        amax, block = wide.abs().amax(), 0
    elif recipe == "rowwise":
        amax, block = wide.abs().amax(dim=1, keepdim=True), 0
    else:
        block = BLOCK if weight else 1
        m, k = wide.shape
        wide = wide.view(m // block, block, k // BLOCK, BLOCK)
        amax = wide.abs().amax(dim=(1, 3), keepdim=True)
    scale = largest / amax.clamp(min=SMALLEST)
    # Clamped, because rounding may exceed the largest number, and e5m2 has infinities.
    data = (wide * scale).clamp(-largest, largest).to(dtype).view(x.shape)
    inverse = scale.reciprocal()
    return Quantized(data, inverse if not block else inverse.flatten(1), block)


def dequantized(x: Quantized) -> Tensor:
    """Returns the values [m, k] in fp32."""
    factors = x.inverse
    if x.block:
        factors = factors.repeat_interleave(x.block, dim=0).repeat_interleave(BLOCK, dim=1)
    return x.data.float() * factors


def product(a: Quantized, b: Quantized) -> Tensor:
    """Returns a [m, k] @ b [n, k].t() in bf16 by torch._scaled_mm. Blocks need CUDA."""
    if not a.block:
        scale_b = b.inverse if not b.inverse.dim() else b.inverse.t()
        return torch._scaled_mm(a.data, b.data.t(), a.inverse, scale_b, out_dtype=torch.bfloat16)
    scales = (_for_blocks(a), _for_blocks(b).t())
    return torch._scaled_mm(a.data, b.data.t(), *scales, out_dtype=torch.bfloat16, use_fast_accum=False)


def _for_blocks(x: Quantized) -> Tensor:
    """The kernel wants the scales of 1 x 128 blocks with neighbouring rows next to each other."""
    return x.inverse if x.block == BLOCK else x.inverse.t().contiguous().t()
