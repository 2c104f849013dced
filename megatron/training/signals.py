"""Signals that ask a run to save and stop."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any

# SIGTERM: a cluster manager ends the job. torchrun passes it on to its workers and kills them 30 s later.
# SIGUSR1: a batch system's early warning. Send it to the workers: torchrun itself does not handle it.
# SIGINT is not handled: a user who presses Ctrl-C wants the run to end immediately.
EXIT_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class ExitSignals:
    """While open, an exit signal is only remembered; the loop looks at `received` between steps. One rank may get it
    and others not, so the ranks must agree before any of them stops.

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
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: set outside Python
        self._previous = {}

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received = signal.Signals(number).name
