"""Who is doing what: each rank's phase and current collective, published so that a hang can be attributed.

A background thread writes the state to `<dir>/rank_00000.json` and hands it to `publish` (a store shared by the
job) once a second. When a collective fails or times out, `explain` compares the ranks of its group and names those that
have not arrived. The same thread notices that the job is gone: a rank whose launcher was killed would train on for ever.
Nothing here imports torch: the transport is an argument.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

_NAMED = 16  # ranks named in one message
_STORE_PATIENCE = 30.0  # beats without the store before the job is taken for gone: a network may fail for a moment
# gloo's own file and line before what it says, and its advice after it.
_LIBRARY_TALK = re.compile(r"\[\S+:\d+\] |\. This is typically caused by .*$")


@dataclass(frozen=True)
class Beat:
    """What one rank last said of itself. `sequences` counts the collectives it has entered, by group."""

    rank: int
    host: str
    pid: int
    phase: str
    collective: str
    group: str
    sequences: dict[str, int]
    since: float  # when the phase or collective began, seconds since the epoch
    time: float  # when this was published
    error: str = ""  # why this rank ended, if an error ended it

    @classmethod
    def from_json(cls, text: str | bytes) -> Beat:
        """Inverse of `to_json`."""
        return cls(**json.loads(text))

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self))


@dataclass(frozen=True)
class Call:
    """One collective as the recorder saw it: operation, group name, shape of the input, dtype, bytes of the input."""

    op: str
    group: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int


@dataclass(frozen=True)
class _Queued:
    """A collective that waits on a device stream. `number`: which one of its group it is. `since`: when it was queued."""

    op: str
    ranks: tuple[int, ...]
    group: str
    number: int
    since: float
    done: Callable[[], bool]

    def finished(self) -> bool:
        """A device that failed says so where the host waits for it; here it only means there is nothing to watch."""
        try:
            return self.done()
        except Exception:
            return True


class Heartbeat:
    """State of this rank. `enter` and `leave` frame every collective of `comm`; `phase` marks the parts of a run."""

    def __init__(
        self,
        rank: int,
        *,
        publish: Callable[[str], None] | None = None,
        read: Callable[[int], str | None] | None = None,
        interval: float = 1.0,
        timeout: float = 600.0,
        launcher: int | None = None,
    ) -> None:
        """`read(rank)` returns another rank's last line; `timeout` (s) is the limit for queued device work. `launcher`: the
        process id of this process's parent, if it must not outlive it."""
        self.rank = rank
        self.interval = interval
        self.timeout = timeout
        self._launcher = launcher
        self._read = read
        self._publish = publish
        self._published = time.monotonic()
        self._path: Path | None = None
        self._writing = threading.Lock()  # one rename of the file at a time: the main thread beats, too
        self._error = ""
        self._phase, self._collective, self._group = "start", "", ""
        self._since = time.time()
        self._sequences: dict[str, int] = {}
        self._recorders: list[list[Call]] = []
        self._queued: deque[_Queued] = deque()
        self._on_stall: Callable[[str], None] | None = None
        self._on_orphaned: Callable[[str], None] | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        # What frames each wait for a collective, (operation, group name) -> context: a timeline measures them with it.
        self.during_wait: Callable[[str, str], contextlib.AbstractContextManager[None]] = unwatched

    def start(
        self, on_stall: Callable[[str], None] | None = None, on_orphaned: Callable[[str], None] | None = None
    ) -> None:
        """Begin publishing. `on_stall(message)` is called when device work queued by `track` outlives the timeout,
        `on_orphaned(message)` when the launcher is gone, or the store has not answered for 30 beats."""
        self._on_stall, self._on_orphaned = on_stall, on_orphaned
        self.beat()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread; the last state stays in the file."""
        self._stop.set()
        if self._thread is None:
            self._last_beat()
        elif self._thread is not threading.current_thread():
            self._thread.join()

    def write_to(self, directory: Path) -> None:
        """From now on keep the state in a file of `directory`, too. Raises OSError when that cannot be written.

        Not part of `start`: a run that is refused while it is set up leaves no folder behind.
        """
        directory.mkdir(parents=True, exist_ok=True)
        self._path = directory / f"rank_{self.rank:05d}.json"
        self.beat()

    def fail(self, error: str) -> None:
        """Publish that an error ends this rank, so that those who wait for it need not guess, and stop.

        Takes two beats at most, even if the store hangs.
        """
        self._error = error
        self._stop.set()
        if self._thread:
            self._thread.join(2 * self.interval)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Mark a part of the run ("forward-backward", "save-checkpoint") while the body runs.

        After an exception the mark stays: it says where the run ended.
        """
        before = self._phase
        self._phase, self._since = name, time.time()
        yield
        self._phase, self._since = before, time.time()

    def move_to(self, name: str) -> None:
        """Inside `phase`: the run is now in another part of it."""
        self._phase, self._since = name, time.time()

    def enter(self, op: str, group: str, call: Call) -> int:
        """This rank is now inside collective `op` on `group`; the recorders get `call`. Returns its number on the group.

        `leave` marks its end. After a failure nobody calls it: the state must still say where this rank was.
        """
        for recorder in self._recorders:
            recorder.append(call)
        self._sequences[group] = self._sequences.get(group, 0) + 1
        self.wait_in(op, group)
        return self._sequences[group]

    def wait_in(self, op: str, group: str) -> None:
        """This rank now waits for a collective that it started before."""
        self._collective, self._group, self._since = op, group, time.time()

    def leave(self) -> None:
        """The collective is done, or queued on a device stream."""
        self._collective, self._since = "", time.time()

    @contextlib.contextmanager
    def record(self) -> Iterator[list[Call]]:
        """Collect the calls made while the body runs, in order."""
        calls: list[Call] = []
        self._recorders.append(calls)
        try:
            yield calls
        finally:
            # By identity: nested recorders may hold equal lists.
            self._recorders = [kept for kept in self._recorders if kept is not calls]

    def track(self, op: str, ranks: Sequence[int], group: str, done: Callable[[], bool]) -> None:
        """Watch work that was only queued on a device stream: the host has gone on and cannot see it hang."""
        self._queued.append(_Queued(op, tuple(ranks), group, self._sequences.get(group, 0), time.time(), done))

    def beat(self) -> None:
        """Publish the current state now."""
        line = self.state().to_json()
        if self._publish:  # first: a full disk must not make this rank look dead
            self._publish(line)
            self._published = time.monotonic()
        if self._path:
            with self._writing:
                beside = self._path.with_suffix(".tmp")
                beside.write_text(line + "\n")
                beside.replace(self._path)

    def state(self) -> Beat:
        """The current state of this rank."""
        return Beat(
            rank=self.rank,
            host=socket.gethostname(),
            pid=os.getpid(),
            phase=self._phase,
            collective=self._collective,
            group=self._group,
            sequences=dict(self._sequences),
            since=self._since,
            time=time.time(),
            error=self._error,
        )

    def explain(
        self, op: str, group: str, ranks: Sequence[int], seconds: float, cause: str, number: int | None = None
    ) -> str:
        """One line for a collective that failed after `seconds`: which ranks of its group are missing, and where.

        `number` is what `enter` returned, by default that of the newest collective on the group. Waits three beats, to
        see which ranks still publish: comparing a rank with itself needs no agreement between the hosts' clocks. A rank
        that has published its own error is named at once.
        """
        number = self._sequences.get(group, 0) if number is None else number
        cause = _LIBRARY_TALK.sub("", cause)
        members = _join([str(rank) for rank in ranks], ", ")
        head = f"{op} number {number} on group {group} (ranks {members}) failed after {seconds:.1f} s"
        if self._read is None:
            return f"{head}: {cause}"
        others = [rank for rank in ranks if rank != self.rank]
        before = after = self._beats_of(others)
        if before and not any(beat and beat.error for beat in before.values()):
            self._pause(3 * self.interval)
            after = self._beats_of(others)
        if before is None or after is None:
            waited_for = _join([f"rank {rank}" for rank in others], ", ")
            return (
                f"{head}: waiting for {waited_for}, and the job's store does not answer either: its host is gone, or "
                f"this one is cut off; {cause}"
            )
        failed = [f"rank {rank} ended: {beat.error}" for rank, beat in after.items() if beat and beat.error]
        missing = _join(failed, "; ") or missing_ranks(before, after, group, number)
        return f"{head}: {missing or 'every rank of it has arrived'}; {cause}"

    def _beats_of(self, ranks: Sequence[int]) -> dict[int, Beat | None] | None:
        """Their last beats, or None when the store does not answer within ten intervals."""
        assert self._read is not None
        found: dict[int, Beat | None] = {}

        def read() -> None:
            with contextlib.suppress(Exception):  # the store went away with its host
                for rank in ranks:
                    assert self._read is not None
                    line = self._read(rank)
                    found[rank] = Beat.from_json(line) if line else None

        # In a thread: a connection to a host that was cut off may stay silent for minutes.
        reader = threading.Thread(target=read, name="heartbeat-reader", daemon=True)
        reader.start()
        reader.join(10 * self.interval)
        return dict(found) if len(found) == len(ranks) else None

    def _pause(self, seconds: float) -> None:
        """Sleep. The heartbeat's own thread goes on publishing meanwhile, or the others would take this rank for dead."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(self.interval / 2)
            if threading.current_thread() is self._thread:
                with contextlib.suppress(Exception):
                    self.beat()

    def _run(self) -> None:
        while not self._stop.wait(self.interval):
            # A full disk or a store that went away must not end the run by itself, nor the watch over queued work.
            with contextlib.suppress(Exception):
                self.beat()
            self._check_queued()
            self._check_job()
        self._last_beat()

    def _last_beat(self) -> None:
        with contextlib.suppress(Exception):  # the store may be gone already at exit
            self.beat()

    def _check_queued(self) -> None:
        while self._queued and self._queued[0].finished():
            self._queued.popleft()
        if self._queued and self._on_stall and time.time() - self._queued[0].since > self.timeout:
            late = self._queued.popleft()
            seconds = time.time() - late.since
            cause = "device work did not finish"
            self._on_stall(self.explain(late.op, late.group, late.ranks, seconds, cause, late.number))

    def _check_job(self) -> None:
        if self._on_orphaned is None:
            return
        silent = time.monotonic() - self._published
        if self._launcher is not None and os.getppid() != self._launcher:
            self._on_orphaned(f"the launcher, process {self._launcher}, is gone")
        elif self._publish is not None and silent > _STORE_PATIENCE * self.interval:
            self._on_orphaned(
                f"the job's store has not answered for {silent:.0f} s: its host is gone, or this one is cut off"
            )


def unwatched(op: str, group: str) -> contextlib.AbstractContextManager[None]:
    """Waits as nobody looks at them."""
    return contextlib.nullcontext()


def missing_ranks(before: dict[int, Beat | None], after: dict[int, Beat | None], group: str, number: int) -> str:
    """Say which ranks are gone, or have not reached collective `number` of `group`; '' when all have.

    `before` and `after` are their beats some intervals apart: a rank that did not publish in between is gone or frozen.
    """
    parts = []
    for rank, beat in sorted(after.items()):
        earlier = before.get(rank)
        if beat is None:
            parts.append(f"rank {rank} never reported")
        elif earlier is not None and earlier.time == beat.time:
            parts.append(
                f"rank {rank} is gone or frozen (no heartbeat any more, last in phase '{beat.phase}' on {beat.host}, "
                f"pid {beat.pid})"
            )
        elif beat.sequences.get(group, 0) < number:
            doing = f"in {beat.collective} on group {beat.group}" if beat.collective else "computing"
            seconds = beat.time - beat.since
            parts.append(f"rank {rank} has not arrived (phase '{beat.phase}', {doing} for {seconds:.0f} s)")
    return _join(parts, "; ")


def _join(parts: Sequence[str], separator: str) -> str:
    """All parts, or the first ones and how many more there are: a group may have thousands of ranks."""
    more = [] if len(parts) <= _NAMED else [f"and {len(parts) - _NAMED} more"]
    return separator.join([*parts[:_NAMED], *more])
