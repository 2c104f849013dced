"""Quantization to FP8 in one pass over memory, for both directions at once. The interface and the bits are those of
ops/fp8/quantize.py.

A program reads one tile, and writes it as it is and transposed, each with its scales. GPUs without an instruction for
the cast (before compute capability 8.9), and the interpreter, round with integers.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import driver

from megatron.kernels.backends.triton.rows import as_rows
from megatron.kernels.ops.fp8.formats import E4M3, LARGEST_SCALE, largest, largest_power
from megatron.kernels.ops.fp8.quantize import MICRO, SQUARE, BlockShape, Both, Quantized

SIDE = tl.constexpr(128)  # of a tile with blocks: the largest one
SMALL_SIDE = tl.constexpr(64)  # of a tile without
SMALL_WARPS = 4  # 32 elements of a small tile for each thread
# Rows of a tile with blocks that are quantized at a time, and warps, by (rows, columns) that are wanted: the fastest on
# an H200 (benchmarks/results/gpu.md). Columns are written along strips, and short pieces of memory cost bandwidth.
STRIPS = {(True, False): (32, 8), (False, True): (128, 8), (True, True): (128, 8)}
MICRO_STRIP = 32  # blocks of MICRO along columns are as high as a strip
PARTS = tl.constexpr(512)  # of a matrix, whose magnitudes are found apart: several for each multiprocessor
AMAX_BLOCK, AMAX_WARPS = 4096, 8  # 16 elements for each thread
INFINITY = tl.constexpr(0x7F800000)  # its bits, and the exponent of all numbers
NAN = tl.constexpr(0x7F)  # the one of both formats
ONE = tl.constexpr(127 << 23)  # the bits of 1.0
TWICE = tl.constexpr(254 << 23)  # less the bits of a power of two: those of its inverse


@triton.jit
def _round(x, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """Rounds numbers within the format's limits to its nearest ones, as bytes. Of two it takes the even one."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    DROPPED: tl.constexpr = 23 - MANTISSA
    rounded = magnitude + ((magnitude >> DROPPED) & 1) + ((1 << (DROPPED - 1)) - 1)
    normal = (rounded >> DROPPED) - ((127 - BIAS) << MANTISSA)
    # The sum's last bit is worth the smallest number of the format.
    UNIT: tl.constexpr = (1 - BIAS - MANTISSA + 23 + 127) << 23
    unit = tl.full(x.shape, UNIT, tl.int32).to(tl.float32, bitcast=True)
    small = (magnitude.to(tl.float32, bitcast=True) + unit).to(tl.int32, bitcast=True) - UNIT
    rounded_bits = tl.where(magnitude < ((128 - BIAS) << 23), small, normal)
    return (rounded_bits | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def _cast(x, scale, MOST: tl.constexpr, E4M3: tl.constexpr, INSTRUCTION: tl.constexpr):
    """See the reference's cast; returns bytes."""
    finite = (x.to(tl.int32, bitcast=True) & 0x7FFFFFFF) < INFINITY
    scaled = tl.minimum(tl.maximum(x * scale, -MOST), MOST)
    if not INSTRUCTION:
        bits = _round(scaled, 3 if E4M3 else 2, 7 if E4M3 else 15)
    elif E4M3:
        bits = scaled.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        bits = scaled.to(tl.float8e5).to(tl.uint8, bitcast=True)
    return tl.where(finite, bits, NAN).to(tl.uint8)


@triton.jit
def _block_scale(amax, POWER: tl.constexpr, MICRO: tl.constexpr):
    """amax: bits of the largest magnitude. POWER: exponent of the format's largest number, 1.75 * 2^POWER. Returns
    bits.

    The quotient of the two is at least a power of two with the difference of their exponents if the magnitude's
    mantissa is at most 1.75, and half of that otherwise.
    """
    exponent = amax >> 23
    if not MICRO:
        exponent += ((amax & 0x7FFFFF) > 0x600000).to(tl.int32)
    scale = (tl.maximum(exponent, POWER + 1) * -1 + (254 + POWER)) << 23  # at most LARGEST_SCALE
    return tl.where((amax > 0) & (amax < INFINITY), scale, ONE)


@triton.jit
def _load_tile(x_ptr, top, left, n, k, x_stride, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """Returns rows and columns from (top, left) on, in fp32; zeros outside of the matrix [n, k]."""
    down, across = tl.arange(0, HEIGHT), tl.arange(0, WIDTH)
    inside = (down < n - top)[:, None] & (across < k - left)[None, :]
    corner = x_ptr + top * x_stride + left
    return tl.load(corner + down[:, None] * x_stride + across[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _store_tile(bits, data_ptr, top, left, m, k, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    down, across = tl.arange(0, HEIGHT), tl.arange(0, WIDTH)
    inside = (down < m - top)[:, None] & (across < k - left)[None, :]
    tl.store(data_ptr + top * k + left + down[:, None] * k + across[None, :], bits, mask=inside)


@triton.jit
def _magnitude(x):
    """Returns bits, which have the numbers' order; NaN is larger than infinity."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _store_inverse(scale, place, inside, MICRO: tl.constexpr):
    """scale: bits of powers of two. MICRO: only their exponents are stored."""
    if MICRO:
        tl.store(place, ((scale * -1 + TWICE) >> 23).to(tl.uint8), mask=inside)
    else:
        tl.store(place, (scale * -1 + TWICE).to(tl.float32, bitcast=True), mask=inside)


@triton.jit
def _scales_of_rows(x, inverse_ptr, top, left, n, k, STRIP: tl.constexpr, WIDTH: tl.constexpr, POWER: tl.constexpr):
    """Returns the scales of a strip's elements, for blocks along its rows, and stores their inverses."""
    down = tl.arange(0, STRIP)
    if WIDTH == SIDE:
        scale = _block_scale(tl.max(_magnitude(x), 1), POWER, False)
        # Neighbouring vectors next to each other, as GPUs read their factors.
        _store_inverse(scale, inverse_ptr + (left // WIDTH) * n + top + down, down < n - top, False)
        return scale.to(tl.float32, bitcast=True)[:, None]
    else:
        BLOCKS: tl.constexpr = SIDE // WIDTH
        scale = _block_scale(tl.max(tl.reshape(_magnitude(x), (STRIP, BLOCKS, WIDTH)), 2), POWER, True)
        width, block = tl.cdiv(k, WIDTH), left // WIDTH + tl.arange(0, BLOCKS)
        place = inverse_ptr + top * width + down[:, None] * width + block[None, :]
        _store_inverse(scale, place, (down < n - top)[:, None] & (block < width)[None, :], True)
        factors = scale.to(tl.float32, bitcast=True)[:, :, None]
        return tl.reshape(tl.broadcast_to(factors, (STRIP, BLOCKS, WIDTH)), (STRIP, SIDE))


@triton.jit
def _per_block(
    x_ptr, rows_ptr, rows_inverse_ptr, columns_ptr, columns_inverse_ptr, n, k, x_stride,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, STRIP: tl.constexpr,
    MOST: tl.constexpr, POWER: tl.constexpr, E4M3: tl.constexpr, INSTRUCTION: tl.constexpr,
):  # fmt: skip
    """A program quantizes a tile strip by strip, which keeps few numbers in registers, so that several programs share a
    multiprocessor. Where a block is higher than a strip, the tile has been read before, and comes from the cache.
    """
    SQUARE: tl.constexpr = HEIGHT > 1
    MICRO: tl.constexpr = WIDTH < SIDE  # blocks of columns are as high as a strip
    top, left = tl.program_id(1).to(tl.int64) * SIDE, tl.program_id(0).to(tl.int64) * SIDE
    across = tl.arange(0, SIDE)
    if SQUARE or (COLUMNS and not MICRO):
        amax = tl.zeros((SIDE,), tl.int32)
        for start in tl.static_range(0, SIDE, STRIP):  # unrolled: all strips are on their way at once
            x = _load_tile(x_ptr, top + start, left, n, k, x_stride, STRIP, SIDE)
            amax = tl.maximum(amax, tl.max(_magnitude(x), 0))
        if SQUARE:
            scale = _block_scale(tl.max(amax, 0), POWER, False)
            if ROWS:
                _store_inverse(scale, rows_inverse_ptr + (top // SIDE) * tl.cdiv(k, SIDE) + left // SIDE, None, False)
            if COLUMNS:
                place = columns_inverse_ptr + (left // SIDE) * tl.cdiv(n, SIDE) + top // SIDE
                _store_inverse(scale, place, None, False)
        else:
            scale = _block_scale(amax, POWER, False)
            _store_inverse(scale, columns_inverse_ptr + (top // SIDE) * k + left + across, across < k - left, False)
        factors = scale.to(tl.float32, bitcast=True)
    for start in tl.static_range(0, SIDE, STRIP):
        row = top + start
        x = _load_tile(x_ptr, row, left, n, k, x_stride, STRIP, SIDE)
        if ROWS:
            if SQUARE:
                bits = _cast(x, factors, MOST, E4M3, INSTRUCTION)
            else:
                of_rows = _scales_of_rows(x, rows_inverse_ptr, row, left, n, k, STRIP, WIDTH, POWER)
                bits = _cast(x, of_rows, MOST, E4M3, INSTRUCTION)
            _store_tile(bits, rows_ptr, row, left, n, k, STRIP, SIDE)
        if COLUMNS:
            if MICRO:
                of_columns = _block_scale(tl.max(_magnitude(x), 0), POWER, True)
                place = columns_inverse_ptr + (left + across) * tl.cdiv(n, WIDTH) + row // WIDTH
                _store_inverse(of_columns, place, (across < k - left) & (row < n), True)
                turned = _cast(x, of_columns.to(tl.float32, bitcast=True)[None, :], MOST, E4M3, INSTRUCTION)
            elif SQUARE:
                turned = _cast(x, factors, MOST, E4M3, INSTRUCTION)
            else:
                turned = _cast(x, factors[None, :], MOST, E4M3, INSTRUCTION)
            _store_tile(tl.trans(turned), columns_ptr, left, row, k, n, SIDE, STRIP)


@triton.jit
def _amaxes(x_ptr, amaxes_ptr, n, k, x_stride, BLOCK: tl.constexpr):
    """Each program takes every PARTS-th piece of a row. A maximum does not depend on an order."""
    program, places = tl.program_id(0), tl.arange(0, BLOCK)
    across = tl.cdiv(k, BLOCK)
    amax = tl.zeros((BLOCK,), tl.int32)
    for piece in range(program, n * across, PARTS):
        row, left = (piece // across).to(tl.int64), (piece % across).to(tl.int64) * BLOCK
        x = tl.load(x_ptr + row * x_stride + left + places, mask=places < k - left, other=0.0).to(tl.float32)
        amax = tl.maximum(amax, _magnitude(x))
    tl.store(amaxes_ptr + program, tl.max(amax, 0))


@triton.jit
def _fitting_scale(amax, MOST: tl.constexpr, SHRINK: tl.constexpr, LARGEST: tl.constexpr):
    """See the reference's scale_of. amax: bits. SHRINK: 2^-margin."""
    magnitude = amax.to(tl.float32, bitcast=True)
    scale = tl.div_rn(tl.full(magnitude.shape, MOST, tl.float32), magnitude) * SHRINK
    return tl.where((amax > 0) & (amax < INFINITY), tl.minimum(scale, LARGEST), 1.0)


# A layer's scale and amax lie anywhere in the tensors of all layers, and are no reason to compile again.
@triton.jit(do_not_specialize_on_alignment=["scale_ptr", "inverse_ptr", "amax_ptr"])
def _per_tensor(
    x_ptr, scale_ptr, rows_ptr, columns_ptr, inverse_ptr, amax_ptr, n, k, x_stride,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, AMAX: tl.constexpr, FITTING: tl.constexpr, SHRINK: tl.constexpr,
    MOST: tl.constexpr, LARGEST: tl.constexpr, E4M3: tl.constexpr, INSTRUCTION: tl.constexpr,
):  # fmt: skip
    """FITTING: the scale is the one for the amaxes of the matrix's parts, bits at scale_ptr."""
    top, left = tl.program_id(1).to(tl.int64) * SMALL_SIDE, tl.program_id(0).to(tl.int64) * SMALL_SIDE
    x = _load_tile(x_ptr, top, left, n, k, x_stride, SMALL_SIDE, SMALL_SIDE)
    if FITTING:
        scale = _fitting_scale(tl.max(tl.load(scale_ptr + tl.arange(0, PARTS)), 0), MOST, SHRINK, LARGEST)
    else:
        scale = tl.load(scale_ptr)
    if (top == 0) & (left == 0):
        tl.store(inverse_ptr, tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale))
    if AMAX:
        tl.atomic_max(amax_ptr, tl.max(tl.max(_magnitude(x), 1), 0), sem="relaxed")
    bits = _cast(x, scale, MOST, E4M3, INSTRUCTION)
    if ROWS:
        _store_tile(bits, rows_ptr, top, left, n, k, SMALL_SIDE, SMALL_SIDE)
    if COLUMNS:
        _store_tile(tl.trans(bits), columns_ptr, left, top, k, n, SMALL_SIDE, SMALL_SIDE)


def per_tensor(
    x: Tensor, scale: Tensor, dtype: torch.dtype, *, rows: bool, columns: bool, amax: Tensor | None = None
) -> Both:
    """Quantizes a matrix with one given scale. See PerTensor."""
    return _with_one_scale(x, scale, dtype, rows=rows, columns=columns, amax=amax)


def amaxes(x: Tensor) -> Tensor:
    """Returns the largest magnitude in each of PARTS parts of a matrix, fp32 [PARTS]."""
    flat, maxima = as_rows(x, x.shape[1]), torch.empty(PARTS.value, dtype=torch.int32, device=x.device)
    if flat.is_contiguous():
        flat = flat.view(1, flat.numel())  # pieces without gaps
    n, k = flat.shape
    _amaxes[(PARTS.value,)](flat, maxima, n, k, flat.stride(0), AMAX_BLOCK, num_warps=AMAX_WARPS)
    return maxima.view(torch.float32)


def by_amaxes(x: Tensor, amaxes: Tensor, dtype: torch.dtype, margin: int, *, rows: bool, columns: bool) -> Both:
    """Quantizes a matrix with one scale that follows from the magnitudes of its parts. See ByAmaxes."""
    return _with_one_scale(x, amaxes.view(torch.int32), dtype, rows=rows, columns=columns, margin=margin)


def _with_one_scale(
    x: Tensor,
    scale: Tensor,
    dtype: torch.dtype,
    *,
    rows: bool,
    columns: bool,
    amax: Tensor | None = None,
    margin: int | None = None,
) -> Both:
    """scale: fp32 [1]; or, with a margin, the bits of amaxes."""
    n, k = x.shape
    flat, inverse = as_rows(x, k), torch.empty(1, dtype=torch.float32, device=x.device)
    straight, turned = _bytes(flat, n, k, rows), _bytes(flat, k, n, columns)
    _per_tensor[(triton.cdiv(k, SMALL_SIDE.value), triton.cdiv(n, SMALL_SIDE.value))](
        flat, scale, straight, turned, inverse, inverse if amax is None else amax.view(torch.int32),
        n, k, flat.stride(0), rows, columns, amax is not None, margin is not None, 2.0 ** -(margin or 0),
        largest(dtype), LARGEST_SCALE, dtype == E4M3, has_instruction(), num_warps=SMALL_WARPS,
    )  # fmt: skip
    return Both(
        Quantized(straight.view(dtype), inverse, None) if rows else None,
        Quantized(turned.view(dtype), inverse, None) if columns else None,
    )


def per_block(x: Tensor, block: BlockShape, dtype: torch.dtype, *, rows: bool, columns: bool) -> Both:
    """Quantizes a matrix with one scale per block. See PerBlock.

    The factors of vectors of 128 elements have the strides that products read.
    """
    n, k = x.shape
    flat = as_rows(x, k)
    straight, turned = _bytes(flat, n, k, rows), _bytes(flat, k, n, columns)
    of_straight, of_turned = _factors(flat, n, k, block, rows), _factors(flat, k, n, block, columns)
    strip, warps = STRIPS[rows, columns]
    _per_block[(triton.cdiv(k, SIDE.value), triton.cdiv(n, SIDE.value))](
        flat, straight, of_straight, turned, of_turned, n, k, flat.stride(0), rows, columns, *block,
        MICRO_STRIP if block == MICRO else strip,
        largest(dtype), int(math.log2(largest_power(dtype))), dtype == E4M3, has_instruction(), num_warps=warps,
    )  # fmt: skip
    return Both(
        Quantized(straight.view(dtype), _in_order(of_straight, block), block) if rows else None,
        Quantized(turned.view(dtype), _in_order(of_turned, block), block) if columns else None,
    )


def _bytes(x: Tensor, m: int, k: int, wanted: bool) -> Tensor:
    """Returns memory for [m, k], or none."""
    return torch.empty((m, k) if wanted else (0,), dtype=torch.uint8, device=x.device)


def _factors(x: Tensor, m: int, k: int, block: BlockShape, wanted: bool) -> Tensor:
    """Returns memory for the factors of [m, k], or none. Those of vectors of 128 are transposed."""
    shape = triton.cdiv(m, block[0]), triton.cdiv(k, block[1])
    if block != SQUARE and block != MICRO:
        shape = shape[::-1]
    return torch.empty(
        shape if wanted else (0,), dtype=torch.uint8 if block == MICRO else torch.float32, device=x.device
    )


def _in_order(factors: Tensor, block: BlockShape) -> Tensor:
    if block == SQUARE:
        return factors
    return factors.view(torch.float8_e8m0fnu) if block == MICRO else factors.t()


def has_instruction() -> bool:
    """Whether the GPU casts to FP8."""
    if triton.knobs.runtime.interpret:
        return False
    return bool(driver.active.get_current_target().arch >= 89)
