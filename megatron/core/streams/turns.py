"""Two computations of one rank that take turns: one goes on while the other waits for a message.

[Note: turns] Only one of the two runs at any time. The one that runs calls `yield_turn` between the start of a message
and the wait for it, and goes on when the other one yields in turn or has ended. Who goes on therefore depends on
nothing but the calls, never on the time that something takes, so ranks whose computations are alike start their
messages in one order and cannot wait for each other. Each computation is written, and differentiated, as if it were
alone: it has a thread of its own, whose stack holds what it was doing. On CUDA both queue their kernels on the same
stream.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch


class TimedComputation(NamedTuple):
    """run: does everything. timed: returns a context that measures; it is entered again after each interruption."""

    run: Callable[[], None]
    timed: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext


class Turns:
    """Runs pairs of computations; outside of a pair `yield_turn` returns at once."""

    def __init__(self, device: torch.device) -> None:
        """device: whose kernels the computations queue."""
        self._device = device
        self._running: _Side | None = None
        self._worker: _Worker | None = None

    def run(self, first: TimedComputation, second: TimedComputation) -> None:
        """Runs both, beginning with `first` in the calling thread, and returns when both have ended.

        What one of them raises ends the other one where it has given way, and is raised here.
        """
        if self._worker is None:
            self._worker = _Worker(self._device)
        caller, partner = _Side(first), _Side(second)
        caller.other, partner.other = partner, caller
        self._running = caller
        self._worker.start(lambda: self._run_behind(partner))
        caller.run()
        if not partner.ended:
            self._switch(caller, partner)
        self._running = None
        for side in (caller, partner):
            if side.error is not None:
                raise side.error

    def yield_turn(self) -> None:
        """Lets the other computation run until it gives way or ends."""
        side = self._running
        if side is None or side.other.ended:
            return
        side.pause()
        self._switch(side, side.other)
        if side.other.error is not None:
            raise _PartnerFailed
        side.go_on()

    def _run_behind(self, side: _Side) -> None:
        """Runs the second computation, in its own thread, when the first one gives way or has ended."""
        side.resumed.acquire()
        if side.other.error is None:
            side.run()
        side.ended = True
        self._running = side.other
        side.other.resumed.release()

    def _switch(self, side: _Side, other: _Side) -> None:
        self._running = other
        other.resumed.release()
        side.resumed.acquire()


class OneByOne(Turns):
    """Runs the second computation behind the first: for a trace whose tensors have no values.

    At no time is less memory in use than with turns: all that the first one leaves behind is there while the second one
    runs.
    """

    def run(self, first: TimedComputation, second: TimedComputation) -> None:
        """See Turns."""
        for computation in (first, second):
            with computation.timed():
                computation.run()


class Switch:
    """A setting that a computation turns on for itself; another one, which runs while this one waits, finds it off."""

    def __init__(self) -> None:
        self._threads: set[int] = set()  # of the computations that have turned it on

    def __bool__(self) -> bool:
        return threading.get_ident() in self._threads

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        """It is on in the body, which may end with an exception."""
        self._threads.add(threading.get_ident())
        try:
            yield
        finally:
            self._threads.discard(threading.get_ident())


class _Side:
    """A computation of a pair. resumed: released when it may go on. error: what it raised."""

    def __init__(self, computation: TimedComputation) -> None:
        self._computation, self._timed = computation, contextlib.ExitStack()
        self.resumed = threading.Semaphore(0)
        self.ended = False
        self.error: BaseException | None = None
        self.other: _Side = self

    def run(self) -> None:
        """Runs all of it; raises nothing."""
        try:
            self.go_on()
            self._computation.run()
            self.pause()
        except _PartnerFailed:
            pass
        except BaseException as error:  # raised again by `Turns.run`
            self.error = error
        self.ended = True

    def go_on(self) -> None:
        """Its time counts from now on."""
        self._timed.enter_context(self._computation.timed())

    def pause(self) -> None:
        """Its time does not count."""
        self._timed.close()


class _PartnerFailed(BaseException):
    """Ends a computation that has given way to one that failed. Not an Exception, so that no code treats it as one."""


class _Worker:
    """A thread that lives as long as the process, because a library that keeps threads per caller makes them once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._jobs: list[Callable[[], None]] = []
        self._queued = threading.Semaphore(0)
        threading.Thread(target=self._work, name="turns", daemon=True).start()

    def start(self, job: Callable[[], None]) -> None:
        """Runs a job that raises nothing, behind the one before it."""
        self._jobs.append(job)
        self._queued.release()

    def _work(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # a new thread would use the first device, and open a context there
        while True:
            self._queued.acquire()
            self._jobs.pop(0)()
