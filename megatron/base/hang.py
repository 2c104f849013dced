"""Notices that a rank makes no progress, long before a collective times out, and reports where every rank stands.

[Note: how a hang is reported]
The thread of every heartbeat compares how long its rank has been in its phase with the limit of that phase
(base/phase_times.py), and how long it has waited in a collective with half of the timeout. The first rank that is over
its limit claims the report by a word in the job's store. It compares the heartbeats of all ranks, names those that the
others wait for, and asks for Python stacks by a second word, which the threads of all ranks look for. A rank whose
thread does not run any more, because the process is frozen or gone, cannot answer and is named as silent. The store may
be silent as well, with the host that it is on: nobody waits long for it, and every rank then reports for itself.

This file does not import torch.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from megatron.base.heartbeat import Beat, Heartbeat, joined

REQUEST = "stacks"  # topic of the word that asks for stacks: the number of the report, and the ranks that the log shows
READ_STEP = "read-step"  # the phase in which the host waits for its device
FRAMES = 30  # of a stack, the innermost ones
SHOWN = 4  # ranks whose stacks the log shows; those of all ranks are in the folder of the heartbeats
_LISTED = 16  # ranks that a report lists
END_FACTOR = 3.0  # of the limit at which a hang is reported: then the ranks end, if they shall
_STORE_SECONDS = 5.0  # of waiting for an answer of the store
_Answer = TypeVar("_Answer")


class StoreSilence(Exception):
    """The job's store has not answered in time."""


@dataclass(frozen=True)
class Stall:
    """A limit that a rank is over. usual: seconds of the longest recent stay in the phase; None if the limit is
    that of a collective. is_final: whether it is far over the limit."""

    phase: str
    seconds: float
    usual: float | None
    is_final: bool = False

    def __str__(self) -> str:
        usual = "" if self.usual is None else f", where the longest recent stay took {self.usual:.1f} s"
        return f"no progress for {self.seconds:.0f} s in phase '{self.phase}'{usual}"


class HangWatch:
    """Watches the progress of this rank in the thread of its heartbeat, and takes part in reports of the job."""

    def __init__(
        self,
        heartbeat: Heartbeat,
        ranks: int,
        *,
        say: Callable[[str], None],
        end: Callable[[str], None] | None = None,
        device_record: Callable[[], bytes | None] = lambda: None,
    ) -> None:
        """ranks: of the job. say: logs a report. end: ends this process, told why, when it is three times over its
        limit; None: a report is all. device_record: records of the device's collectives, for a file next
        to that of the heartbeat."""
        self._heartbeat, self._ranks, self._say, self._end = heartbeat, ranks, say, end
        self._device_record = device_record
        self._reports = 0  # that this rank knows of, and has answered
        self._covered = -1.0  # the beginning of the stay that a report covers
        self._speaks_of: float | None = None  # the beginning of the stay that this rank has reported, until it is over
        self._asking: threading.Thread | None = None
        heartbeat.each_beat.append(self.look)

    def look(self) -> None:
        """Called once per heartbeat: answers requests, and reports or ends if this rank is over its limit."""
        with contextlib.suppress(StoreSilence):
            self._answer()
        times = self._heartbeat.times
        since, stall = times.since, self._stall()
        if self._speaks_of is not None and since != self._speaks_of:
            self._say(f"rank {self._heartbeat.rank} goes on after {since - self._speaks_of:.0f} s")
            self._speaks_of = None
        if stall is None:
            return
        if since != self._covered:
            self._covered = since
            try:
                self._take_part(stall, since)
            except StoreSilence:
                self._say(self._lonely_report(stall))
        if self._end is not None and stall.is_final and times.since == since:
            self._end(str(stall))

    def _take_part(self, stall: Stall, since: float) -> None:
        """Reports for all ranks, unless a rank has begun to. Raises StoreSilence."""
        notice, rank, number = self._heartbeat.notice, self._heartbeat.rank, self._reports + 1
        if int(self._ask(lambda: notice.claim(str(rank), f"reporter {number}"))) == rank:
            self._say(self._report(stall, number))
            self._speaks_of = since

    def _ask(self, question: Callable[[], _Answer]) -> _Answer:
        """Returns the answer of the store. Raises StoreSilence if it takes too long."""
        answers: list[_Answer] = []

        def ask() -> None:
            with contextlib.suppress(Exception):  # the store is gone
                answers.append(question())

        if self._asking is None or not self._asking.is_alive():  # else it is still silent
            self._asking = threading.Thread(target=ask, name="hang-watch", daemon=True)
            self._asking.start()
            self._asking.join(_STORE_SECONDS * self._heartbeat.interval)
        if not answers:
            raise StoreSilence
        return answers[0]

    def _stall(self) -> Stall | None:
        """Returns the limit that this rank is over."""
        heartbeat, times = self._heartbeat, self._heartbeat.times
        phase, seconds = times.phase, time.monotonic() - times.since
        limit = times.limit(phase)
        if limit is not None:
            is_final = seconds > END_FACTOR * limit
            return Stall(phase, seconds, times.longest(phase), is_final) if seconds > limit else None
        state = heartbeat.state()
        if state.collective and time.time() - state.since > heartbeat.timeout / 2:
            return Stall(phase, seconds, None)
        return None

    def _report(self, stall: Stall, number: int) -> str:
        heartbeat, notice, everyone = self._heartbeat, self._heartbeat.notice, range(self._ranks)
        before = heartbeat.beats_of(everyone)
        heartbeat.pause(3 * heartbeat.interval)
        after = heartbeat.beats_of(everyone)
        if before is None or after is None:
            raise StoreSilence
        late = late_ranks(before, after)
        shown = sorted(late)[:SHOWN] or [heartbeat.rank]
        self._ask(lambda: notice.leave(" ".join(map(str, (number, *shown))), REQUEST))
        self._answer()
        heartbeat.pause(2.5 * heartbeat.interval)
        stacks = self._ask(lambda: {rank: notice.read(f"stack {number} of {rank}") for rank in shown})
        return report_of(stall, after, late, stacks)

    def _lonely_report(self, stall: Stall) -> str:
        rank, state = self._heartbeat.rank, self._heartbeat.state()
        head = f"{stall}; the job's store does not answer: its host is gone or frozen, or this one is disconnected"
        lines = [f"  rank {rank}: {state_line(state)}", f"  Python stack of rank {rank}:"]
        return "\n".join([head, *lines, *(f"    {line}" for line in main_stack().splitlines())])

    def _answer(self) -> None:
        """Leaves this rank's stack if a report asks for it, and writes it to the folder. Raises StoreSilence."""
        heartbeat, notice = self._heartbeat, self._heartbeat.notice
        number, *shown = (self._ask(lambda: notice.read(REQUEST)) or "0").split()
        if int(number) <= self._reports:
            return
        self._reports, self._covered = int(number), heartbeat.times.since
        if str(heartbeat.rank) in shown:
            self._ask(lambda: notice.leave(main_stack(), f"stack {number} of {heartbeat.rank}"))
        if (folder := heartbeat.folder) is not None:
            with contextlib.suppress(OSError):  # a full disk must not hide the report
                (folder / f"stacks_{heartbeat.rank:05d}.txt").write_text(all_stacks())
                if (record := self._device_record()) is not None:
                    (folder / f"flight_record_{heartbeat.rank}").write_bytes(record)


