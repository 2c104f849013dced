"""Holds processes to a fixed share of a core, so that the speed of one does not depend on whether others are idle.

It needs root, and the cpu controller of cgroups, version 1 or 2.

[Note: what holds a process] Each process gets a control group, which its threads share, with a quota of processor time
per period, and is bound to one core. Several may share a core: the shares on it must stay well below 1, because the
kernel's own work (packets, timers) needs some of it. By itself the quota gives a process that has waited some
milliseconds at full speed, for two reasons, and two more processes in each group prevent them:

- The kernel counts the time that a process has used when a clock interrupt occurs, often only each 4 ms, or when a task of
  its group begins to run. So one process wakes up every millisecond and sleeps again.
- A group that has not used its time gets that of two or three periods at once. So another process spends what is left,
  with the policy for idle time: it runs only while the measured one waits.

So any work takes its processor time divided by the share, to within a period. The two take about 5 % of a rank's time.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from benchmarks.cluster.hosts import PREFIX, held

PERIOD_SECONDS = 0.005
TICK_SECONDS = 0.001
ROOT = Path("/sys/fs/cgroup")


class QuotaError(Exception):
    """The machine cannot hold processes to a share of a core."""


@dataclass(frozen=True)
class Controller:
    """A version of the cpu controller. groups: where its groups are made."""

    version: int
    groups: Path

    def set_quota(self, group: Path, share: float | None) -> None:
        """Holds a group to a share of one core; None ends it."""
        period = round(PERIOD_SECONDS * 1e6)
        quota = None if share is None else round(share * period)
        if self.version == 2:
            (group / "cpu.max").write_text(f"{quota or 'max'} {period}")
            return
        (group / "cpu.cfs_period_us").write_text(str(period))
        (group / "cpu.cfs_quota_us").write_text(str(-1 if quota is None else quota))

    def prefer(self, group: Path) -> None:
        """Gives a group the largest weight, so that other processes of the machine hardly delay it."""
        name, most = ("cpu.weight", 10000) if self.version == 2 else ("cpu.shares", 262144)
        (group / name).write_text(str(most))


def find_controller() -> Controller:
    """Returns the machine's cpu controller. Raises QuotaError."""
    for path in (ROOT / "cpu", ROOT / "cpu,cpuacct"):
        if (path / "cpu.cfs_quota_us").exists():
            return Controller(1, path)
    offered = ROOT / "cgroup.controllers"
    try:
        if offered.exists() and "cpu" in offered.read_text().split():
            (ROOT / "cgroup.subtree_control").write_text("+cpu")
            return Controller(2, ROOT)
    except OSError as error:
        raise QuotaError(
            f"the cpu controller of {ROOT} cannot be enabled ({error.strerror}); start as root outside of a container, "
            "or in one with a control group of its own"
        ) from None
    raise QuotaError(
        f"ranks are held to a share of a core by the cpu controller of cgroups, which {ROOT} does not have"
    )


