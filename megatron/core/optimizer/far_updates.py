"""Chunks that the CPU updates in far memory, on a thread of its own, while the device updates the others.

[Note: a step of far chunks]
    a bucket is reduced     with overlap: its far chunks' gradients are copied out, beside the rest of backward
    `start`                 the thread takes chunk after chunk in forward order: waits for the gradient, steps, copies the
                            rounded masters into the parameters
    `finish` of a bucket    its parameters are complete: to be called before it is gathered or read
With overlap every far chunk has a gradient buffer. Without, two are enough: while a chunk is stepped the next gradient
comes. Two buffers carry results back. The thread runs jobs in the order in which they are submitted, and gradients are asked
for before updates, so a job only ever waits for copies, and every buffer is free again when its turn comes: gradient
buffers after the step that read them, result buffers after the copy whose event is kept beside them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from megatron.core.distributed.bucket import Bucket
from megatron.core.optimizer.chunks import Chunk
from megatron.core.optimizer.copies import Copies, Event
from megatron.core.optimizer.far_memory import DiskMemory, Held, HostMemory
from megatron.core.optimizer.precision import Scratch
from megatron.core.optimizer.update_rule import Inputs
from megatron.spec.optimizer_state import STAGED


class FarUpdates:
    """Owns the far chunks' memory and the thread that steps them."""

    def __init__(
        self, memory: HostMemory | DiskMemory, host: HostMemory, device: torch.device, *, overlap: bool
    ) -> None:
        """memory: of the state; host: of what travels."""
        self.overlap = overlap
        self._memory, self._host, self._copies = memory, host, Copies(device)
        self._thread = ThreadPoolExecutor(1, "far-updates", initializer=self._copies.begin_thread)
        self._scratch = Scratch(torch.device("cpu"))
        self._held: dict[Chunk, Held] = {}
        self._gradients: dict[Chunk, Tensor] = {}  # with overlap
        self._staging: dict[tuple[str, int], Tensor] = {}
        self._sent: dict[Chunk, Event] = {}  # gradients on their way
        self._asked: set[Chunk] = set()  # chunks whose gradient was asked for in this step
        self._results: list[Event] = [None] * STAGED
        self._jobs: defaultdict[int, list[Future[Event]]] = defaultdict(list)  # of this step, by bucket

    @property
    def chunks(self) -> list[Chunk]:
        """In forward order: the order of their updates."""
        return sorted(self._held, key=lambda chunk: (-chunk.bucket.index, chunk.start))

    @property
    def nbytes(self) -> int:
        """Of far memory, gradients and results on their way, and copies for conversion; in whichever place."""
        travelling = [*self._gradients.values(), *self._staging.values()]
        return sum(chunk.nbytes for chunk in self._held) + sum(t.nbytes for t in travelling) + self._scratch.nbytes

    def take(self, chunk: Chunk) -> None:
        """From now on this chunk is far. Between steps."""
        held = self._memory.take(chunk.shapes(far=True))
        if chunk.state:
            chunk.move(held.tensors, far=True)
        else:
            chunk.begin(held.tensors, far=True)
        self._held[chunk] = held
        if self.overlap:
            self._gradients[chunk] = self._host.take({"gradient": (chunk.size, torch.float32)}).tensors["gradient"]
        largest = max(self._held, key=lambda held: held.size)
        for slot in range(min(STAGED, len(self._held))):
            self._result(slot, largest)
            if not self.overlap:
                self._buffer("gradient", slot, largest.size, torch.float32)

    def give_back(self, chunk: Chunk) -> None:
        """From now on this chunk is on the device. Between steps; its far memory is free."""
        self._wait_for_gradients()
        chunk.move(chunk.on_device(), far=False)
        del self._held[chunk]
        self._gradients.pop(chunk, None)
        self._sent.pop(chunk, None)
        self._asked.discard(chunk)

    def send_gradients(self, bucket: Bucket) -> None:
        """The bucket's gradient is reduced, once what is queued on the current stream is done. From any thread."""
        if bucket.on_both_ends:
            return  # the two ends are added up later
        after = self._copies.mark()
        for chunk in self._held:
            if chunk.bucket is bucket:
                self._ask(chunk, after)

    def start(self, inputs: Inputs) -> None:
        """Begin to update all far chunks. Gradients are final; the device reads parameters no more after what is queued."""
        now, order = self._copies.mark(), self.chunks
        if self.overlap:
            for chunk in order:
                if chunk in self._asked:
                    self._submit(chunk, self._send_again, chunk, now)
                else:
                    self._ask(chunk, now)
        for number in range(len(order)):
            self._submit(order[number], self._step, order, number, inputs, now)
        self._asked.clear()

    def finish(self, bucket: Bucket) -> None:
        """Return when its parameters are complete for what is queued on the current stream from now on."""
        for job in self._jobs.pop(bucket.index, ()):
            self._copies.device_waits(job.result())

    def settle(self) -> None:
        """Return when the thread has nothing to do: state may be read and moved."""
        for jobs in list(self._jobs.values()):
            for job in jobs:
                job.result()

    def discard(self) -> None:
        """There is no update in this step; gradients are forgotten."""
        self._wait_for_gradients()
        self._sent.clear()
        self._asked.clear()
        self._jobs.clear()

    def _wait_for_gradients(self) -> None:
        self.settle()
        for event in self._sent.values():
            self._copies.host_waits(event)

    def _ask(self, chunk: Chunk, after: Event) -> None:
        self._asked.add(chunk)
        self._submit(chunk, self._send, chunk, self._gradients[chunk], after)

    def _submit(self, chunk: Chunk, work: Callable[..., Event], *arguments: Any) -> None:
        self._jobs[chunk.bucket.index].append(self._thread.submit(work, *arguments))

    def _send(self, chunk: Chunk, gradient: Tensor, after: Event) -> Event:
        self._sent[chunk] = self._copies.out(gradient, chunk.gradient, after)
        return None

    def _send_again(self, chunk: Chunk, after: Event) -> Event:
        """What changed since the bucket was reduced: gradients that are parts over tp have been added up."""
        for start, stop, partial in chunk.bucket.runs(lambda info, section: section.partial):
            first, last = max(start, chunk.start) - chunk.start, min(stop, chunk.stop) - chunk.start
            if partial and first < last:
                to = self._gradients[chunk][first:last]
                self._sent[chunk] = self._copies.out(to, chunk.gradient[first:last], after)
        return None

    def _step(self, order: Sequence[Chunk], number: int, inputs: Inputs, now: Event) -> Event:
        chunk, slot = order[number], number % STAGED
        held = self._held[chunk]
        if number + 1 < len(order):
            self._held[order[number + 1]].ahead()
        gradient = self._gradient_of(order, number, now)
        result = self._result(slot, chunk)
        self._copies.host_waits(self._results[slot])
        chunk.step(held.tensors, gradient, result, self._scratch, inputs)
        held.behind()
        if chunk.bucket.home is None:
            self._results[slot] = self._copies.into(chunk.parameters, result, now)
        if not self.overlap and number + STAGED < len(order):
            self._fill(order, number + STAGED, now)
        return self._results[slot]

    def _gradient_of(self, order: Sequence[Chunk], number: int, now: Event) -> Tensor:
        """Of this chunk, when it has arrived."""
        chunk = order[number]
        if not self.overlap and number == 0:
            for first in range(min(STAGED, len(order))):
                self._fill(order, first, now)
        self._copies.host_waits(self._sent.pop(chunk))
        return self._gradients[chunk] if self.overlap else self._staged(order, number)

    def _fill(self, order: Sequence[Chunk], number: int, now: Event) -> None:
        self._send(order[number], self._staged(order, number), now)

    def _staged(self, order: Sequence[Chunk], number: int) -> Tensor:
        return self._buffer("gradient", number % STAGED, order[number].size, torch.float32)

    def _result(self, slot: int, chunk: Chunk) -> Tensor:
        """Where the chunk's new parameters begin their way back: the masters, where a copy can take them from there.

        Weights whose home is far memory are written right there: nothing has been copied from it since backward.
        """
        if chunk.bucket.home is not None:
            return chunk.parameters
        if not chunk.half and self._memory.is_direct:
            return chunk.state["master"]
        dtype = chunk.bucket.param_shard.dtype
        return self._buffer(f"result {dtype}", slot, chunk.size, dtype)

    def _buffer(self, kind: str, slot: int, size: int, dtype: torch.dtype) -> Tensor:
        """One of a pair that grows to the largest chunk, when that becomes far."""
        held = self._staging.get((kind, slot))
        if held is None or len(held) < size:
            held = self._staging[kind, slot] = self._host.take({kind: (size, dtype)}).tensors[kind]
        return held[:size]
