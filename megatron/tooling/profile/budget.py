"""How long measuring may take, and how one figure is measured: warm-up, repeats, the median and its spread."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

WARM_UPS = 2
LEAST, MOST = 5, 40  # repeats
_QUARTERS = 4


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