class Quotas:
    """One control group per rank, each with `share` of a core. A context manager: leaving it kills the processes in
    them and removes them. Leftovers of a killed run are removed when the next one starts.
    """

    def __init__(self, ranks: int, share: float) -> None:
        """Raises QuotaError without a cpu controller, or where a core cannot give that much."""
        self.ranks, self.share, self._owner = ranks, share, os.getpid()
        self.cores = sorted(os.sched_getaffinity(0))
        self._spenders: list[int] = []
        self._controller = find_controller()
        asked = share * -(-ranks // len(self.cores))
        if asked > 0.9:
            raise QuotaError(
                f"{ranks} ranks with {share:.0%} of a core each ask for {asked:.0%} of one of the {len(self.cores)} "
                "cores, and the kernel needs a tenth; give a smaller share"
            )

    def __enter__(self) -> Quotas:
        remove_left_groups(self._controller)
        try:
            for rank in range(self.ranks):
                self.group(rank).mkdir()
                self._controller.prefer(self.group(rank))
        except OSError as error:
            self._remove()
            raise QuotaError(f"{self.group(0)} cannot be made ({error.strerror}); start as root") from None
        for rank in range(self.ranks):
            self._start_helpers(rank)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def group(self, rank: int) -> Path:
        """Returns the folder of a rank's control group."""
        return self._controller.groups / f"{PREFIX}{self._owner}r{rank}"

    def core(self, rank: int) -> int:
        """Returns the core of a rank."""
        return self.cores[rank % len(self.cores)]

    def limit(self, *, on: bool) -> None:
        """Holds all ranks to their share, or lets them run freely."""
        for pid in self._spenders:  # without a quota they would spend everything
            os.kill(pid, signal.SIGCONT if on else signal.SIGSTOP)
        for rank in range(self.ranks):
            self._controller.set_quota(self.group(rank), self.share if on else None)

    def add(self, rank: int, pid: int) -> None:
        """Moves a process, with all of its threads, into the control group of a rank."""
        (self.group(rank) / "cgroup.procs").write_text(str(pid))

    def _start_helpers(self, rank: int) -> None:
        """Starts the two processes of the note at the head of the file. The second one is stopped until there is a
        quota."""
        for work in (self._tick, self._spend):
            if pid := os.fork():
                if work == self._spend:
                    os.waitpid(pid, os.WUNTRACED)  # until it has stopped itself
                    self._spenders.append(pid)
                continue
            with contextlib.suppress(BaseException):
                signal.signal(signal.SIGINT, signal.SIG_IGN)
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                self.add(rank, os.getpid())
                os.sched_setaffinity(0, {self.core(rank)})
                work()
            os._exit(0)

    def _tick(self) -> None:
        while os.getppid() == self._owner:
            for _ in range(1000):
                time.sleep(TICK_SECONDS)

    def _spend(self) -> None:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        os.kill(os.getpid(), signal.SIGSTOP)
        while os.getppid() == self._owner:
            for _ in range(1_000_000):
                pass

    def _remove(self) -> None:
        with held(signal.SIGINT, signal.SIGTERM):
            for rank in range(self.ranks):
                remove_group(self.group(rank))


def remove_group(group: Path) -> None:
    """Kills the processes of a control group and removes it. Safe to repeat."""
    processes = group / "cgroup.procs"
    while group.exists():
        for pid in processes.read_text().split() if processes.exists() else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(int(pid), 0)
        try:
            group.rmdir()
        except OSError:  # a process is still ending
            time.sleep(0.01)


def remove_left_groups(controller: Controller) -> None:
    """Removes the groups of owners that no longer run."""
    for group in controller.groups.glob(f"{PREFIX}*r*"):
        found = re.fullmatch(rf"{PREFIX}(\d+)r\d+", group.name)
        if found and not Path(f"/proc/{found.group(1)}").exists():
            remove_group(group)


def spin(seconds: float) -> float:
    """Computes for some seconds; returns the share of a core that this process got."""
    started, used = time.perf_counter(), time.process_time()
    while time.perf_counter() - started < seconds:
        pass
    return (time.process_time() - used) / (time.perf_counter() - started)


def achieved_shares(quotas: Quotas, busy: Sequence[int], seconds: float = 2.0) -> list[float]:
    """Returns the share of a core of each rank of `busy`, while these compute and all others are idle."""
    quotas.limit(on=True)
    with contextlib.ExitStack() as stack:
        readers = [stack.enter_context(_spinning(quotas, rank, seconds)) for rank in busy]
        return [float(os.read(reader, 64)) for reader in readers]


@contextlib.contextmanager
def _spinning(quotas: Quotas, rank: int, seconds: float) -> Iterator[int]:
    """Yields where the share of a new process will be read."""
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        with contextlib.suppress(BaseException):
            quotas.add(rank, os.getpid())
            os.sched_setaffinity(0, {quotas.core(rank)})
            os.write(writer, str(spin(seconds)).encode())
        os._exit(0)
    os.close(writer)
    try:
        yield reader
    finally:
        os.close(reader)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)
