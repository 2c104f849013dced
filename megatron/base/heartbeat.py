"""Publishes each rank's phase and current collective, so that a hang can be attributed to a rank.

A background thread writes the state to `<dir>/rank_00000.json` and passes it to `publish` (a store shared by the job)
once per second. When a collective fails or times out, `explain` compares the ranks of its group and names the ranks
that have not arrived. The same thread notices when the job is gone, because a rank whose launcher was killed would
otherwise run forever.

This file does not import torch: the transport is an argument.
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

from megatron.base.phase_times import PhaseTimes

_NAMED = 16  # The maximum number of ranks that one message names.
# The job counts as lost after this many heartbeats without the store: a network may fail for a moment.
_STORE_TIMEOUT = 30.0
# gloo puts its file and line before the message and advice after it.
_GLOO_NOISE = re.compile(r"\[\S+:\d+\] |\. This is typically caused by .*$")


@dataclass(frozen=True)
class Beat:
    """The state that one rank last published. `sequences` counts the collectives it has entered, by group."""

    rank: int
    host: str
    pid: int
    phase: str
    collective: str
    group: str
    sequences: dict[str, int]
    since: float  # when the phase or collective began, in seconds since the epoch
    time: float  # when this record was published
    error: str = ""  # the error that ended this rank, if any
    work: str = ""  # what this rank does alone inside a collective step of several parts, while the others wait for it
    last: str = ""  # the collective that this rank entered last, with its number
    queued: str = ""  # the oldest collective on the device that is not over

    @classmethod
    def from_json(cls, text: str | bytes) -> Beat:
        """Inverse of `to_json`."""
        return cls(**json.loads(text))

    def to_json(self) -> str:
        """Returns the record as one line of JSON."""
        return json.dumps(asdict(self))


@dataclass(frozen=True)
class Call:
    """One recorded collective: operation, group name, shape of the input, dtype and bytes of the input."""

    op: str
    group: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int


@dataclass
class QueuedWork:
    """A collective queued on a device stream. `number` is its sequence number on its group, `since` the time of
    queueing.

    `done` tells whether it is over. Objects that `done` refers to live until the heartbeat has seen the end, so whoever
    queued the work replaces it as soon as something smaller can tell the same.
    """

    op: str
    ranks: tuple[int, ...]
    group: str
    number: int
    since: float
    done: Callable[[], bool]

    def finished(self) -> bool:
        """Returns whether the work is done or has failed: the host sees a device failure where it synchronizes."""
        try:
            return self.done()
        except Exception:
            return True


class Notice:
    """Words that any rank leaves for all ranks of the job, one on each topic: here for this rank alone. Subclasses use
    the job's store."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}

    def leave(self, text: str, topic: str = "text") -> None:
        """Leaves a word in place of an earlier one."""
        self._texts[topic] = text

    def read(self, topic: str = "text") -> str | None:
        """Returns the word, None as long as nobody has left one."""
        return self._texts.get(topic)

    def claim(self, text: str, topic: str) -> str:
        """Leaves a word unless there is one, and returns the word that is there now."""
        return self._texts.setdefault(topic, text)

    def release_spares(self) -> None:
        """Lets processes go that wait as spares; here there are none."""


