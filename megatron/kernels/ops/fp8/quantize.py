"""Quantization to FP8 in plain torch: the reference for the bits that every other implementation gives.

A matrix is quantized as `cast(clamp(x * scale))`, and its values are `data * inverse`, with the inverse of the scale.
The cast rounds to the nearest number of the format, and to the even one of two. A scale belongs to the whole matrix, or
to a block of it:

- 1 x 128 elements along the contraction for activations and gradients, and 128 x 128 for weights (DeepSeek-V3, arXiv
  2412.19437). These scales are rounded down to powers of two, as in Transformer Engine by default. Then `data *
  inverse` is exact, also in bf16: it makes no difference whether a product applies the scales to its operands or to its
  sums, and a value has the same mantissa in the blocks of both directions. It costs no precision but at most one of the
  17 powers of two between the largest and the smallest element of a block.
- 1 x 32 elements with an 8-bit exponent as the inverse (MXFP8). The exponent is that of the largest element, less that
  of the largest power of two in the format (Open Compute Project, Microscaling Formats 1.0, section 6.3): an element of
  up to 2^9 / 448 = 1.14 times the largest number of e4m3 is clamped to it.

If all elements of a block are zero, or one is not finite, its scale is 1. Clamping an infinity would hide an overflow
from the check of gradients, so an infinity becomes NaN. The last block of a row or column may be smaller than the
others. Blocks start at multiples of their size, so a shard that does so, too, is quantized as it is in the whole
matrix.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.kernels.ops.fp8.formats import LARGEST_SCALE, largest, largest_power

BlockShape = tuple[int, int]
VECTOR, SQUARE, MICRO = (1, 128), (128, 128), (1, 32)  # blocks: rows, and columns along the contraction


class Quantized(NamedTuple):
    """data [m, k]: contiguous, in FP8. inverse: fp32 [1] for the whole matrix (block is None), or [ceil(m / rows),
    ceil(k / columns)] with one number per block, in fp32 or, for MICRO, e8m0.
    """

    data: Tensor
    inverse: Tensor
    block: BlockShape | None


class Both(NamedTuple):
    """A matrix [n, k] quantized for products that sum over its columns (`rows`, [n, k]) and over its rows (`columns`,
    its transpose [k, n]): GPUs read FP8 operands along the contraction only. None: not asked for.
    """

    rows: Quantized | None
    columns: Quantized | None


class PerTensor(Protocol):
    """Quantizes with one scale."""

    def __call__(
        self, x: Tensor, scale: Tensor, dtype: torch.dtype, *, rows: bool, columns: bool, amax: Tensor | None = None
    ) -> Both:
        """x [n, k], scale fp32 [1]. amax: fp32 [1], raised to the largest magnitude of x; NaN if x has one."""
        ...


class ByAmaxes(Protocol):
    """Quantizes with the one scale that fits the present values."""

    def __call__(
        self, x: Tensor, amaxes: Tensor, dtype: torch.dtype, margin: int, *, rows: bool, columns: bool
    ) -> Both:
        """x [n, k]. amaxes: what `Amaxes` of the same kernels has returned, or larger numbers in its place. margin:
        powers of two that stay free above the largest of them, see `scale_of`."""
        ...


class PerBlock(Protocol):
    """Quantizes with a scale per block."""

    def __call__(self, x: Tensor, block: BlockShape, dtype: torch.dtype, *, rows: bool, columns: bool) -> Both:
        """x [n, k]. block: VECTOR, SQUARE or MICRO; along the contraction in both directions."""
        ...


# Returns the largest magnitudes of the parts of a matrix, fp32 [parts]; NaN for a part that has one. The number of
# parts does not depend on the matrix, so that ranks which hold different parts of a matrix can take the maximum of
# theirs.
Amaxes = Callable[[Tensor], Tensor]


class QuantizeKernels(NamedTuple):
    """Ways to quantize that give the same bits."""

    per_tensor: PerTensor
    per_block: PerBlock
    amaxes: Amaxes
    by_amaxes: ByAmaxes


def amax_of(x: Tensor) -> Tensor:
    """Returns the largest magnitude in fp32 [1]; NaN if x has one."""
    return torch.linalg.vector_norm(x, float("inf"), dtype=torch.float32).view(1)


def scale_of(amax: Tensor, most: float | Tensor, margin: int = 0, otherwise: float | Tensor = 1.0) -> Tensor:
    """Returns the scales that take magnitudes `amax` (fp32, any shape) to `most` / 2^margin; `otherwise` where amax is
    zero or not finite.
    """
    most = torch.as_tensor(most, dtype=torch.float32)  # torch divides a Python number by a tensor with two roundings
    scale = (most / amax).div_(2.0**margin).clamp_(max=LARGEST_SCALE)
    return torch.where((amax > 0) & amax.isfinite(), scale, otherwise)


def cast(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the nearest numbers of the format to x * scale, which is clamped to them first."""
    most = largest(dtype)
    scaled = (x.float() * scale).clamp_(-most, most)
    return scaled.masked_fill_(x.isinf(), float("nan")).to(dtype)


