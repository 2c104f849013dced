"""Asynchronous copies between device and host memory: one stream per direction, each in the order of the calls.

Copies and waits for them are rows of the timeline: "offload", "reload", "wait offload".

[Note: order of copies] A copy starts when the works in `after` are done; by default, when everything is done that was
queued on the current stream before it. Copies from or to one host block follow each other, in whichever direction.
`wait` of a copy orders later work of the caller behind it, and `synchronize` blocks the host. Neither end may be
changed before that; memory that the copy still needs is kept alive meanwhile (see [Note: lifetimes of tensors] in
streams/stream.py). On CUDA host memory must be page-locked, or copies are not asynchronous (they are right all the
same).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from megatron.core.offload.host_pool import HostBlock
from megatron.core.streams.stream import Stream, Work
from megatron.core.streams.streams import Streams

OFFLOAD, RELOAD, WAIT = "offload", "reload", "wait offload"  # rows of the timeline
TensorPair = tuple[Tensor, Tensor]  # source and destination, of one size and dtype


class CopyEngine:
    """Copies to the host and to the device. Every kind of offload has an engine of its own, so that none queues behind
    another."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._offload, self._reload = (streams.stream(row, wait_row=WAIT) for row in (OFFLOAD, RELOAD))

    def to_host(
        self, name: str, pairs: Sequence[TensorPair], block: HostBlock, after: Sequence[Work] | None = None
    ) -> Work:
        """Start to copy device tensors to parts of `block`. `name`: for the timeline. `after`: see the note."""
        return self._start(self._offload, name, pairs, block, after)

    def to_device(
        self, name: str, pairs: Sequence[TensorPair], block: HostBlock, after: Sequence[Work] | None = None
    ) -> Work:
        """Start to copy parts of `block`, and tensors that stayed on the device, to device tensors."""
        return self._start(self._reload, name, pairs, block, after)

    def _start(
        self, stream: Stream, name: str, pairs: Sequence[TensorPair], block: HostBlock, after: Sequence[Work] | None
    ) -> Work:
        def copy() -> None:
            for source, destination in pairs:
                destination.copy_(source, non_blocking=True)

        works = [self._streams.mark()] if after is None else list(after)
        if block.last_copy is not None:
            works.append(block.last_copy)
        keep = [tensor for pair in pairs for tensor in pair]
        block.last_copy = stream.run(copy, name, after=works, keep=keep)
        return block.last_copy