class Heartbeat:
    """The state of this rank. `enter` and `leave` enclose every collective of `comm`; `phase` marks the parts of a
    run."""

    def __init__(
        self,
        rank: int,
        *,
        publish: Callable[[str], None] | None = None,
        read: Callable[[int], str | None] | None = None,
        notice: Notice | None = None,
        interval: float = 1.0,
        timeout: float = 600.0,
        launcher: int | None = None,
    ) -> None:
        """Arguments: `publish` stores a record as a line of JSON, `read(rank)` returns the last line of another rank,
        `notice` is the word that the ranks leave each other; by default only this rank sees it.
        `interval` is the time between heartbeats in seconds, `timeout` is the limit for queued device work in seconds,
        and `launcher` is the process id of the parent if this process must end with it.
        """
        self.rank = rank
        self.interval = interval
        self.timeout = timeout
        self._launcher = launcher
        self._read = read
        self._publish = publish
        self.notice = notice or Notice()
        self.each_beat: list[Callable[[], None]] = []  # called in the thread, once per heartbeat
        self._published = time.monotonic()
        self._path: Path | None = None
        # The main thread publishes, too, but only one thread at a time may rename the file.
        self._writing = threading.Lock()
        self._error = ""
        self._phase, self._collective, self._group, self._work = "start", "", "", ""
        self._last: tuple[str, str] | None = None  # operation and group of the collective that was entered last
        self.times = PhaseTimes(self._phase)
        # Bytes and seconds of the files that this rank wrote last for a checkpoint; the number of such writes.
        self.written: tuple[int, float] = (0, 0.0)
        self.writes = 0
        self._since = time.time()
        self._sequences: dict[str, int] = {}
        self._recorders: list[list[Call]] = []
        self._queued: deque[QueuedWork] = deque()  # not seen yet by the thread, which alone uses the next one
        self._pending: list[QueuedWork] = []
        self._on_stall: Callable[[str], None] | None = None
        self._on_orphaned: Callable[[str], None] | None = None
        self._in_thread: Callable[[], None] | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        # This context encloses each wait for a collective, (operation, group name) -> context; a timeline measures with
        # it.
        self.during_wait: Callable[[str, str], contextlib.AbstractContextManager[None]] = unmeasured
        # This context encloses each phase, name -> context.
        self.during_phase: Callable[[str], contextlib.AbstractContextManager[None]] = unmeasured_phase

    def start(
        self,
        on_stall: Callable[[str], None] | None = None,
        on_orphaned: Callable[[str], None] | None = None,
        in_thread: Callable[[], None] | None = None,
    ) -> None:
        """Starts publishing in a background thread.

        `on_stall(message)` is called when device work queued by `track` exceeds the timeout, `on_orphaned(message)`
        when the launcher has ended or the store has not answered for 30 heartbeats. `in_thread()` is called first of
        all in the thread, which then asks queued work whether it is done: it chooses the thread's device.
        """
        self._on_stall, self._on_orphaned, self._in_thread = on_stall, on_orphaned, in_thread
        self.beat()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread; the last state stays in the file."""
        self._stop.set()
        if self._thread is None:
            self._last_beat()
        elif self._thread is not threading.current_thread():
            self._thread.join()

    def write_to(self, directory: Path) -> None:
        """Also writes the state to a file in `directory` from now on. Raises OSError if that file cannot be written.

        This is separate from `start` so that a run that is rejected during set-up does not leave a folder behind.
        """
        directory.mkdir(parents=True, exist_ok=True)
        self._path = directory / f"rank_{self.rank:05d}.json"
        self.beat()

    @property
    def folder(self) -> Path | None:
        """The folder that `write_to` was given."""
        return None if self._path is None else self._path.parent

    def fail(self, error: str) -> None:
        """Publishes the error that ends this rank, so that waiting ranks can name it, and stops.

        This takes at most two heartbeat intervals, even if the store hangs.
        """
        self._error = error
        self._stop.set()
        if self._thread is threading.current_thread():
            self._last_beat()
        elif self._thread:
            self._thread.join(2 * self.interval)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Marks a part of the run ("forward-backward", "save-checkpoint") while the body runs.

        After an exception the mark stays, because it shows where the run ended.
        """
        before, outer = self._phase, self.times.phase
        self.times.change(name)
        self._phase, self._since = name, time.time()
        with self.during_phase(name):
            yield
        self.times.change(outer)
        self._phase, self._since = before, time.time()

    def wrote(self, nbytes: int, seconds: float) -> None:
        """Records the time that this rank took to write its files of a checkpoint."""
        self.written, self.writes = (nbytes, seconds), self.writes + 1

    @contextlib.contextmanager
    def working(self, what: str) -> Iterator[None]:
        """Marks work that the other ranks wait for inside a collective step, such as writing files of a checkpoint."""
        self._work, self._since = what, time.time()
        try:
            yield
        finally:
            self._work, self._since = "", time.time()

    def move_to(self, name: str) -> None:
        """Changes the name of the current phase, inside `phase`."""
        self._phase, self._since = name, time.time()

    @property
    def current_phase(self) -> str:
        """The name of the current phase."""
        return self._phase

    def enter(self, op: str, group: str, call: Call) -> int:
        """Records that this rank has entered collective `op` on `group`; the recorders get `call`.

        Returns the sequence number of the collective on the group. `leave` marks its end. After a failure `leave` is
        not called, so that the state still shows where this rank stopped.
        """
        for recorder in self._recorders:
            recorder.append(call)
        self._sequences[group] = self._sequences.get(group, 0) + 1
        self._last = (op, group)
        self.wait_in(op, group)
        return self._sequences[group]

    def wait_in(self, op: str, group: str) -> None:
        """Records that this rank now waits for a collective that it started earlier."""
        self._collective, self._group, self._since = op, group, time.time()

    def leave(self) -> None:
        """Records that the collective is done, or queued on a device stream."""
        self._collective, self._since = "", time.time()

    @contextlib.contextmanager
    def record(self) -> Iterator[list[Call]]:
        """Collects the calls made while the body runs, in order."""
        calls: list[Call] = []
        self._recorders.append(calls)
        try:
            yield calls
        finally:
            # Compare by identity: nested recorders may hold equal lists.
            self._recorders = [recorder for recorder in self._recorders if recorder is not calls]

    def track(self, op: str, ranks: Sequence[int], group: str, done: Callable[[], bool]) -> QueuedWork:
        """Watches work that is queued on a device stream, because the host has gone on and cannot see it hang.

        Returns the record of it, whose `done` may be replaced.
        """
        queued = QueuedWork(op, tuple(ranks), group, self._sequences.get(group, 0), time.time(), done)
        self._queued.append(queued)
        return queued

    def beat(self) -> None:
        """Publishes the current state now."""
        line = self.state().to_json()
        if self._publish:  # Publish before writing the file, so that a full disk does not make this rank look dead.
            self._publish(line)
            self._published = time.monotonic()
        if self._path:
            with self._writing:
                temporary = self._path.with_suffix(".tmp")
                temporary.unlink(missing_ok=True)  # it may be a link to another file
                temporary.write_text(line + "\n")
                temporary.replace(self._path)

    def state(self) -> Beat:
        """Returns the current state of this rank."""
        last, pending = self._last, list(self._pending[:1])
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
            work=self._work,
            last=f"{last[0]} number {self._sequences[last[1]]} on group {last[1]}" if last else "",
            queued=next((f"{work.op} number {work.number} on group {work.group}" for work in pending), ""),
        )

    def explain(
        self, op: str, group: str, ranks: Sequence[int], seconds: float, cause: str, number: int | None = None
    ) -> str:
        """Returns one line about a collective that failed after `seconds`: the missing ranks of its group and their
        phases.

        `number` is the value that `enter` returned, by default the newest on the group. Waits three heartbeats to see
        which ranks still publish; a rank is only compared with itself, so the clocks of the hosts need not agree. A
        rank that has published its own error is named at once.
        """
        number = self._sequences.get(group, 0) if number is None else number
        cause = _GLOO_NOISE.sub("", cause)
        members = joined([str(rank) for rank in ranks], ", ")
        head = f"{op} number {number} on group {group} (ranks {members}) failed after {seconds:.1f} s"
        if self._read is None:
            return f"{head}: {cause}"
        peers = [rank for rank in ranks if rank != self.rank]
        before = after = self.beats_of(peers)
        if before and not any(beat and beat.error for beat in before.values()):
            self.pause(3 * self.interval)
            after = self.beats_of(peers)
        if before is None or after is None:
            waited_for = joined([f"rank {rank}" for rank in peers], ", ")
            return (
                f"{head}: waiting for {waited_for}, and the job's store does not answer either: its host is gone, or "
                f"this one is disconnected; {cause}"
            )
        failed = [f"rank {rank} ended: {beat.error}" for rank, beat in after.items() if beat and beat.error]
        missing = joined(failed, "; ") or missing_ranks(before, after, group, number)
        return f"{head}: {missing or 'every rank of it has arrived'}; {cause}"

    def beats_of(self, ranks: Sequence[int]) -> dict[int, Beat | None] | None:
        """Returns the last records of `ranks`, or None if the store does not answer within ten heartbeat intervals."""
        if self._read is None:
            return {rank: self.state() if rank == self.rank else None for rank in ranks}
        beats: dict[int, Beat | None] = {}

        def read() -> None:
            with contextlib.suppress(Exception):  # the store went away with its host
                for rank in ranks:
                    assert self._read is not None
                    line = self._read(rank)
                    beats[rank] = Beat.from_json(line) if line else None

        # Use a thread because a connection to a disconnected host may stay silent for minutes.
        reader = threading.Thread(target=read, name="heartbeat-reader", daemon=True)
        reader.start()
        reader.join(10 * self.interval)
        return dict(beats) if len(beats) == len(ranks) else None

    def pause(self, seconds: float) -> None:
        """Sleeps. The heartbeat's own thread keeps publishing meanwhile, or others would take this rank for dead."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(self.interval / 2)
            if threading.current_thread() is self._thread:
                with contextlib.suppress(Exception):
                    self.beat()

    def _run(self) -> None:
        if self._in_thread is not None:
            self._in_thread()
        while not self._stop.wait(self.interval):
            # A full disk or a lost store must end neither the run nor the supervision of queued work.
            with contextlib.suppress(Exception):
                self.beat()
            self._check_queued()
            self._check_job()
            for activity in self.each_beat:
                with contextlib.suppress(Exception):  # as above
                    activity()
        self._last_beat()

    def _last_beat(self) -> None:
        with contextlib.suppress(Exception):  # the store may be gone already at exit
            self.beat()

    def _check_queued(self) -> None:
        while self._queued:
            self._pending.append(self._queued.popleft())
        self._pending = [queued for queued in self._pending if not queued.finished()]
        if self._pending and self._on_stall and time.time() - self._pending[0].since > self.timeout:
            late = self._pending.pop(0)
            seconds = time.time() - late.since
            cause = "device work did not finish"
            self._on_stall(self.explain(late.op, late.group, late.ranks, seconds, cause, late.number))

    def _check_job(self) -> None:
        if self._on_orphaned is None:
            return
        silent = time.monotonic() - self._published
        if self._launcher is not None and os.getppid() != self._launcher:
            self._on_orphaned(f"the launcher, process {self._launcher}, is gone")
        elif self._publish is not None and silent > _STORE_TIMEOUT * self.interval:
            self._on_orphaned(
                f"the job's store has not answered for {silent:.0f} s: its host is gone, or this one is disconnected"
            )


def unmeasured(op: str, group: str) -> contextlib.AbstractContextManager[None]:
    """Returns an empty context, for waits that nothing measures."""
    return contextlib.nullcontext()


def unmeasured_phase(name: str) -> contextlib.AbstractContextManager[None]:
    """Returns an empty context, for phases that nothing measures."""
    return contextlib.nullcontext()


def missing_ranks(before: dict[int, Beat | None], after: dict[int, Beat | None], group: str, number: int) -> str:
    """Returns which ranks are gone or have not reached collective `number` of `group`; '' if all have.

    `before` and `after` are records some intervals apart: a rank that did not publish in between is gone or frozen.
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
        elif beat.work:
            seconds = beat.time - beat.since
            parts.append(f"rank {rank} is not done (phase '{beat.phase}', {beat.work} for {seconds:.0f} s)")
        elif beat.sequences.get(group, 0) < number:
            doing = f"in {beat.collective} on group {beat.group}" if beat.collective else "computing"
            seconds = beat.time - beat.since
            parts.append(f"rank {rank} has not arrived (phase '{beat.phase}', {doing} for {seconds:.0f} s)")
    return joined(parts, "; ")


def joined(parts: Sequence[str], separator: str) -> str:
    """Joins all parts, or the first ones and the number of the others, because a group may have thousands of ranks."""
    ending = [] if len(parts) <= _NAMED else [f"and {len(parts) - _NAMED} more"]
    return separator.join([*parts[:_NAMED], *ending])
