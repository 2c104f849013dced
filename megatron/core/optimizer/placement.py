"""Which chunks are far under --optimizer-offload-policy auto: a cost model, and decisions that do not flutter. Pure.

[Note: what a far chunk costs]
Far chunks are updated one after the other in forward order. A chunk has until its bucket is read: with overlap that is the
forward time of all that lies before it, without it the end of the step. What ends later than it is needed holds the step
up, and the largest such delay is what the far chunks cost. So two things decide, and size alone does not: how much work is
far, and how late it is needed. The latest needed go first, the earliest needed come back first (the order in which jobs with
deadlines miss the least: Jackson, "Scheduling a production line to minimize maximum tardiness", 1955).

[Note: when chunks move]
`free` is what was left on the device at the peak of the step that just ended, so it falls with longer samples and rises
again after them. Below the threshold chunks leave until the threshold would be free. They come back only while twice the
threshold would stay free, and only if the step gains by it: hidden work may stay where it is. What lies between is left
alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

GAIN = 0.01  # of the far work's time: less is not worth a move


@dataclass(frozen=True)
class Rates:
    """Measured at start-up. Bytes a second out of and into the device, elements a second of the CPU's update."""

    out: float
    into: float
    update: float

    def seconds(self, elements: int, result_bytes: int, *, overlap: bool) -> float:
        """One far chunk. With overlap its gradient comes during backward and costs nothing here."""
        gradient = 0.0 if overlap else 4 * elements / self.out
        return gradient + elements / self.update + result_bytes / self.into


@dataclass(frozen=True)
class Candidate:
    """A chunk, by what matters here. device_bytes: of its state when near. seconds: of its far update.

    slack: seconds from the end of the step until the next forward reads it.
    """

    device_bytes: int
    seconds: float
    slack: float


def delay(candidates: Sequence[Candidate], far: Sequence[bool]) -> float:
    """Seconds by which these far chunks hold up a step. `candidates` in forward order."""
    done = worst = 0.0
    for candidate, is_far in zip(candidates, far, strict=True):
        done += candidate.seconds * is_far
        worst = max(worst, (done - candidate.slack) * is_far)
    return worst


def place(candidates: Sequence[Candidate], far: Sequence[bool], free: int, threshold: int) -> list[bool]:
    """Which chunks are far from now on; see the notes. `candidates` in forward order, `far`: as they are now."""
    found = list(far)
    for number in reversed(range(len(candidates))):
        if free >= threshold:
            break
        if not found[number]:
            found[number] = True
            free += candidates[number].device_bytes
    if found != list(far):
        return found
    for number, candidate in enumerate(candidates):
        left = free - candidate.device_bytes
        if not found[number] or left < 2 * threshold:
            continue
        nearer = [*found[:number], False, *found[number + 1 :]]
        if delay(candidates, found) - delay(candidates, nearer) >= GAIN * candidate.seconds:
            found, free = nearer, left
    return found
