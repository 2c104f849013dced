"""Copies between near and far memory beside compute: one way out and one way in, each carrying its copies in order.

On CUDA a way is a stream. A copy begins when the compute stream has done what was queued before it, and `wait` orders what
the compute stream does next behind it; the host never stands still. On the CPU a way is a thread (comm/lane.py), and
`wait` blocks. Waits and copies are rows of the timeline: "offload", "reload", "wait offload".
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron.core.comm.lane import Job, Lane, Steps
from megatron.core.memory.tiers import Block, FarMemory
from megatron.core.timeline import Timeline

OUT, IN, WAIT = "offload", "reload", "wait offload"  # rows of the timeline
_PROBE_BYTES = {"cpu": 1 << 22, "cuda": 1 << 26}
Move = tuple[Tensor, Tensor]  # source and destination, uint8 of one length


class Copy(Protocol):
    """Copies under way. Until `wait` has returned, near memory at either end must be kept.

    done: what else may wait for them: a lane's job, or a CUDA event.
    """

    done: Any

    def wait(self) -> None:
        """What compute does from now on comes after the copies."""
        ...


class Copier(Protocol):
    """The two ways."""

    def out(self, name: str, moves: Sequence[Move], block: Block) -> Copy:
        """Start to copy near memory to parts of `block`. `name`: of the group, for the timeline."""
        ...

    def back(self, name: str, moves: Sequence[Move], block: Block) -> Copy:
        """Start to copy parts of `block`, and near memory that a tensor kept, to near memory."""
        ...

    def settle(self, block: Block) -> None:
        """Return when the last copy from or to `block` is over: the host may read and write it."""
        ...


class ThreadCopier:
    """Of a near memory that the CPU computes in."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._ways = {row: Lane(row, in_flight=1 << 20) for row in (OUT, IN)}

    def out(self, name: str, moves: Sequence[Move], block: Block) -> Copy:
        """See Copier."""
        return self._start(OUT, name, moves, block)

    def back(self, name: str, moves: Sequence[Move], block: Block) -> Copy:
        """See Copier."""
        return self._start(IN, name, moves, block)

    def settle(self, block: Block) -> None:
        """See Copier."""
        if block.busy is not None:
            block.busy.wait()

    def _start(self, row: str, name: str, moves: Sequence[Move], block: Block) -> Copy:
        before: Job | None = block.busy
        # What it waits for was submitted earlier: no two ways can wait for each other.
        block.busy = self._ways[row].submit(self._steps(row, name, list(moves), before))
        return _Watched(block.busy, name, self._timeline)

    def _steps(self, row: str, name: str, moves: list[Move], before: Job | None) -> Steps:
        yield [] if before is None else [before]  # up to here in the caller's thread, the rest in the lane's
        span = self._timeline.begin(row, name)
        for source, destination in moves:
            destination.copy_(source)
        if span is not None:
            span.end()


class _Watched:
    """A job whose waits are on the timeline."""

    def __init__(self, job: Job, name: str, timeline: Timeline) -> None:
        self.done, self._name, self._timeline = job, name, timeline

    def wait(self) -> None:
        """See Copy."""
        if self.done.is_completed():
            self.done.wait()  # raises what the copy raised
            return
        with self._timeline.span(WAIT, self._name):
            self.done.wait()


class StreamCopier:
    """Of a CUDA device's memory."""

    def __init__(self, device: torch.device, timeline: Timeline) -> None:
        self._device, self._timeline = device, timeline
        self._ways = {row: torch.cuda.Stream(device) for row in (OUT, IN)}
        self._under_way: list[_Streamed] = []

    def out(self, name: str, moves: Sequence[Move], block: Block) -> Copy:
        """See Copier."""
        return self._start(OUT, name, moves, block)

    def back(self, name: str, moves: Sequence[Move], block: Block) -> Copy:
        """See Copier."""
        return self._start(IN, name, moves, block)

    def settle(self, block: Block) -> None:
        """See Copier."""
        if block.busy is not None:
            block.busy.synchronize()

    def _start(self, row: str, name: str, moves: Sequence[Move], block: Block) -> Copy:
        stream = self._ways[row]
        # Behind the kernels that wrote what goes out, or that used the memory which what comes in is given.
        stream.wait_stream(torch.cuda.current_stream(self._device))
        if block.busy is not None:
            stream.wait_event(block.busy)
        with torch.cuda.stream(stream):
            span = self._timeline.begin(row, name)
            for source, destination in moves:
                destination.copy_(source, non_blocking=True)
            if span is not None:
                span.end()
            block.busy = torch.cuda.Event()
            block.busy.record()
        copy = _Streamed(block.busy, list(moves), name, self._device, self._timeline)
        # Nobody waits for what backward turns out not to read: then its memory has to be held here.
        self._under_way = [*(other for other in self._under_way if not other.is_over()), copy]
        return copy


class _Streamed:
    """The allocator knows near memory as the compute stream's. So it is held here until that stream comes after the copy:
    no record_stream, and what is freed then can be given to the next kernel at once."""

    def __init__(
        self, done: torch.cuda.Event, moves: list[Move], name: str, device: torch.device, timeline: Timeline
    ) -> None:
        self.done, self._moves, self._name = done, moves, name
        self._device, self._timeline = device, timeline

    def is_over(self) -> bool:
        """Whether the memory at either end may be used again."""
        return not self._moves or self.done.query()

    def wait(self) -> None:
        """See Copy."""
        with self._timeline.span(WAIT, self._name):
            torch.cuda.current_stream(self._device).wait_event(self.done)
        self._moves = []


def measured_bandwidth(copier: Copier, far: FarMemory, device: torch.device) -> tuple[float, float]:
    """Bytes a second out and in, each alone: the best of three copies of some MiB. Synchronises the device."""
    near = torch.empty(_PROBE_BYTES.get(device.type, 1 << 22), dtype=torch.uint8, device=device).fill_(1)
    block = far.take(near.numel())
    host = block.bytes[: near.numel()]

    def best(start: Callable[[], Copy]) -> float:
        seconds = []
        for _ in range(4):  # the first touches the pages
            begun = time.perf_counter()
            start().wait()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            seconds.append(time.perf_counter() - begun)
        return near.numel() / min(seconds[1:])

    rates = (
        best(lambda: copier.out("probe", [(near, host)], block)),
        best(lambda: copier.back("probe", [(host, near)], block)),
    )
    far.discard(block)
    return rates