def per_tensor(
    x: Tensor, scale: Tensor, dtype: torch.dtype, *, rows: bool, columns: bool, amax: Tensor | None = None
) -> Both:
    """See PerTensor."""
    if amax is not None:
        torch.maximum(amax, amax_of(x), out=amax)
    data, inverse = cast(x, scale, dtype), scale.reciprocal()
    return Both(
        Quantized(data.contiguous(), inverse, None) if rows else None,
        Quantized(data.t().contiguous(), inverse, None) if columns else None,
    )


def by_amaxes(x: Tensor, amaxes: Tensor, dtype: torch.dtype, margin: int, *, rows: bool, columns: bool) -> Both:
    """See ByAmaxes."""
    scale = scale_of(amaxes.amax(0, keepdim=True), largest(dtype), margin)
    return per_tensor(x, scale, dtype, rows=rows, columns=columns)


def per_block(x: Tensor, block: BlockShape, dtype: torch.dtype, *, rows: bool, columns: bool) -> Both:
    """See PerBlock."""
    return Both(
        _per_block(x, block, dtype) if rows else None,
        _per_block(x.t(), block, dtype) if columns else None,
    )


SEPARATE = QuantizeKernels(per_tensor, per_block, amax_of, by_amaxes)


def dequantize(q: Quantized) -> Tensor:
    """Returns the values [m, k] in fp32."""
    if q.block is None:
        return q.data.float() * q.inverse
    (m, k), (height, width) = q.data.shape, q.block
    inverse = q.inverse.float().repeat_interleave(height, 0).repeat_interleave(width, 1)
    return q.data.float() * _corner(inverse, m, k)


def _per_block(x: Tensor, block: BlockShape, dtype: torch.dtype) -> Quantized:
    (m, k), (height, width) = x.shape, block
    padded = F.pad(x, (0, -k % width, 0, -m % height))
    tiles = padded.unflatten(1, (-1, width)).unflatten(0, (-1, height))
    amax = tiles.abs().amax((1, 3)).float()
    scale = _micro_scale(amax, dtype) if block == MICRO else _power_of_two(scale_of(amax, largest(dtype)))
    data = cast(tiles, scale.unsqueeze(2).unsqueeze(1), dtype).view(padded.shape)
    inverse = scale.reciprocal()
    if block == MICRO:
        inverse = inverse.to(torch.float8_e8m0fnu)
    return Quantized(_corner(data, m, k).contiguous(), inverse, block)


def _corner(x: Tensor, m: int, k: int) -> Tensor:
    return x.narrow(0, 0, m).narrow(1, 0, k)


def _micro_scale(amax: Tensor, dtype: torch.dtype) -> Tensor:
    exact = largest_power(dtype) / _power_of_two(amax)  # both are powers of two
    return torch.where((amax > 0) & amax.isfinite(), exact.clamp_(max=LARGEST_SCALE), 1.0)


def _power_of_two(x: Tensor) -> Tensor:
    """Rounds positive numbers down to powers of two, by clearing the mantissa. Those that are not normal become
    zero."""
    return (x.view(torch.int32) & 0x7F800000).view(torch.float32)
