"""Runs the parts of the checklist, each in a process of its own, within a limit of time. No torch.

A part's process leads a session. When it ends, hangs or crashes, its process group is killed, so nothing that a case
started lives on. After a hang or a crash a new process runs the cases that are left.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu.parts import Part
from benchmarks.gpu.record import CRASHED, SKIPPED, START, TIMEOUT, Record

ROOT = Path(__file__).resolve().parents[2]
LOG = "log.txt"
LEAST_SECONDS = 5.0  # a process that has less left is not started
EXIT_SECONDS = 5.0  # a process may take between its last line and its end
LOOK_SECONDS = 0.5  # between looks whether a silent process is still there
TAIL = 300  # characters of the log that the record of a crash quotes


@dataclass
class Progress:
    """The events of a part's processes: all its cases, those that have a record, and the one that runs."""

    names: list[str] = field(default_factory=list)
    done: list[str] = field(default_factory=list)
    running: str | None = None
    limit: float = 0.0  # monotonic time at which the running case is too late
    begun: float = 0.0
    ended: bool = False

    def take(self, event: dict[str, Any]) -> Record | None:
        """Takes an event, and returns the record that it carries, if any."""
        if "cases" in event:
            self.names = event["cases"]
        elif "begin" in event:
            self.running, self.begun = event["begin"], time.monotonic()
            self.limit = self.begun + event["limit"]
        elif "record" in event:
            self.running = None
            self.done.append(event["record"]["case"])
            return Record(**event["record"])
        else:
            self.ended = True
        return None

    @property
    def left(self) -> list[str]:
        """Names of the cases without a record."""
        return [name for name in self.names if name not in self.done]


@dataclass(frozen=True)
class Driver:
    """Runs parts. out: the folder of the results, which exists. toy: toy sizes, on the CPU."""

    out: Path
    device: str
    toy: bool

    def run(
        self, parts: Sequence[tuple[Part, set[str]]], deadline: float, report: Callable[[Record], None]
    ) -> list[Record]:
        """Runs the parts, with their chosen cases (none: all of them), until `deadline`, of monotonic time.

        Calls `report` with each record, and returns them. A part may take the time that later parts are not planned to
        need; at toy size all that is left, because the plan is for a GPU.
        """
        records: list[Record] = []
        for number, (part, only) in enumerate(parts):
            left = deadline - time.monotonic()
            spare = left - sum(each.seconds for each, _ in parts[number:])
            seconds = left if self.toy else min(left, part.seconds + max(0.0, spare))
            for record in self._run_part(part, only, seconds):
                records.append(record)
                report(record)
        return records

    def _run_part(self, part: Part, only: set[str], seconds: float) -> Iterator[Record]:
        """Yields a record of each case of the part."""
        end, progress = time.monotonic() + seconds, Progress()
        if seconds < LEAST_SECONDS:
            yield Record(part.letter, START, SKIPPED, 0.0, f"{max(0.0, seconds):.0f} s were left for this part")
            return
        while True:
            before = len(progress.done)
            log_size = self._log_size()
            yield from self._run_process(part, only, end, progress)
            if progress.ended:
                return
            late, taken = time.monotonic() >= end, time.monotonic() - progress.begun
            if progress.running is not None:
                why = TIMEOUT if time.monotonic() >= min(end, progress.limit) else CRASHED
                text = "the part's time ran out" if late else f"ended after {taken:.0f} s"
                if why == CRASHED:
                    text = f"its process ended; the last output: {self._tail(log_size)}"
                yield Record(part.letter, progress.running, why, round(taken, 2), text)
                progress.done.append(progress.running)
                progress.running = None
            elif late and not progress.names:
                yield Record(part.letter, START, TIMEOUT, round(seconds, 2), "the part's time ran out")
            elif len(progress.done) == before and not late:
                text = f"its process ended without a case; the last output: {self._tail(log_size)}"
                yield Record(part.letter, START, CRASHED, 0.0, text)
                late = True
            if late or end - time.monotonic() < LEAST_SECONDS:
                for name in progress.left:
                    yield Record(part.letter, name, SKIPPED, 0.0, "no time was left for this part")
                return
            if not progress.left:
                return

    def _run_process(self, part: Part, only: set[str], end: float, progress: Progress) -> Iterator[Record]:
        """Runs one process of a part until it ends or is late; yields the records that it reports."""
        readable, writable = os.pipe()
        command = [sys.executable, "-m", "benchmarks.gpu.part_process", part.letter, part.module]
        command += ["--events", str(writable), "--seconds", f"{end - time.monotonic():.1f}", "--device", self.device]
        command += ["--out", str(self.out), "--done", json.dumps(progress.done), "--only", json.dumps(sorted(only))]
        command += ["--toy"] if self.toy else []
        with open(self.out / LOG, "ab") as log:
            process = subprocess.Popen(
                command, cwd=ROOT, env=_environment(), stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                pass_fds=[writable], start_new_session=True,
            )  # fmt: skip
        os.close(writable)

        def late() -> float:
            return min(end, progress.limit) if progress.running else end

        try:
            for event in _events(readable, process.pid, late):
                record = progress.take(event)
                if record is not None:
                    yield record
                if progress.ended:
                    break
            else:
                until = min(late(), time.monotonic() + EXIT_SECONDS)
                while time.monotonic() < until and not _has_ended(process.pid):  # its last words belong to the log
                    time.sleep(0.05)
        finally:
            os.close(readable)
            # The leader is still there, at least as a zombie, so this number is its group's and nobody else's.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _log_size(self) -> int:
        log = self.out / LOG
        return log.stat().st_size if log.exists() else 0

    def _tail(self, since: int) -> str:
        """Returns the end of the output since the log had so many bytes, on one line."""
        with open(self.out / LOG, "rb") as log:
            log.seek(max(since, self._log_size() - TAIL))
            return " ".join(log.read().decode(errors="replace").split()) or "(none)"


def _events(readable: int, pid: int, late: Callable[[], float]) -> Iterator[dict[str, Any]]:
    """Yields the JSON lines of a child, until it closes the pipe or has ended, or until the monotonic time `late()`.

    The pipe of a child that crashed stays open if it forked a process that lives on.
    """
    rest = b""
    while (seconds := late() - time.monotonic()) > 0.0:
        ended = _has_ended(pid)
        if not select.select([readable], [], [], min(seconds, LOOK_SECONDS))[0]:
            if ended:
                return
            continue
        chunk = os.read(readable, 1 << 16)
        if not chunk:
            return
        *lines, rest = (rest + chunk).split(b"\n")
        yield from map(json.loads, lines)


def _has_ended(pid: int) -> bool:
    """Returns whether a child has ended. It stays a zombie."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _environment() -> dict[str, str]:
    """Returns the environment of a part: this source tree first on the path, and its output at once."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
