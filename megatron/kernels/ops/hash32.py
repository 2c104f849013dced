"""A 32-bit hash, for random numbers that depend on an index alone."""

from __future__ import annotations

from torch import Tensor


def hash32_(x: Tensor) -> Tensor:
    """Christopher Wellons' "lowbias32" of int32, in place. torch's multiplication wraps; its >> is arithmetic, so mask
    it.
    """
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    x *= 0x7FEB352D
    x ^= (x >> 15).bitwise_and_(0x1FFFF)
    x *= wrapped(0x846CA68B)
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    return x


def wrapped(number: int) -> int:
    """Returns the int32 with the number's lower 32 bits."""
    return (number + (1 << 31)) % (1 << 32) - (1 << 31)
