"""Streams that are threads: communication and copies on the CPU, and host work next to a device.

[Note: operations on a thread] An operation's first messages are posted by the thread that submits it, as soon as fewer
than `in_flight` operations are under way, in the order of submission, which must be the same on all ranks; later
messages at once. The stream's thread waits for the messages that were posted first. So the network always has work
queued, staging memory is bounded, and the compute thread only submits and, much later, waits. No two ranks can wait for
each other: an operation only waits for operations that were submitted before it.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megatron.core.streams.stream import Operation, Waitable, Work
from megatron.core.timeline import Span, Timeline

_SWITCH_SECONDS = 0.0002
_IDLE_SECONDS = 10.0


class ThreadWork:
    """An operation that a thread carries out."""

    def __init__(self, operation: Operation, wait_span: Callable[[], Span | None]) -> None:
        self._operation: Operation | None = operation
        self._pending: Sequence[Waitable] = ()
        self._done = threading.Event()
        self._error: BaseException | None = None
        self._wait_span = wait_span

    def wait(self) -> None:
        """See Work."""
        span = None if self._done.is_set() else self._wait_span()
        self._done.wait()
        if span is not None:
            span.end()
        self.synchronize()

    def is_completed(self) -> bool:
        """See Work."""
        return self._done.is_set()

    def synchronize(self) -> None:
        """See Work."""
        self._done.wait()
        if self._error is not None:
            raise self._error

    def advance(self) -> bool:
        """Wait for what the operation yielded and run it to its next yield; False when it is over or has failed."""
        assert self._operation is not None
        try:
            for pending in self._pending:
                # Only waits of the caller's own thread are drawn.
                (pending.synchronize if isinstance(pending, ThreadWork) else pending.wait)()
            self._pending = next(self._operation)
            return True
        except StopIteration:
            pass
        except BaseException as error:  # raised again by `wait`
            self._error = error
        self._operation, self._pending = None, ()  # frees what the operation held
        self._done.set()
        return False


class ThreadStream:
    """See Stream, and the note above. The thread starts with an operation and ends when there are none for a while."""

    def __init__(
        self, name: str, device: torch.device, timeline: Timeline, *, wait_row: str | None, in_flight: int
    ) -> None:
        """name: of the thread and, by default, of the row in the timeline. device: the thread's current device.

        wait_row: where the timeline shows how long callers wait for this stream's works; None: nowhere.
        """
        self._name, self._device, self._timeline, self._wait_row = name, device, timeline, wait_row
        self._in_flight, self._under_way = in_flight, 0
        self._posted: deque[ThreadWork] = deque()
        self._queued: deque[ThreadWork] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def submit(
        self,
        operation: Operation,
        name: str,
        *,
        row: str | None = None,
        after: Sequence[Waitable] | None = None,
        keep: Sequence[Tensor] = (),
    ) -> Work:
        """See Stream."""
        return self._start(self._traced(operation, name, row or self._name, after, keep), name)

    def run(
        self,
        function: Callable[[], None],
        name: str,
        *,
        after: Sequence[Waitable] | None = None,
        keep: Sequence[Tensor] = (),
    ) -> Work:
        """See Stream."""
        # Yielding first, even nothing, leaves the function to the thread.
        return self.submit(_calling(function), name, after=after or (), keep=keep)

    def begin(self, name: str) -> Span | None:
        """See Stream."""
        return self._timeline.begin(self._name, name)

    def follow(self, work: Waitable, span: Span | None) -> Waitable:
        """See Stream. Only a thread that waits sees when a message arrives."""
        return work if span is None else self._start(_ending(work, span), span.name)

    def _traced(
        self, operation: Operation, name: str, row: str, after: Sequence[Waitable] | None, keep: Sequence[Tensor]
    ) -> Operation:
        """The operation behind `after`, with its span; this frame holds `keep` until the end."""
        if after is not None:
            yield after
        span = self._timeline.begin(row, name)
        yield from operation
        if span is not None:
            span.end()

    def _start(self, operation: Operation, name: str) -> Work:
        work = ThreadWork(operation, lambda: self._timeline.begin(self._wait_row, name) if self._wait_row else None)
        with self._changed:
            self._queued.append(work)
            self._post_next()
            if self._posted and self._thread is None:
                # A thread that asks for the interpreter waits this long while another computes in Python, 5 ms by
                # default: as long as a bucket is in flight.
                sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_SECONDS))
                self._thread = threading.Thread(target=self._carry_out, name=self._name, daemon=True)
                self._thread.start()
        return work

    def _post_next(self) -> None:
        while self._queued and self._under_way < self._in_flight:
            work = self._queued.popleft()
            if work.advance():
                self._under_way += 1
                self._posted.append(work)
                self._changed.notify()

    def _carry_out(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # a new thread would use the first device, and open a context there
        while True:
            with self._changed:
                if not self._changed.wait_for(lambda: bool(self._posted), _IDLE_SECONDS):
                    self._thread = None
                    return
                work = self._posted.popleft()
            goes_on = work.advance()
            with self._changed:
                if goes_on:
                    self._posted.append(work)
                else:
                    self._under_way -= 1
                    self._post_next()


class Completed:
    """A work of the CPU's compute, which is done when the call that computes returns."""

    def wait(self) -> None:
        """See Work."""

    def is_completed(self) -> bool:
        """See Work."""
        return True

    def synchronize(self) -> None:
        """See Work."""


def _calling(function: Callable[[], None]) -> Operation:
    function()
    yield from ()


def _ending(work: Waitable, span: Span) -> Operation:
    yield [work]
    span.end()
