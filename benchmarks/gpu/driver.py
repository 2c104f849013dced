"""Runs the cases of the checklist in processes, within a limit of time. No torch.

Each process leads a session. When it ends, hangs or crashes, its process group is killed, so nothing that a case
started lives on. After a hang or a crash another process runs the cases that are left.
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
from typing import Any, NamedTuple

from benchmarks.gpu.parts import START_SECONDS, Part, Planned, processes
from benchmarks.gpu.record import CRASHED, SKIPPED, START, TIMEOUT, Record
from megatron.base.cuda_environment import set_allocator, set_cudnn
from megatron.base.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
LOG = "log.txt"
LIST_SECONDS = 120.0  # to import all parts, also from a disk that was not read before
OPENING_SECONDS = 60.0  # a process may take before its first case
EXIT_SECONDS = 5.0  # a process may take between its last line and its end
LOOK_SECONDS = 0.5  # between looks whether a silent process is still there
TAIL = 300  # characters of the log that the record of a crash quotes


class Listing(NamedTuple):
    """What the first process finds: whether torch sees a GPU, the cases of all parts, and records of parts without
    any."""

    gpu: bool
    cases: list[Planned]
    broken: list[Record]


@dataclass
class Progress:
    """The events of a process: the cases that have a record, and the one that runs."""

    recorded: set[str] = field(default_factory=set)
    running: str | None = None
    limit: float = 0.0  # monotonic time at which the running case is too late
    begun: float = 0.0
    ended: bool = False

    def take(self, event: dict[str, Any]) -> Record | None:
        """Takes an event, and returns the record that it carries, if any."""
        if "begin" in event:
            self.running, self.begun = event["begin"], time.monotonic()
            self.limit = self.begun + event["limit"]
        elif "record" in event:
            self.running = None
            self.recorded.add(event["record"]["case"])
            return Record(**event["record"])
        else:
            self.ended = True
        return None


@dataclass(frozen=True)
class Driver:
    """Runs cases. out: the folder of the results, which exists. toy: toy sizes, on the CPU. site: a folder of
    packages."""

    out: Path
    device: str
    toy: bool
    site: Path | None = None

    def listed(self, parts: Sequence[Part]) -> Listing:
        """Returns the cases of the parts. Raises ConfigError if this Python cannot list them."""
        command = [sys.executable, "-m", "benchmarks.gpu.listing", *(f"{p.letter}={p.module}" for p in parts)]
        command += ["--device", self.device, "--out", str(self.out), *(["--toy"] if self.toy else [])]
        with open(self.out / LOG, "ab") as log:
            try:
                done = subprocess.run(
                    command, cwd=ROOT, env=self._environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                    stderr=log, timeout=LIST_SECONDS, check=False,
                )  # fmt: skip
            except subprocess.TimeoutExpired:
                raise ConfigError(
                    f"the cases were not listed within {LIST_SECONDS:.0f} s; see {self.out / LOG}"
                ) from None
        lines = done.stdout.decode(errors="replace").splitlines()
        if done.returncode or not lines:
            raise ConfigError(f"{sys.executable} cannot list the cases: {self._tail(0)}")
        answer = json.loads(lines[-1])
        broken = [Record(letter, START, CRASHED, 0.0, text) for letter, text in answer["broken"].items()]
        return Listing(answer["gpu"], [Planned(*fields) for fields in answer["cases"]], broken)

    def run(self, cases: Sequence[Planned], deadline: float, report: Callable[[Record], None]) -> list[Record]:
        """Runs the cases in their order until `deadline`, of monotonic time. Calls `report` with each record."""
        records: list[Record] = []

        def add(record: Record) -> None:
            records.append(record)
            report(record)

        for group in processes(cases):
            waiting = group
            while waiting:
                left = deadline - time.monotonic()
                case = waiting[0]
                if left <= 0.0 or (START_SECONDS + case.seconds > left and not self.toy):
                    text = f"planned for {START_SECONDS + case.seconds:.0f} s, and {max(0.0, left):.0f} s were left"
                    add(Record(case.part, case.name, SKIPPED, 0.0, text))
                    waiting = waiting[1:]
                    continue
                recorded = self._run_process(waiting, deadline, add)
                waiting = [case for case in waiting if case.name not in recorded]
        return records

    def _run_process(self, cases: Sequence[Planned], deadline: float, add: Callable[[Record], None]) -> set[str]:
        """Runs one process until it ends or is late. Returns the names of the cases that have a record now: at least
        one."""
        progress, log_size, begun = Progress(), self._log_size(), time.monotonic()
        opening = min(deadline, begun + (LIST_SECONDS if self.toy else OPENING_SECONDS))

        def late() -> float:
            if progress.running is not None:
                return min(deadline, progress.limit)
            return deadline if progress.recorded else opening

        for record in self._records(cases, deadline, progress, late):
            add(record)
        if progress.ended:
            return progress.recorded
        letter, case = cases[0].part, progress.running
        overtime = time.monotonic() >= late()
        if case is None and not progress.recorded:
            case, progress.begun = cases[0].name, begun
        if case is not None:
            text = f"ended after {time.monotonic() - progress.begun:.0f} s"
            if time.monotonic() >= deadline:
                text = "the time of the run was over"
            elif not overtime:
                text = f"its process ended; the last output: {self._tail(log_size)}"
            why = TIMEOUT if overtime else CRASHED
            add(Record(letter, case, why, round(time.monotonic() - progress.begun, 2), text))
            progress.recorded.add(case)
        return progress.recorded

    def _records(
        self,
        cases: Sequence[Planned],
        deadline: float,
        progress: Progress,
        late: Callable[[], float],
    ) -> Iterator[Record]:
        """Yields the records that one process reports, until it ends or is late; then it is killed."""
        readable, writable = os.pipe()
        command = [sys.executable, "-m", "benchmarks.gpu.part_process", cases[0].part, cases[0].module]
        command += ["--events", str(writable), "--seconds", f"{deadline - time.monotonic():.1f}"]
        command += ["--device", self.device, "--out", str(self.out)]
        command += ["--cases", json.dumps([case.name for case in cases]), *(["--toy"] if self.toy else [])]
        with open(self.out / LOG, "ab") as log:
            process = subprocess.Popen(
                command, cwd=ROOT, env=self._environment(), stdin=subprocess.DEVNULL, stdout=log,
                stderr=subprocess.STDOUT, pass_fds=[writable], start_new_session=True,
            )  # fmt: skip
        os.close(writable)
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

    def _environment(self) -> dict[str, str]:
        """Returns the environment of a process: this source tree first on the path, the allocator and cuDNN of a run,
        and output at once."""
        folders = [str(ROOT), str(self.site or ""), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, folders)), "PYTHONUNBUFFERED": "1"}
        set_allocator(environment)
        set_cudnn(environment)
        return environment

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
