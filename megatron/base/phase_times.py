"""How long a rank stays in the phases of a run, and from which time on a stay is remarkable.

A phase of the heartbeat is measured from its beginning to the next change of phase: what lies between two phases of a
step counts as a stay in the phase around them.
"""

from __future__ import annotations

import time
from collections import deque

RECENT = 100  # stays of a phase that are remembered
# Every step has these, for about the same time. The time of others, such as saves, varies by nature.
STEP_PHASES = frozenset({"batch-generator", "forward-backward", "all-grads-sync", "optimizer", "read-step"})


class PhaseTimes:
    """The recent stays in each phase, and the limit that follows from them.

    A limit is `factor` times the longest recent stay, and at least `floor` seconds in the phases of a step, `rare_floor`
    in others. A phase has none before it has been left `warmup` + 1 times, and its first `warmup` stays do not count:
    they compile, allocate and connect.
    """

    def __init__(
        self, phase: str, *, factor: float = 5.0, floor: float = 10.0, rare_floor: float = 600.0, warmup: int = 5
    ) -> None:
        """phase: the first one, which begins now."""
        self.factor, self.floor, self.rare_floor, self.warmup = factor, floor, rare_floor, warmup
        self.of_step = STEP_PHASES
        self.phase, self.since = phase, time.monotonic()
        self._counts: dict[str, int] = {}
        self._recent: dict[str, deque[float]] = {}

    def change(self, phase: str) -> None:
        """Ends the stay in the current phase, and begins one in another."""
        now = time.monotonic()
        self._add(self.phase, now - self.since)
        self.phase, self.since = phase, now

    def longest(self, phase: str) -> float | None:
        """Returns the seconds of the longest recent stay that counts."""
        recent = self._recent.get(phase)
        return max(recent) if recent else None

    def limit(self, phase: str) -> float | None:
        """Returns the seconds after which a stay is remarkable; None as long as too few stays are known."""
        longest = self.longest(phase)
        floor = self.floor if phase in self.of_step else self.rare_floor
        return None if longest is None else max(floor, self.factor * longest)

    def _add(self, phase: str, seconds: float) -> None:
        count = self._counts[phase] = self._counts.get(phase, 0) + 1
        if count > self.warmup:
            self._recent.setdefault(phase, deque(maxlen=RECENT)).append(seconds)
