"""The time of one kernel on a device: products, attention, and kernels that only move memory.

All functions take constants that are numbers or arrays of K numbers, and return seconds of the same kind.
"""

from __future__ import annotations

import math

import numpy as np

from megatron.planner.time.constants import Constants, Number
from megatron.planner.time.hardware import BF16, Device

TILE = 128  # rows and columns of a tile
RESIDENT = 2  # tiles on a processor at once
_A100_BALANCE = 312e12 / 2039e9  # FLOP per byte of memory traffic of an A100
_HEAD = 128  # channels of a head for which attention kernels are written


def gemm_seconds(
    constants: Constants,
    device: Device,
    m: float,
    n: float,
    k: float,
    *,
    precision: str = BF16,
    count: float = 1,
    in_bytes: float = 2,
    out_bytes: float = 2,
) -> Number:
    """Returns the time of `count` products [m, k] x [k, n] in one launch.

    The time is that of large products and three losses, which add up: the tiles fill the processors in waves, of which
    the last is partly empty; small matrices are read more often per operation; short sums do not hide their start and
    end. A product that moves more bytes than it has operations for is limited by the memory.
    """
    operations = 2.0 * count * m * n * k
    tiles = count * math.ceil(m / TILE) * math.ceil(n / TILE) / (device.processors * RESIDENT)
    wave = np.minimum(1.0, constants.wave) * (math.ceil(tiles) / tiles - 1)
    balance = device.flops(precision) / device.bandwidth / _A100_BALANCE
    narrow = constants.edge * balance / min(m, n)
    shallow = constants.depth / k
    best = constants.gemm if precision == BF16 else constants.gemm_fp8
    if device.architecture == "blackwell":
        best = best * constants.gemm_blackwell
    rate = device.flops(precision) * device.share(precision) * best / (1 + wave + narrow + shallow)
    traffic = count * (in_bytes * (m * k + k * n) + out_bytes * m * n)
    return np.maximum(operations / rate, traffic / (constants.bandwidth * device.bandwidth))


def attention_rate(constants: Constants, device: Device) -> Number:
    """Returns FLOP/s of fused causal attention over long sequences."""
    by_architecture = {"ampere": constants.attention_ampere, "blackwell": constants.attention_blackwell}
    best = by_architecture.get(device.architecture, constants.attention_third)
    return device.flops(BF16) * device.share(BF16) * device.exponentials * best


def attention_seconds(constants: Constants, rate: Number, operations: float, keys: float, head_dim: int) -> Number:
    """Returns the time of fused attention.

    rate: FLOP/s over long sequences. operations: those that a causal mask leaves. keys: length of the sequence.
    """
    narrow = min(1.0, head_dim / _HEAD) ** 0.5
    return operations / (rate * narrow) * (1 + constants.short / keys)


def traffic_seconds(constants: Constants, device: Device, nbytes: float) -> Number:
    """Returns the time of kernels that read and write `nbytes`."""
    return nbytes / (constants.bandwidth * device.bandwidth)
