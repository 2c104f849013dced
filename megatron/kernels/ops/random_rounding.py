"""Rounds fp32 to bf16 at random: up with a probability that equals the dropped part, so that the expectation is right.

What is added again and again, and is small, would be lost for ever by rounding to nearest. The random bits are a hash
of a key and of an element's index in the global tensor. So they depend neither on the layout nor on the device.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

import torch
from torch import Tensor

from megatron.kernels.ops.hash32 import hash32_, wrapped
from megatron.spec.parameter import Section
from megatron.spec.work_space import ROUNDED_AT_ONCE


def round_at_random(values: Tensor, random_bits: Tensor, out: Tensor) -> None:
    """Rounds fp32 [n] to one of the two neighbours in bf16; exact values stay, and so do NaNs and infinities.
    `random_bits`, int32 [n] of which 16 bits are used, is overwritten."""
    # The bits of a NaN could overflow to a number.
    bits = random_bits.bitwise_and_(0xFFFF).mul_(values.isfinite()).add_(values.view(torch.int32))
    out.view(torch.int16).copy_(bits.bitwise_right_shift_(16))


def round_in_blocks(values: Tensor, out: Tensor, random_bits: Callable[[int, int], Tensor]) -> None:
    """Rounds fp32 [n] to bf16 [n] at random, with little work space.

    random_bits(first, last): returns int32 [last - first] for these elements.
    """
    block = ROUNDED_AT_ONCE[values.device.type]
    for first in range(0, len(values), block):
        last = min(first + block, len(values))
        round_at_random(values[first:last], random_bits(first, last), out[first:last])


def section_bits(
    key: str, global_shape: tuple[int, ...], section: Section, device: torch.device, first: int, last: int
) -> Tensor:
    """Returns int32 [last - first] of random bits for these elements of a section of a global tensor."""
    start = int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "little")
    return hash32_(_global_index(global_shape, section, first, last, start, device))


def _global_index(
    global_shape: tuple[int, ...], section: Section, first: int, last: int, key: int, device: torch.device
) -> Tensor:
    """Returns the indices of elements first to last of a section in the flat global tensor, plus `key`, modulo 2^32."""
    shift = sum(start * math.prod(global_shape[dim + 1 :]) for dim, start in enumerate(section.offset)) + key
    cut = max((dim for dim, (n, whole) in enumerate(zip(section.shape, global_shape)) if n != whole), default=0)
    if math.prod(section.shape[:cut]) == 1:  # one run of the global tensor
        return torch.arange(last - first, dtype=torch.int32, device=device).add_(wrapped(first + shift))
    inner, whole = math.prod(section.shape[cut:]), math.prod(global_shape[cut:])
    local = torch.arange(first, last, device=device)
    index = local + torch.div(local, inner, rounding_mode="floor") * (whole - inner)
    return index.to(torch.int32).add_(wrapped(shift))
