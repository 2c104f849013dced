"""Runs a script of the repository on all ranks of an emulated cluster, each held to its share of a core."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType

from benchmarks.cluster.fleet import Fleet
from benchmarks.cluster.hosts import Cluster
from benchmarks.cluster.quota import Quotas

HOST = "benchmarks.planner.emulated.host"
FIRST_PORT = 29600  # each run has its own
POLL_SECONDS = 0.005
SUPER_PACKET = 24 * 1024


class RunError(Exception):
    """A run ended with an error or was too slow; the message is one line."""


class Ranks:
    """The ranks of `quotas`, on hosts that share them equally. A context manager."""

    def __init__(self, hosts: int, rate: float, quotas: Quotas, folder: Path) -> None:
        """rate: of the links, in Mbit/s. folder: for logs."""
        self.cluster, self._quotas, self._folder = Cluster(hosts, rate, SUPER_PACKET), quotas, folder
        self._stack = contextlib.ExitStack()
        self._runs = 0

    def __enter__(self) -> Ranks:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.cluster)
            fleet = Fleet(self.cluster, ["rank"], sys.executable, self._folder, HOST)
            self._fleet = stack.enter_context(fleet)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def run(
        self,
        script: str,
        flags: Sequence[str],
        seconds: float,
        after_line: Callable[[str], None] = lambda line: None,
        *,
        reference: bool = False,
    ) -> list[str]:
        """Runs a script to its end, and calls `after_line` for each line of rank 0 as soon as it is printed.

        reference: see reference.py. Returns all that each rank printed. Raises RunError, also if it takes more than
        `seconds`.
        """
        processes = self._fleet.ask_each(self._requests(script, flags, reference=reference), "start")
        every = [pid for pids in processes for pid in pids]
        for rank, pid in enumerate(every):
            self._quotas.add(rank, pid)
        logs = [self._log(rank) for rank in range(self._quotas.ranks)]
        in_time = False
        try:
            in_time = _follow(logs[0], every, seconds, after_line)
        finally:
            for pid in every:  # they are not waited for yet, so the ids are still theirs
                if not in_time:
                    os.kill(pid, signal.SIGKILL)
            codes = self._fleet.ask_each([{"wait": pids} for pids in processes], "wait")
        if not in_time:
            raise RunError(f"not done within {seconds:.0f} s: {_last_words(logs)}")
        if any(code for host in codes for code in host):
            raise RunError(_last_words(logs))
        return [log.read_text() for log in logs]

    def _requests(self, script: str, flags: Sequence[str], *, reference: bool) -> list[dict[str, object]]:
        self._runs += 1
        world, each = self._quotas.ranks, self._quotas.ranks // self.cluster.hosts
        requests: list[dict[str, object]] = []
        for host in range(self.cluster.hosts):
            ranks = []
            for local in range(each):
                rank = host * each + local
                environment = {
                    "RANK": rank,
                    "WORLD_SIZE": world,
                    "LOCAL_RANK": local,
                    "LOCAL_WORLD_SIZE": each,
                    "MASTER_PORT": FIRST_PORT + self._runs,
                    "OMP_NUM_THREADS": 1,
                }
                self._log(rank).unlink(missing_ok=True)
                ranks.append(
                    {
                        "script": script,
                        "flags": list(flags),
                        "environment": {name: str(value) for name, value in environment.items()},
                        "log": str(self._log(rank)),
                        "core": self._quotas.core(rank),
                        "reference": reference,
                    }
                )
            requests.append({"start": ranks})
        return requests

    def _log(self, rank: int) -> Path:
        return self._folder / f"process_of_rank_{rank}.log"


def _follow(log: Path, processes: Sequence[int], seconds: float, after_line: Callable[[str], None]) -> bool:
    """Calls `after_line` for each line of a file until all processes have ended, or one with an error; returns False if
    they take too long."""
    deadline = time.monotonic() + seconds
    ended_at: float | None = None
    for line in _lines(log, lambda: not any(_runs(pid) for pid in processes)):
        if line is not None:
            after_line(line)
        elif ended_at is None and not all(_runs(pid) for pid in processes):
            ended_at = time.monotonic()
        late = ended_at is not None and time.monotonic() - ended_at > 20.0  # one has ended, and the others wait for it
        if late or time.monotonic() > deadline:
            return False
    return True


def _lines(log: Path, is_over: Callable[[], bool]) -> Iterator[str | None]:
    """Yields each line of a growing file, and None where there is no new one."""
    while not log.exists() and not is_over():
        time.sleep(POLL_SECONDS)
    if not log.exists():
        return
    with open(log) as file:
        part = ""
        while True:
            over = is_over()
            text = file.readline()
            part += text
            if part.endswith("\n"):
                yield part.rstrip()
                part = ""
            elif over and not text:
                return
            else:
                yield None
                time.sleep(POLL_SECONDS)


def _runs(pid: int) -> bool:
    """Whether a process that nobody has waited for has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _last_words(logs: Sequence[Path]) -> str:
    """Returns the first error that a rank printed, or else the last line of rank 0."""
    texts = [log.read_text() if log.exists() else "" for log in logs]
    for text in texts:
        if found := re.search(r"^error.*$", text, re.MULTILINE):
            return found.group(0)
    return (texts[0].strip().splitlines() or ["it printed nothing"])[-1]
