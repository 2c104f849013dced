"""Transfers of context parallelism in a timeline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron.core.comm.collectives import Handle
from megatron.core.comm.lane import Lane, Steps
from megatron.core.timeline import Span, Timeline

ROW = "cp"
_IN_FLIGHT = 64  # transfers that can be followed at once


class Watch:
    """Draws transfers while a timeline records; does nothing at other times.

    On the CPU only a thread that waits sees when a message arrives: a lane's, which starts with the first transfer drawn.
    On CUDA a stream of its own waits for the transfer, so a span is from when its input is there to its end.
    """

    def __init__(self, timeline: Timeline | None, device: torch.device) -> None:
        self._timeline, self._device = timeline, device
        self._lane = Lane("cp", in_flight=_IN_FLIGHT)
        self._stream: torch.cuda.Stream | None = None

    def __call__(self, name: str, start: Callable[[], tuple[Tensor, Handle]]) -> tuple[Tensor, Handle]:
        """What `start` returns, which begins a transfer."""
        if self._timeline is None:
            return start()
        if self._device.type == "cuda":
            return self._on_cuda(self._timeline, name, start)
        span = self._timeline.begin(ROW, name)
        result, handle = start()
        if span is None or handle.work is None:
            return result, handle
        return result, handle._replace(work=self._lane.submit(_until(handle.work, span)))

    def _on_cuda(
        self, timeline: Timeline, name: str, start: Callable[[], tuple[Tensor, Handle]]
    ) -> tuple[Tensor, Handle]:
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            span = timeline.begin(ROW, name)
        result, handle = start()
        if span is not None and handle.work is not None:
            with torch.cuda.stream(self._stream):
                handle.work.wait()
                span.end()
        return result, handle


UNWATCHED = Watch(None, torch.device("cpu"))


def _until(work: Any, span: Span) -> Steps:
    yield [work]
    span.end()
