"""Signals that ask a run to save and stop, and the one that ends it immediately."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

# SIGTERM: a cluster manager ends the job. torchrun passes it on to its workers and kills them 30 s later.
# SIGUSR1: a batch system's early warning. Send it to the workers: torchrun itself does not handle it.
EXIT_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
# SIGINT: a user presses Ctrl-C and wants the run to end immediately. Ending takes a fraction of a second.
INTERRUPT_SECONDS = 8.0


class ExitSignals:
    """While open, an exit signal is only remembered; the loop looks at `received` between steps. One rank may get it
    and others not, so the ranks must agree before any of them stops.

    After an error in the body they stay remembered, because the process is about to say what went wrong and to end, and
    the launcher signals it as soon as another rank has ended.

    Opens in the main thread only (Python's rule). With `enabled` false signals keep their old meaning.
    """

    def __init__(self, enabled: bool = True) -> None:
        self.received: str | None = None  # name of the first signal, as "SIGTERM"
        self._enabled = enabled
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> ExitSignals:
        if self._enabled:
            self._previous = {number: signal.signal(number, self._remember) for number in EXIT_SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            return
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: set outside Python
        self._previous = {}

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received = signal.Signals(number).name


class Interrupt:
    """While open, SIGINT raises KeyboardInterrupt, as always, and calls `end` if the process still runs some seconds later.

    Native code that calls Python may drop the exception, and a collective that fails because another rank was interrupted
    first may replace it: `received` tells.
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
