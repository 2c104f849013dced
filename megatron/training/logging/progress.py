"""A line at the bottom of the terminal that shows the progress of the run. Log lines scroll above it."""

from __future__ import annotations

import io
import logging
import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from megatron.base.log import LOGGER_NAME
from megatron.training.logging.line import format_duration

SECONDS_BETWEEN_DRAWS = 0.1


def terminal_console(enabled: bool) -> Console | None:
    """Returns the console to draw on; None if not `enabled` or if stdout or stderr is a file or pipe."""
    if not (enabled and sys.stdout.isatty() and sys.stderr.isatty()):
        return None
    return Console(file=sys.stdout)


class ProgressLine:
    """Draws iteration, loss, tokens/s and the time left while open; without a console it does nothing.

    It draws in `update` and not on a thread, so that data loader workers can be forked at any time.
    """

    def __init__(self, train_iters: int, iteration: int, console: Console | None) -> None:
        self._train_iters = train_iters
        self._first = iteration
        self._console = console
        self._progress: Progress | None = None
        self._task = TaskID(0)
        self._redirected: list[tuple[logging.StreamHandler[io.TextIOBase], io.TextIOBase]] = []
        self._drawn = 0.0

    def __enter__(self) -> ProgressLine:
        if self._console is None:
            return self
        self._redirect_log_lines(self._console)
        self._progress = Progress(
            TextColumn("iteration {task.completed}/{task.total}"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[figures]}"),
            console=self._console,
            auto_refresh=False,
            transient=True,
            expand=True,
        )
        self._task = self._progress.add_task("", total=self._train_iters, completed=self._first, figures="")
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is None:
            return
        self._progress.stop()
        self._progress = None
        for handler, stream in self._redirected:
            handler.setStream(stream)
        self._redirected = []

    def update(self, iteration: int, loss: float, tokens_per_second: float, eta_seconds: float) -> None:
        """Updates the line after a step, with tokens/s over all GPUs. Draws at most every 0.1 s."""
        now = time.monotonic()
        if self._progress is None or now - self._drawn < SECONDS_BETWEEN_DRAWS:
            return
        self._drawn = now
        figures = f"loss {loss:.4f}  {tokens_per_second:,.0f} tokens/s  ETA {format_duration(eta_seconds)}"
        self._progress.update(self._task, completed=iteration, figures=figures)
        self._progress.refresh()

    def _redirect_log_lines(self, console: Console) -> None:
        """Redirects log handlers, which hold the terminal's stream itself and would write into the progress line."""
        above = _AboveLine(console)
        terminal = (console.file, sys.stdout, sys.stderr)
        for handler in logging.getLogger(LOGGER_NAME).handlers:
            if isinstance(handler, logging.StreamHandler) and handler.stream in terminal:
                self._redirected.append((handler, handler.stream))
                handler.setStream(above)


class _AboveLine(io.TextIOBase):
    """A stream whose text the console prints above its live line, neither wrapped nor coloured."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def write(self, text: str) -> int:
        self._console.out(text, end="", highlight=False)
        return len(text)
