"""What asks a run to save and stop: signals and a time limit. And the signal that ends it immediately."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, NoReturn

from megatron.base.heartbeat import Heartbeat
from megatron.base.launch import EXIT_SIGNALS
from megatron.base.log import get_logger
from megatron.core.comm.collectives import gather_objects
from megatron.core.groups import Group

log = get_logger(__name__)

SAVING = "save-checkpoint"  # the phase of the heartbeat in which a checkpoint and its export are written
# SIGINT: a user presses Ctrl-C and wants the run to end immediately. Ending takes a fraction of a second.
INTERRUPT_SECONDS = 8.0


class ExitSignals:
    """While open, an exit signal is only remembered, and whoever can stop looks at `received`. One rank may get it and
    others not, so the ranks must agree before any of them stops.

    After an error in the body they stay remembered, because the process is about to say what went wrong and to end, and
    the launcher signals it as soon as another rank has ended.

    Python runs its handlers between two steps of the main thread, which may wait in a collective for minutes. So the
    signal is read from a pipe into which the system's own handler writes it, by any thread.

    Opens in the main thread only (Python's rule). With `enabled` false signals keep their old meaning. The exit signals
    may be blocked until then (`block_exit_signals`).
    """

    def __init__(self, enabled: bool = True) -> None:
        self._received: str | None = None
        self._enabled = enabled
        self._previous: dict[signal.Signals, Any] = {}
        self._pipe: tuple[int, int] | None = None
        self._previous_wakeup = -1

    @property
    def received(self) -> str | None:
        """The name of the first signal, as "SIGTERM"."""
        while self._received is None and self._pipe is not None:
            try:
                numbers = os.read(self._pipe[0], 4096)
            except BlockingIOError:
                break
            names = [signal.Signals(number).name for number in numbers if number in EXIT_SIGNALS]
            self._received = next(iter(names), None)
        return self._received

    def __enter__(self) -> ExitSignals:
        if self._enabled:
            self._pipe = os.pipe()
            for end in self._pipe:
                os.set_blocking(end, False)
            self._previous_wakeup = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
            self._previous = {number: signal.signal(number, self._remember) for number in EXIT_SIGNALS}
        signal.pthread_sigmask(signal.SIG_UNBLOCK, EXIT_SIGNALS)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            return
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: set outside Python
        self._previous = {}
        if self._pipe is not None:
            signal.set_wakeup_fd(self._previous_wakeup)
            _ = self.received
            ends, self._pipe = self._pipe, None
            for end in ends:
                os.close(end)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        """The signal is in the pipe already."""


class StopRequest:
    """Whether a run shall stop: because of a signal to one of its ranks, or --exit-duration-in-mins."""

    def __init__(self, signals: ExitSignals, minutes: float | None, started: float, rank: int) -> None:
        """started: when this process began, by the monotonic clock: set-up counts towards the minutes, too."""
        self._signals, self._minutes, self._started, self._rank = signals, minutes, started, rank
        self.told: str | None = None  # the reason of another rank, as soon as it is known here

    @property
    def wanted(self) -> str | None:
        """Why this rank shall stop. Once there is a reason, there is one at every later time."""
        if (name := self._signals.received) is not None:
            return f"{name} to rank {self._rank}"
        if self._minutes is not None and time.monotonic() - self._started >= self._minutes * 60:
            return f"--exit-duration-in-mins {self._minutes:g}"
        return self.told

    def agreed(self, world: Group) -> str | None:
        """Returns the reason of the first rank that has one: a signal or a clock may reach one of them first.

        Communication: a gather of a line over the world.
        """
        return next((reason for reason in gather_objects(self.wanted, world) if reason), None)


class StopRelay:
    """Passes a request to stop on to all ranks, by the threads of their heartbeats and a word in the store of the job.

    In set-up, until `close`, the ranks are not at the same place and cannot agree by a collective. Then a request ends
    all of them within two heartbeats, with exit code 0: nothing has been trained that would be lost, and what set-up
    writes is written to other names first. Later steps and evaluations agree, and only ranks that save are told.
    """

    def __init__(self, stop: StopRequest, heartbeat: Heartbeat) -> None:
        self._stop, self._heartbeat, self._in_setup = stop, heartbeat, True
        self._lock = threading.Lock()
        heartbeat.each_beat.append(self._pass_on)

    def close(self, world: Group) -> None:
        """Ends set-up, and all ranks if one of them shall stop. Communication: a gather of a line over the world."""
        with self._lock:
            self._in_setup = False
        reason = self._stop.agreed(world)  # if a word was left before, the thread ends the rank that waits here
        if reason is not None:
            end_setup(reason)

    def _pass_on(self) -> None:
        with self._lock:
            if not self._in_setup and self._heartbeat.current_phase != SAVING:
                return
            notice = self._heartbeat.notice
            if (reason := self._stop.wanted) is not None:
                notice.leave(reason)
            self._stop.told = notice.read()
            if self._in_setup and self._stop.told is not None:
                time.sleep(1.5 * self._heartbeat.interval)  # until the others have read it: they may wait for this rank
                end_setup(self._stop.told)


def end_setup(reason: str) -> NoReturn:
    """Ends this process, whose set-up shall not go on."""
    log.info("stopped before the first step: %s", reason)
    for handler in log.manager.root.handlers:
        handler.flush()
    os._exit(0)


class Interrupt:
    """While open, SIGINT raises KeyboardInterrupt, as always,
    and calls `end` if the process still runs some seconds later.

    Native code that calls Python may drop the exception, and a collective that fails because another rank was
    interrupted first may replace it: `received` tells.
    """

    def __init__(self, end: Callable[[], None], seconds: float = INTERRUPT_SECONDS) -> None:
        """`end`: called in a thread of its own. Opens in the main thread only (Python's rule)."""
        self.received = False
        self._end, self._seconds = end, seconds

    def __enter__(self) -> Interrupt:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is ignored, or somebody else's
            signal.signal(signal.SIGINT, self._raise)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if signal.getsignal(signal.SIGINT) == self._raise:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _raise(self, number: int, frame: FrameType | None) -> None:
        if not self.received:
            self.received = True
            timer = threading.Timer(self._seconds, self._end)
            timer.daemon = True
            timer.start()
        raise KeyboardInterrupt
