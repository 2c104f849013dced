"""Host memory that holds the tensors of a checkpoint while a thread writes them and training changes the originals.

[Note: staging]
The tensors are copied on a stream of their own, behind what is queued at the moment of the save, while the device and
the host go on with the next forward and backward. Whatever changes the originals waits for the copies: the next update,
and a program that puts other weights in their place. The thread that writes waits for them, too. The copies of a save
are not overwritten before its files are on disk: the next save waits until then. The memory is allocated by the first
save, and used again by those that follow.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

from megatron.core.dist_checkpointing.sharded_tensor import ShardedTensor
from megatron.core.offload.copy_engine import TensorPair
from megatron.core.offload.host_pool import HostBlock, HostPool
from megatron.core.streams.stream import Stream, Work
from megatron.core.streams.streams import Streams

_COPIES = "stage checkpoint"  # rows of the timeline
_WAIT = "wait stage checkpoint"


class Staging:
    """The copies of one save at a time, and the thread that writes them.

    writer: the thread. nbytes: of the copies of the last save. exposed_seconds: for which the host has waited for
    copies since the last save began.
    """

    def __init__(self, streams: Streams) -> None:
        self.writer: Stream = streams.host_stream("write checkpoint")
        self.nbytes = 0
        self.exposed_seconds = 0.0
        self._streams = streams
        self._from_device = streams.stream(_COPIES, wait_row=_WAIT)
        self._from_host = streams.host_stream(_COPIES)
        self._pool = HostPool(pinned=streams.device.type == "cuda")
        self._block: HostBlock | None = None
        self._copies: list[Work] = []  # the last save's, also when they are over

    def copy(self, tensors: Sequence[ShardedTensor]) -> list[ShardedTensor]:
        """Starts to copy those tensors that this rank writes, and returns all with the copies in place of these.

        The copies of the save before are overwritten. Call `before_write` before the originals change.
        """
        self.synchronize()  # after a save that failed before its files were written
        staged = [number for number, tensor in enumerate(tensors) if tensor.is_written]
        # Views of the block must begin at a multiple of their element's size: the widest elements come first.
        staged.sort(key=lambda number: -tensors[number].data.element_size())
        shapes = {str(number): (tensors[number].data.numel(), tensors[number].data.dtype) for number in staged}
        self.nbytes = sum(size * dtype.itemsize for size, dtype in shapes.values())
        self.exposed_seconds = 0.0
        result = list(tensors)
        if not staged:
            return result
        if self._block is not None:
            self._pool.give_back(self._block)
        self._block, copies = self._pool.take_tensors(shapes)
        pairs: list[TensorPair] = []
        for number in staged:
            source = tensors[number].data.detach()
            pairs.append((source, copies[str(number)].view(source.shape)))
            result[number] = dataclasses.replace(tensors[number], data=pairs[-1][1])
        self._copies = self._start(pairs)
        return result

    def before_write(self) -> None:
        """Orders what follows, which changes the originals, behind the copies."""
        started = time.perf_counter()
        for work in self._copies:
            work.wait()
        self.exposed_seconds += time.perf_counter() - started

    def synchronize(self) -> None:
        """Blocks the host until the copies are complete."""
        for work in self._copies:
            work.synchronize()

    def _start(self, pairs: Sequence[TensorPair]) -> list[Work]:
        """Copies of a device's tensors are queued on its stream; a thread copies those that are in host memory."""
        on_device = self._streams.device.type
        parts = (
            (self._from_device, [pair for pair in pairs if pair[0].device.type == on_device]),
            (self._from_host, [pair for pair in pairs if pair[0].device.type != on_device]),
        )
        return [_copied(stream, part) for stream, part in parts if part]


def _copied(stream: Stream, pairs: Sequence[TensorPair]) -> Work:
    def copy() -> None:
        for source, destination in pairs:
            destination.copy_(source, non_blocking=True)

    return stream.run(copy, _COPIES, keep=[tensor for pair in pairs for tensor in pair])