def late_ranks(before: Mapping[int, Beat | None], after: Mapping[int, Beat | None]) -> dict[int, str]:
    """Returns the ranks that the others wait for, with the reason: silent ones, those that have ended with an error,
    and those that neither wait in a collective nor for their device. Empty where all wait.

    before, after: records of all ranks, some heartbeats apart.
    """
    late = {}
    for rank, beat in sorted(after.items()):
        earlier = before.get(rank)
        if beat is None:
            late[rank] = "it never reported"
        elif beat.error:
            late[rank] = f"it ended: {beat.error}"
        elif earlier is not None and earlier.time == beat.time:
            late[rank] = "it is silent: its process is frozen or gone"
        elif beat.work or not (beat.collective or beat.phase == READ_STEP):
            late[rank] = doing(beat)
    return late


def report_of(
    stall: Stall, beats: Mapping[int, Beat | None], late: Mapping[int, str], stacks: Mapping[int, str | None]
) -> str:
    """Returns the lines of a report: the ranks that the others wait for, the state of each rank, and some stacks."""
    named = [f"rank {rank}{_place(beats[rank])}: {why}" for rank, why in late.items()]
    cause = joined(named, "; ") or "every rank waits in a collective or for its device"
    lines = [f"{stall}; {cause}"]
    ordered = [*late, *(rank for rank in sorted(beats) if rank not in late)]
    for rank in ordered[:_LISTED]:
        beat = beats[rank]
        lines.append(f"  rank {rank}: {'never reported' if beat is None else state_line(beat)}")
    if len(ordered) > _LISTED:
        lines.append(f"  and {len(ordered) - _LISTED} more ranks")
    for rank, stack in stacks.items():
        lines.append(f"  Python stack of rank {rank}{':' if stack else ': no answer'}")
        lines += [f"    {line}" for line in (stack or "").splitlines()]
    return "\n".join(lines)


def state_line(beat: Beat) -> str:
    """Returns the phase of a rank, its current or last collective, and the oldest one on its device."""
    parts = [f"{beat.host}, pid {beat.pid}, phase '{beat.phase}'", doing(beat)]
    if beat.last:
        parts.append(f"last collective {beat.last}")
    if beat.queued:
        parts.append(f"unfinished on the device: {beat.queued}")
    return ", ".join(parts)


def doing(beat: Beat) -> str:
    """Returns the action of a rank by its last record, and for how long it lasts."""
    work = beat.work or (f"in {beat.collective} on group {beat.group}" if beat.collective else "computing")
    return f"{work} for {beat.time - beat.since:.0f} s"


def main_stack() -> str:
    """Returns the innermost frames of the main thread, a line each, the innermost last."""
    return _stack_of(threading.main_thread().ident)


def all_stacks() -> str:
    """Returns the stacks of all threads of this process."""
    return "\n\n".join(f"{thread.name}\n{_stack_of(thread.ident)}" for thread in threading.enumerate()) + "\n"


def _stack_of(ident: int | None) -> str:
    frame = sys._current_frames().get(ident or 0)
    summary: Sequence[traceback.FrameSummary] = traceback.extract_stack(frame)[-FRAMES:] if frame else ()
    return "\n".join(
        f"{_short(frame_summary.filename)}:{frame_summary.lineno} {frame_summary.name}" for frame_summary in summary
    )


def _short(path: str) -> str:
    """Returns the last parts of a file's name, which tell files of one name apart."""
    return os.sep.join(Path(path).parts[-3:])


def _place(beat: Beat | None) -> str:
    return "" if beat is None else f" on {beat.host}"
