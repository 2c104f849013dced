"""Copies between the device and far memory, ordered by events.

[Note: copies on CUDA]
Copies out and in have a stream of their own each, so that both directions of the bus are busy. A copy waits for the event
it is given and returns another; `device_waits` puts that into the current stream, `host_waits` blocks the calling thread.
Nobody else waits: whoever changes or frees either end of a copy must have waited for it, which is why every copy's event is
kept until then. Host memory must be pinned, or the copy is not asynchronous (it is right all the same). On the CPU both ends
are host memory; a copy is done when the call returns, on the thread that calls.
"""

from __future__ import annotations

import torch
from torch import Tensor

Event = torch.cuda.Event | None  # None on the CPU, and where nothing has to be waited for


class Copies:
    """Out of and into one device. May be called by several threads."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._on_cuda = device, device.type == "cuda"
        if self._on_cuda:
            self._out, self._into = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def begin_thread(self) -> None:
        """First call of a new thread: it would use the first device, and open a context there, were it not told."""
        if self._on_cuda:
            torch.cuda.set_device(self._device)

    def mark(self) -> Event:
        """Everything that has been queued on the current stream."""
        return torch.cuda.current_stream().record_event() if self._on_cuda else None

    def out(self, far: Tensor, near: Tensor, after: Event) -> Event:
        """far[...] = near[...] once `after` has happened."""
        if not self._on_cuda:
            far.copy_(near)
            return None
        return _queue(self._out, far, near, after)

    def into(self, near: Tensor, far: Tensor, after: Event) -> Event:
        """near[...] = far[...] once `after` has happened."""
        if not self._on_cuda:
            near.copy_(far)
            return None
        return _queue(self._into, near, far, after)

    def host_waits(self, event: Event) -> None:
        """Block until it has happened."""
        if event is not None:
            event.synchronize()

    def device_waits(self, event: Event) -> None:
        """What is queued on the current stream from now on comes after it."""
        if event is not None:
            torch.cuda.current_stream().wait_event(event)


def _queue(stream: torch.cuda.Stream, to: Tensor, source: Tensor, after: Event) -> torch.cuda.Event:
    if after is not None:
        stream.wait_event(after)
    with torch.cuda.stream(stream):
        to.copy_(source, non_blocking=True)
        return stream.record_event()
