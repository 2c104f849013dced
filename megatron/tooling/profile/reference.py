"""How fast the processor is while something else is measured.

The speed of a processor varies: by heat, by power, and on a virtual machine by what its neighbours compute, where a
fifth within some seconds is common. So one and the same layer is measured in turn with every other figure, which is
then taken relative to it.
"""

from __future__ import annotations

import statistics

from megatron.tooling.profile.budget import WARM_UPS, calls_of
from megatron.training.probe import Probe

_IDLE_FACTOR = 1.3  # the device idles so many times as long as the host needs to queue a probe


def pace(probe: Probe) -> tuple[int, float]:
    """Returns the calls of one repeat, and for how many seconds the device idles before each of them.

    The first of two calls, which does not count, also chooses kernels.
    """
    probe.laps()
    laps = probe.laps()
    return calls_of(laps.host > 0, laps.seconds), _IDLE_FACTOR * laps.host


class Reference:
    """The layer that is measured in turn with others."""

    def __init__(self, probe: Probe) -> None:
        self._probe = probe
        self._calls, self._idle = pace(probe)
        self._seconds: list[float] = []

    def __len__(self) -> int:
        return len(self._seconds)

    def measure(self) -> None:
        """Measures it once more."""
        self._seconds.append(statistics.fmean(self._probe.laps(self._idle).seconds for _ in range(self._calls)))

    def since(self, first: int) -> float:
        """Returns the median seconds of those from number `first` on, after the warm-up."""
        return statistics.median(self._seconds[first + WARM_UPS :])

    @property
    def seconds(self) -> float:
        """The median seconds of all."""
        return statistics.median(self._seconds)
