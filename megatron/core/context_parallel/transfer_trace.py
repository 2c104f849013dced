"""Transfers of context parallelism in a timeline."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from megatron.core.comm.collectives import Handle
from megatron.core.streams.streams import Streams


class Trace:
    """Draws transfers, with a stream that waits for them while the timeline records; see Stream.follow."""

    def __init__(self, streams: Streams | None) -> None:
        """Without streams nothing is drawn."""
        self._stream = None if streams is None else streams.stream("cp")

    def __call__(self, name: str, start: Callable[[], tuple[Tensor, Handle]]) -> tuple[Tensor, Handle]:
        """The result of `start`, which starts a transfer."""
        if self._stream is None:
            return start()
        span = self._stream.begin(name)
        result, handle = start()
        if handle.work is None:
            return result, handle
        return result, handle._replace(work=self._stream.follow(handle.work, span))


UNTRACED = Trace(None)
