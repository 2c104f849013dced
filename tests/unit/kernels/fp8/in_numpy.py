"""Quantization to FP8 in numpy, written from the definitions of the formats and on its own arithmetic (fp64)."""

import numpy as np
import torch

# bits of the mantissa, smallest exponent of a normal number, bias, largest number
FORMATS = {torch.float8_e4m3fn: (3, -6, 7, 448.0), torch.float8_e5m2: (2, -14, 15, 57344.0)}
LARGEST_SCALE = np.float32(2.0**126)


def cast(x, dtype):
    """fp32 -> bytes; finite numbers are clamped, and numbers that are not finite become NaN (0x7f)."""
    mantissa, smallest, bias, largest = FORMATS[dtype]
    exact = np.clip(np.nan_to_num(x).astype(np.float64), -largest, largest)
    magnitude = np.abs(exact)
    exponent = np.maximum(np.frexp(magnitude)[1] - 1, smallest)  # frexp's fractions start at one half
    units = np.rint(np.ldexp(magnitude, mantissa - exponent)).astype(np.int64)  # to the even one of two
    carried = units == 2 << mantissa
    units, exponent = np.where(carried, 1 << mantissa, units), exponent + carried
    normal = units >= 1 << mantissa
    bits = np.where(normal, (exponent + bias << mantissa) + (units - (1 << mantissa)), units)
    bits = bits | np.where(np.signbit(exact), 0x80, 0)
    return np.where(np.isfinite(x), bits, 0x7F).astype(np.uint8)


def scale_of(amax, largest, margin=0):
    """fp32: largest / amax / 2^margin."""
    amax = np.asarray(amax, np.float32)
    good = np.isfinite(amax) & (amax > 0)
    with np.errstate(over="ignore"):
        scale = np.float32(largest) / np.where(good, amax, np.float32(1.0)) / np.float32(2.0**margin)
    return np.where(good, np.minimum(scale, LARGEST_SCALE), np.float32(1.0)).astype(np.float32)


def block_scales(x, block, dtype):
    """[ceil(m / rows), ceil(k / columns)]: each block by itself."""
    (m, k), (height, width) = x.shape, block
    scales = np.empty((-(-m // height), -(-k // width)), np.float32)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            amax = np.abs(x[i * height : (i + 1) * height, j * width : (j + 1) * width]).max()
            scales[i, j] = _block_scale(amax, dtype, micro=block == (1, 32))
    return scales


def _block_scale(amax, dtype, micro):
    largest = FORMATS[dtype][3]
    if not np.isfinite(amax) or amax == 0:
        return 1.0
    if micro:
        power = int(np.floor(np.log2(largest))) - (np.frexp(np.float64(amax))[1] - 1)
    else:
        power = np.frexp(np.float64(scale_of(amax, largest)))[1] - 1
    return 2.0 ** min(power, 126)


def quantize(x, scale, dtype):
    """x fp32 times scale, which is rounded to fp32 before the cast."""
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = np.where(np.isfinite(x), np.clip(x * scale, -3e38, 3e38), x)
    return cast(scaled.astype(np.float32), dtype)


def expand(scales, block, shape):
    """A number per block -> a number per element."""
    return scales.repeat(block[0], 0).repeat(block[1], 1)[: shape[0], : shape[1]]
