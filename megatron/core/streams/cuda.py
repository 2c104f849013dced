"""Streams of a CUDA device.

The host queues an operation and goes on. Order comes from events alone, so nothing depends on the number of hardware
queues (CUDA_DEVICE_MAX_CONNECTIONS).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megatron.core.streams.stream import Operation, Waitable, Work
from megatron.core.timeline import Span, Timeline


class CudaWork:
    """Everything that was queued on a stream up to an event."""

    def __init__(
        self,
        event: torch.cuda.Event,
        home: torch.cuda.Stream,
        keep: Sequence[Tensor],
        wait_span: Callable[[], Span | None],
    ) -> None:
        """home: the stream that submitted it, which the tensors `keep` belong to. Its waits alone are drawn."""
        self._event, self._home, self._keep = event, home, keep
        self._wait_span = wait_span

    def wait(self) -> None:
        """See Work."""
        current = torch.cuda.current_stream(self._home.device)
        if current != self._home:
            current.wait_event(self._event)
            return
        span = self._wait_span()
        current.wait_event(self._event)
        if span is not None:
            span.end()
        self._keep = ()

    def is_completed(self) -> bool:
        """See Work."""
        completed = bool(self._event.query())
        if completed:
            self._keep = ()
        return completed

    def synchronize(self) -> None:
        """See Work."""
        self._event.synchronize()
        self._keep = ()

    def holds_memory(self) -> bool:
        """Whether tensors have to be held still: see [Note: lifetimes of tensors] in stream.py."""
        return bool(self._keep) and not self.is_completed()


def everything_queued(device: torch.device) -> CudaWork:
    """Everything that is queued on the device's current stream, as a work that holds no tensor."""
    current = torch.cuda.current_stream(device)
    return CudaWork(current.record_event(), current, (), lambda: None)


class CudaStream:
    """See Stream."""

    def __init__(
        self, name: str, device: torch.device, timeline: Timeline, *, wait_row: str | None, high_priority: bool
    ) -> None:
        """name: by default of the row in the timeline.

        wait_row: where the timeline shows how long other streams wait for this one's works; None: nowhere.
        high_priority: its kernels go before those of compute, for small ones that others wait for.
        """
        self._name, self._device, self._timeline, self._wait_row = name, device, timeline, wait_row
        self._stream = torch.cuda.Stream(device, priority=-1 if high_priority else 0)
        self._holding: list[CudaWork] = []  # works that nothing may ever wait for, which still need their tensors
        self._lock = threading.Lock()

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
        home = torch.cuda.current_stream(self._device)
        if after is None:
            self._stream.wait_stream(home)
        with torch.cuda.stream(self._stream):
            for work in after or ():
                work.wait()
            with self._timeline.span(row or self._name, name):
                for pending in operation:
                    for work in pending:
                        work.wait()
            event = self._stream.record_event()
        submitted = CudaWork(
            event, home, tuple(keep), lambda: self._timeline.begin(self._wait_row, name) if self._wait_row else None
        )
        if keep:
            with self._lock:
                self._holding = [*(work for work in self._holding if work.holds_memory()), submitted]
        return submitted

    def run(
        self,
        function: Callable[[], None],
        name: str,
        *,
        after: Sequence[Waitable] | None = None,
        keep: Sequence[Tensor] = (),
    ) -> Work:
        """See Stream."""

        def operation() -> Operation:
            function()
            yield ()

        return self.submit(operation(), name, after=after, keep=keep)

    def begin(self, name: str) -> Span | None:
        """See Stream."""
        if not self._timeline.recording:
            return None
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            return self._timeline.begin(self._name, name)

    def follow(self, work: Waitable, span: Span | None) -> Waitable:
        """See Stream."""
        if span is not None:
            with torch.cuda.stream(self._stream):
                work.wait()
                span.end()
        return work
