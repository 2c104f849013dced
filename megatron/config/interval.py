"""Which numbers a flag takes, of training and of the tools alike."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Interval:
    """Numbers that pass, and how to say it after "must be". Infinity and NaN never pass."""

    words: str
    _holds: Callable[[float], bool]

    def holds(self, value: float) -> bool:
        """Whether `value` passes."""
        return (isinstance(value, int) or math.isfinite(value)) and self._holds(value)


def between(low: int, high: int) -> Interval:
    """Both ends pass."""
    return Interval(f"from {low} to {high}", lambda x: low <= x <= high)


POSITIVE = Interval("above 0", lambda x: x > 0)
NOT_NEGATIVE = Interval("0 or more", lambda x: x >= 0)
BELOW_ONE = Interval("at least 0 and below 1", lambda x: 0 <= x < 1)
FRACTION = Interval("from 0 to 1", lambda x: 0 <= x <= 1)
SHARE = Interval("above 0 and at most 1", lambda x: 0 < x <= 1)
ABOVE_ONE = Interval("above 1", lambda x: x > 1)
AT_LEAST_ONE = Interval("1 or more", lambda x: x >= 1)
# Far above what anybody uses, and low enough that neither a product of sizes overflows nor a machine is taken down by a
# slip of the finger: sizes of tensors, things that are counted off one by one, processes, and layers, each of which is
# an object.
SIZE, SIZE_OR_NONE = between(1, 2**27), between(0, 2**27)
COUNT, COUNT_OR_NONE = between(1, 10**12), between(0, 10**12)
WORKERS, WORKERS_OR_NONE = between(1, 1024), between(0, 1024)
RANKS = between(1, 1_000_000)
LAYERS = between(1, 10_000)
SEED = between(0, 2**31 - 1)
MINUTES = Interval("above 0 and at most 1000000", lambda x: 0 < x <= 1_000_000)
