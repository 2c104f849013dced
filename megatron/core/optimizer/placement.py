"""Chooses the chunks that the CPU updates under --optimizer-offload-policy auto: a cost model, and hysteresis. Pure.

[Note: cost of a CPU chunk] The CPU updates its chunks one after the other in forward order. With overlap a chunk has
time until the next forward reads its bucket, which is the forward time of all layers before it; without overlap only
until the end of the step. An update that ends too late delays the step, and the largest such delay is the cost of all
CPU chunks. So the cost depends on how much work the CPU has and on how late its results are needed, not on sizes alone.
The chunks that are needed last are offloaded first, and those that are needed first return first (the order that
minimises the largest tardiness: Jackson, "Scheduling a production line to minimize maximum tardiness", 1955).

[Note: when chunks move] `free` is the device memory that was left at the peak of the step that has just ended, so it
falls with longer samples and rises again after them. Below the threshold, chunks are offloaded until the threshold
would be free. They return only while twice the threshold would stay free, and only if the step becomes faster by it:
overlapped work may stay where it is. Between the two thresholds nothing moves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

GAIN = 0.01  # of the chunk's update time: a smaller gain is not worth a move


@dataclass(frozen=True)
class Rates:
    """Rates that were measured at start-up: bytes per second to the host and to the device, and elements per second of
    the CPU's update."""

    to_host: float
    to_device: float
    update: float

    def seconds(self, elements: int, result_bytes: int, *, overlap: bool) -> float:
        """Returns the seconds to update one chunk on the CPU, without the copy of its gradient if backward overlaps
        it."""
        gradient = 0.0 if overlap else 4 * elements / self.to_host
        return gradient + elements / self.update + result_bytes / self.to_device


@dataclass(frozen=True)
class Candidate:
    """A chunk's properties that decide its placement.

    device_bytes: bytes of its state on the device. seconds: time of its update on the CPU. slack: seconds from the end
    of the step until the next forward reads its parameters.
    """

    device_bytes: int
    seconds: float
    slack: float


def delay(candidates: Sequence[Candidate], on_cpu: Sequence[bool]) -> float:
    """Returns the seconds by which the CPU's chunks delay a step. `candidates`: in forward order."""
    done = worst = 0.0
    for candidate, offloaded in zip(candidates, on_cpu, strict=True):
        done += candidate.seconds * offloaded
        worst = max(worst, (done - candidate.slack) * offloaded)
    return worst


def place(candidates: Sequence[Candidate], on_cpu: Sequence[bool], free: int, threshold: int) -> list[bool]:
    """Returns which chunks the CPU updates from now on; see the notes.

    candidates: in forward order. on_cpu: which of them it updates now.
    """
    placed = list(on_cpu)
    for number in reversed(range(len(candidates))):
        if free >= threshold:
            break
        if not placed[number]:
            placed[number] = True
            free += candidates[number].device_bytes
    if placed != list(on_cpu):
        return placed
    for number, candidate in enumerate(candidates):
        left = free - candidate.device_bytes
        if not placed[number] or left < 2 * threshold:
            continue
        returned = [*placed[:number], False, *placed[number + 1 :]]
        if delay(candidates, placed) - delay(candidates, returned) >= GAIN * candidate.seconds:
            placed, free = returned, left
    return placed
