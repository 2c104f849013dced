"""Intervals of the numbers that flags accept, for training and for the tools."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Interval:
    """A set of accepted numbers, and its description after "must be". Infinity and NaN are never accepted."""

    words: str
    _holds: Callable[[float], bool]

    def holds(self, value: float) -> bool:
        """Returns whether `value` is accepted."""
        return (isinstance(value, int) or math.isfinite(value)) and self._holds(value)


def between(low: int, high: int) -> Interval:
    """Returns the interval that includes both ends."""
    return Interval(f"from {low} to {high}", lambda x: low <= x <= high)


POSITIVE = Interval("above 0", lambda x: x > 0)
NOT_NEGATIVE = Interval("0 or more", lambda x: x >= 0)
BELOW_ONE = Interval("at least 0 and below 1", lambda x: 0 <= x < 1)
BELOW_HALF = Interval("at least 0 and below 0.5", lambda x: 0 <= x < 0.5)
BELOW_HUNDRED = Interval("at least 0 and below 100", lambda x: 0 <= x < 100)
FRACTION = Interval("from 0 to 1", lambda x: 0 <= x <= 1)
SHARE = Interval("above 0 and at most 1", lambda x: 0 < x <= 1)
ABOVE_ONE = Interval("above 1", lambda x: x > 1)
AT_LEAST_ONE = Interval("1 or more", lambda x: x >= 1)
ZERO, NEGATIVE = Interval("0", lambda x: x == 0), Interval("below 0", lambda x: x < 0)
# Larger than any realistic value, and small enough that no product of sizes overflows and a typing error does not
# exhaust the machine: sizes of tensors, counts, processes, and layers, each of which is an object.
SIZE, SIZE_OR_NONE = between(1, 2**27), between(0, 2**27)
COUNT, COUNT_OR_NONE = between(1, 10**12), between(0, 10**12)
WORKERS, WORKERS_OR_NONE = between(1, 1024), between(0, 1024)
RANKS = between(1, 1_000_000)
LAYERS, LAYERS_OR_NONE = between(1, 10_000), between(0, 10_000)
SCORE = between(-1_000_000, 1_000_000)
SEED = between(0, 2**31 - 1)
MINUTES = Interval("above 0 and at most 1000000", lambda x: 0 < x <= 1_000_000)
