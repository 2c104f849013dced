"""When a rank does its work, by row: compute, each kind of communication, the update. Drawn by Perfetto or
chrome://tracing.

On the CPU a span is two readings of the host's clock. On CUDA it is two events on the stream that is current where the
span begins and ends, so it shows when the device did the work, not when it was queued.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

_CYCLES_PER_SECOND = 2e9  # of a device's clock, about
# Others follow these: pipeline messages have a row per direction, as "pp 0>1", and waits one per group, as "wait tp".
ROWS = ("iteration", "compute", "step", "tp", "cp", "reduce-scatter", "all-reduce", "all-gather")


@dataclass(frozen=True)
class FinishedSpan:
    """A finished span: seconds since the timeline began."""

    row: str
    name: str
    start: float
    stop: float


class Stopwatch:
    """Measures how long the device takes from one place of a program to another, again and again, without waiting for
    it.

    On CUDA the host reaches these places before the device does, so the answer is that of an earlier interval.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._begun: Any = None
        self._running: deque[tuple[Any, Any]] = deque()  # pairs of events, of which the device has not passed the later
        self._seconds: float | None = None

    def start(self) -> None:
        """The interval begins behind everything that is queued on the current stream."""
        self._begun = _now(self._device)

    def stop(self) -> float | None:
        """It ends behind everything that is queued. Returns the seconds of the latest interval that is over, on the CPU
        of this one; None while there is none."""
        if self._begun is not None:
            self._running.append((self._begun, _now(self._device)))
            self._begun = None
        while self._running and (self._device.type != "cuda" or self._running[0][1].query()):
            self._seconds = _seconds(self._device, *self._running.popleft())
        return self._seconds


@dataclass(frozen=True)
class Lap:
    """Seconds that a piece of work took the device, and that the host took to queue it (0 on the CPU)."""

    device: float
    host: float


def laps(device: torch.device, pieces: Sequence[Callable[[], object]], *, idle: float = 0.0) -> list[Lap]:
    """Runs pieces of work one after the other, and returns the time of each. The host waits for the device before and
    after.

    idle: seconds for which the device is kept busy first. With as many as the host needs to queue everything, the
    device never waits for the host, and its times are those of its kernels.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        if idle:
            torch.cuda._sleep(int(idle * _CYCLES_PER_SECOND))
    points, queued = [_now(device)], [time.perf_counter()]
    for piece in pieces:
        piece()
        points.append(_now(device))
        queued.append(time.perf_counter())
    on_cuda = device.type == "cuda"
    if on_cuda:
        torch.cuda.synchronize(device)
    ends = itertools.pairwise(points)
    hosts = itertools.pairwise(queued)
    return [
        Lap(_seconds(device, *both), after - before if on_cuda else 0.0)
        for both, (before, after) in zip(ends, hosts, strict=True)
    ]


def _now(device: torch.device) -> Any:
    """Returns a point in time, of the device or the host."""
    if device.type == "cuda":
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
    return time.perf_counter()


def _seconds(device: torch.device, start: Any, stop: Any) -> float:
    """Returns the time between two points, which the device has passed."""
    return float(start.elapsed_time(stop)) / 1e3 if device.type == "cuda" else float(stop - start)


class Span:
    """Work that has begun. `end` marks its end; more than one thread may use spans of their own at once."""

    def __init__(self, timeline: Timeline, row: str, name: str) -> None:
        self._timeline, self._row, self.name = timeline, row, name
        self._start = timeline.now()

    def end(self) -> None:
        """The work is done, or all of it is queued on the current stream."""
        self._timeline.keep(self._row, self.name, self._start, self._timeline.now())


class Recording:
    """The spans of a timeline that has ended, which the host may read when the device has passed them."""

    def __init__(self, device: torch.device, origin: Any, spans: Sequence[tuple[str, str, Any, Any]]) -> None:
        self._device, self._origin, self._spans = device, origin, spans

    def read(self) -> list[FinishedSpan]:
        """Returns the spans, by start. Waits for the device until it has passed the last one."""
        if self._device.type == "cuda":
            for _, _, _, stop in self._spans:
                stop.synchronize()
        spans = [
            FinishedSpan(row, name, self._since(start), self._since(stop)) for row, name, start, stop in self._spans
        ]
        return sorted(spans, key=lambda span: span.start)

    def _since(self, point: Any) -> float:
        return _seconds(self._device, self._origin, point)


class Timeline:
    """Collects spans between `start` and `stop`; costs next to nothing outside of them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.recording = False
        self._origin: Any = None
        self._spans: list[tuple[str, str, Any, Any]] = []
        self._rows: tuple[str, ...] = ("",)

    def start(self, rows: tuple[str, ...] = ("",)) -> None:
        """Begin to record. All ranks call it at the same moment if times of different ranks are compared. rows: the
        beginnings of the names of the rows that are recorded, by default all."""
        self._spans, self._rows = [], rows
        self._origin = self.now()
        self.recording = True

    def stop(self) -> list[FinishedSpan]:
        """End recording; the spans, by start. Spans that have not ended are left out. Synchronizes the device."""
        recording = self.close()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return recording.read()

    def close(self) -> Recording:
        """End recording as `stop` does, without waiting for the device."""
        self.recording = False
        return Recording(self._device, self._origin, self._spans)

    def begin(self, row: str, name: str) -> Span | None:
        """A span of `row`, or None when it is not recorded."""
        return Span(self, row, name) if self.recording and row.startswith(self._rows) else None

    @contextlib.contextmanager
    def span(self, row: str, name: str) -> Iterator[None]:
        """The body is one span."""
        span = self.begin(row, name)
        yield
        if span is not None:
            span.end()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """In the body nothing is recorded."""
        was_recording, self.recording = self.recording, False
        yield
        self.recording = was_recording

    def now(self) -> Any:
        """A point in time, of the device or the host."""
        return _now(self._device)

    def keep(self, row: str, name: str, start: Any, stop: Any) -> None:
        """Add a finished span, unless recording has stopped meanwhile."""
        if self.recording:
            self._spans.append((row, name, start, stop))


def in_sequence(spans: Sequence[FinishedSpan]) -> list[FinishedSpan]:
    """Spans of one row without overlap: a transfer queued behind another begins where that one ends."""
    clipped: list[FinishedSpan] = []
    end = 0.0
    for span in sorted(spans, key=lambda span: span.stop):
        clipped.append(FinishedSpan(span.row, span.name, min(max(span.start, end), span.stop), span.stop))
        end = span.stop
    return clipped


def write_chrome_trace(path: Path, ranks: Sequence[Sequence[FinishedSpan]]) -> None:
    """One process per rank and one thread per row, in the trace-event format's JSON. Raises OSError."""
    events: list[dict[str, Any]] = []
    for rank, spans in enumerate(ranks):
        events.append({"name": "process_name", "ph": "M", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}})
        seen = {span.row for span in spans}
        for number, row in enumerate([*ROWS, *sorted(seen.difference(ROWS))]):
            of_row = [span for span in spans if span.row == row]
            if not of_row:
                continue
            events.append({"name": "thread_name", "ph": "M", "pid": rank, "tid": number, "args": {"name": row}})
            shown = of_row if row == "compute" else in_sequence(of_row)
            events += [
                {
                    "name": span.name,
                    "cat": row,
                    "ph": "X",
                    "ts": round(span.start * 1e6, 1),
                    "dur": round((span.stop - span.start) * 1e6, 1),
                    "pid": rank,
                    "tid": number,
                }
                for span in shown
            ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
