"""The streams of one device."""

from __future__ import annotations

import sys

import torch

from megatron.core.streams.cuda import CudaStream, everything_queued
from megatron.core.streams.stream import Stream, Work
from megatron.core.streams.thread import Completed, ThreadStream
from megatron.core.streams.turns import Turns
from megatron.core.timeline import Timeline


class Streams:
    """Makes streams for one device, all drawn in one timeline. Who runs something asynchronously is handed this."""

    def __init__(self, device: torch.device, timeline: Timeline) -> None:
        self.device, self.timeline = device, timeline
        self.turns = Turns(device)  # of computations that run together

    def stream(
        self, name: str, *, wait_row: str | None = None, in_flight: int = sys.maxsize, high_priority: bool = False
    ) -> Stream:
        """A new stream of the device: a CUDA stream, or a thread.

        name: of the thread and, by default, of its row in the timeline. wait_row: the row in which waits of compute for
        its works are drawn; None: they are not drawn. in_flight: operations under way at once on the CPU, which bounds
        their memory. high_priority: its CUDA kernels go before those of compute.
        """
        if self.device.type == "cuda":
            return CudaStream(name, self.device, self.timeline, wait_row=wait_row, high_priority=high_priority)
        return ThreadStream(name, self.device, self.timeline, wait_row=wait_row, in_flight=in_flight)

    def host_stream(self, name: str) -> Stream:
        """A thread, whatever the device, for work that the host does concurrently with it: one function after the
        other.

        It is not drawn: on CUDA a timeline shows times of the device.
        """
        return ThreadStream(name, self.device, Timeline(self.device), wait_row=None, in_flight=sys.maxsize)

    def mark(self) -> Work:
        """Everything that is queued on the current stream, as a work that others can be put behind."""
        return everything_queued(self.device) if self.device.type == "cuda" else Completed()
