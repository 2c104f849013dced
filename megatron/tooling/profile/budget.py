"""How long measuring may take, and how one figure is measured: warm-up, repeats, the median and its spread."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

WARM_UPS = 2
LEAST, MOST = 5, 40  # repeats
# [Note: long enough on the CPU]
# A rank that is held to a share of a core computes at full speed for some milliseconds, and then not at all for some.
# So a figure of the CPU is a mean over as many calls as take this long together, and only then a median over such
# means.
_LONG_ENOUGH = 0.03  # seconds
_MOST_CALLS = 2000
_QUARTERS = 4


def calls_of(on_cuda: bool, seconds: float) -> int:
    """Returns how many calls of `seconds` each make one repeat; see the note."""
    return 1 if on_cuda else max(1, min(_MOST_CALLS, math.ceil(_LONG_ENOUGH / max(seconds, 1e-9))))


class Budget:
    """Seconds for all measurements, and a list of those that were left out."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.left_out: list[str] = []
        self._started = time.monotonic()

    @property
    def used(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self._started

    def allows(self, what: str, share: float) -> bool:
        """Whether less than this share of the time is used; else `what` is noted as left out."""
        if self.used <= share * self.seconds:
            return True
        self.left_out.append(what)
        return False

    def of_one(self) -> float:
        """Seconds for the repeats of one figure."""
        return self.seconds / 300


@dataclass(frozen=True)
class Sample:
    """The median of repeats, and half the distance between their quartiles divided by the median."""

    median: float
    spread: float

    @classmethod
    def of(cls, values: list[float]) -> Sample:
        """Returns the sample of at least two values."""
        median = statistics.median(values)
        low, _, high = statistics.quantiles(values, n=_QUARTERS, method="inclusive")
        return cls(median, (high - low) / 2 / median if median > 0 else 0.0)


def repeat(once: Callable[[], None], seconds: float) -> None:
    """Calls `once` for warm-up, and then LEAST to MOST times, for about `seconds`. It keeps its own figures."""
    for _ in range(WARM_UPS):
        once()
    started = time.monotonic()
    for number in range(MOST):
        if number >= LEAST and time.monotonic() - started > seconds:
            return
        once()


def timed(once: Callable[[], float], seconds: float) -> Sample:
    """Returns the sample of what `once` returns."""
    values: list[float] = []
    repeat(lambda: values.append(once()), seconds)
    return Sample.of(values[WARM_UPS:])
