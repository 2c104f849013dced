"""Updates chunks of the optimizer on the CPU, in a thread, while the device updates the others.

[Note: a step of the CPU optimizer]
    a bucket is reduced     with overlap: gradients of its CPU chunks are copied to the host during the rest of
                            backward, but for those that are summed over tp at its end, which `start` copies
    `start`                 the thread takes the chunks one by one in forward order: it waits for the gradient, updates
                            the states, and copies the rounded masters into the parameters. It also waits for the gate
                            of the step (see update_rule.py): whether there is an update at all is not known before
    `finish` of a bucket    waits for its parameters: to be called before they are gathered or read
With overlap every CPU chunk has a gradient buffer. Without overlap two are enough: while one chunk is updated, the
gradient of the next one is copied. Two buffers hold results. The thread runs jobs in the order of submission, and
gradient copies are submitted before updates, so a job only ever waits for copies, and every buffer is free when it is
used again: a gradient buffer after the update that read it, a result buffer after its last copy to the device.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megatron.core.distributed.bucket import Bucket
from megatron.core.offload.copy_engine import CopyEngine
from megatron.core.offload.host_pool import HostBlock, HostPool
from megatron.core.optimizer.optimizer_chunk import OptimizerChunk
from megatron.core.optimizer.precision import Scratch
from megatron.core.optimizer.update_rule import Inputs
from megatron.core.streams.stream import Work
from megatron.core.streams.streams import Streams
from megatron.spec.optimizer_state import STAGED

Buffer = tuple[HostBlock, Tensor]
Range = tuple[int, int]  # the first element of a chunk, and the one after the last


class CpuOptimizer:
    """Owns the states of the chunks that the CPU updates, and the thread that updates them."""

    def __init__(
        self, states: HostPool, buffers: HostPool, engine: CopyEngine, streams: Streams, *, overlap: bool
    ) -> None:
        """states: memory of the states. buffers: memory of the gradients and results that are copied."""
        self.overlap = overlap
        self._states, self._pool, self._engine, self._streams = states, buffers, engine, streams
        self._thread = streams.host_stream("cpu-optimizer")
        self._scratch = Scratch(torch.device("cpu"))
        self._blocks: dict[OptimizerChunk, HostBlock] = {}
        self._gradients: dict[OptimizerChunk, Buffer] = {}  # with overlap
        self._buffers: dict[tuple[str, int], Buffer] = {}
        self._gate = self._new_buffer(3, torch.float32)
        self._gate_copy: Work | None = None
        self._gradient_copies: dict[OptimizerChunk, Work] = {}
        self._requested: set[OptimizerChunk] = set()  # chunks whose gradient copy was submitted in this step
        self._result_copies: list[Work | None] = [None] * STAGED  # the last copy out of each result buffer
        self._parameter_copies: dict[OptimizerChunk, Work] = {}  # of this step
        self._jobs: defaultdict[int, list[Work]] = defaultdict(list)  # of this step, by bucket

    @property
    def chunks(self) -> list[OptimizerChunk]:
        """The chunks that the CPU updates, in forward order, which is the order of their updates."""
        return sorted(self._blocks, key=lambda chunk: (-chunk.bucket.index, chunk.start))

    @property
    def nbytes(self) -> int:
        """Bytes of offloaded states, gradient and result buffers, and work space for conversion."""
        buffers = [tensor for _, tensor in (*self._gradients.values(), *self._buffers.values())]
        return sum(chunk.nbytes for chunk in self._blocks) + sum(t.nbytes for t in buffers) + self._scratch.nbytes

    def take(self, chunk: OptimizerChunk) -> None:
        """Moves a chunk from the device to the CPU. Only between steps."""
        block, states = self._states.take_tensors(chunk.shapes(on_cpu=True))
        if chunk.state:
            chunk.move(states, on_cpu=True)
        else:
            chunk.begin(states, on_cpu=True)
        self._blocks[chunk] = block
        if self.overlap:
            self._gradients[chunk] = self._new_buffer(chunk.size, torch.float32)
        largest = max(self._blocks, key=lambda buffer: buffer.size)
        for slot in range(min(STAGED, len(self._blocks))):
            self._result(slot, largest)
            if not self.overlap:
                self._buffer("gradient", slot, largest.size, torch.float32)

    def give_back(self, chunk: OptimizerChunk) -> None:
        """Moves a chunk to the device and frees its host memory. Only between steps."""
        self._wait_for_gradients()
        chunk.move(chunk.on_device(), on_cpu=False)
        self._states.discard(self._blocks.pop(chunk))
        if chunk in self._gradients:
            self._pool.discard(self._gradients.pop(chunk)[0])
        self._gradient_copies.pop(chunk, None)
        self._requested.discard(chunk)

    def send_gradients(self, bucket: Bucket) -> None:
        """Call when the reduction of the bucket's gradient is queued on the current stream. Any thread may call it."""
        if bucket.on_both_ends:
            return  # the two ends are summed later
        after = self._streams.mark()
        for chunk in self._blocks:
            if chunk.bucket is bucket:
                self._requested.add(chunk)
                buffer, final = self._gradients[chunk], _others(_summed_over_tp(chunk), chunk.size)
                self._submit(chunk, functools.partial(self._copy_gradient, chunk, buffer, final, after))

    def drop_gradients(self) -> None:
        """Call when gradients that were sent shall not be used: waits until the device may write others."""
        self._wait_for_gradients()
        self._gradient_copies.clear()
        self._requested.clear()

    def start(self, inputs: Inputs) -> None:
        """Starts the update of all chunks.

        Gradients must be final, and work that is queued on the device later must not read parameters before `finish`.
        """
        now, order = self._streams.mark(), self.chunks
        if order:
            self._submit(order[0], functools.partial(self._copy_gate, inputs.gate, now))
        if self.overlap:
            for chunk in order:
                buffer, left = self._gradients[chunk], [(0, chunk.size)]
                if chunk in self._requested:
                    left = _summed_over_tp(chunk)
                if left:
                    self._submit(chunk, functools.partial(self._copy_gradient, chunk, buffer, left, now))
        for number, chunk in enumerate(order):
            self._submit(chunk, functools.partial(self._update, order, number, inputs, now))
        self._requested.clear()

    def finish(self, bucket: Bucket) -> None:
        """Orders the work that is queued on the current stream from now on behind the update of the bucket's
        parameters."""
        for job in self._jobs.pop(bucket.index, ()):
            job.wait()
        for chunk in self.chunks:
            if chunk.bucket is bucket and (copy := self._parameter_copies.pop(chunk, None)) is not None:
                copy.wait()

    def synchronize(self) -> None:
        """Blocks the host until the thread and its result copies are done. Then states may be read and moved."""
        for jobs in list(self._jobs.values()):
            for job in jobs:
                job.wait()
        for copy in self._result_copies:
            if copy is not None:
                copy.synchronize()

    def _wait_for_gradients(self) -> None:
        self.synchronize()
        for copy in self._gradient_copies.values():
            copy.synchronize()

    def _submit(self, chunk: OptimizerChunk, job: Callable[[], None]) -> None:
        self._jobs[chunk.bucket.index].append(self._thread.run(job, chunk.label, after=()))

    def _copy_gate(self, gate: Tensor, after: Work) -> None:
        block, host_gate = self._gate
        self._gate_copy = self._engine.to_host("gate", [(gate, host_gate)], block, [after])

    def _copy_gradient(self, chunk: OptimizerChunk, buffer: Buffer, ranges: Sequence[Range], after: Work) -> None:
        """Starts to copy these elements of a chunk's gradient."""
        block, gradient = buffer
        pairs = [(chunk.gradient[start:stop], gradient[start:stop]) for start, stop in ranges]
        self._gradient_copies[chunk] = self._engine.to_host(f"gradient of {chunk.label}", pairs, block, [after])

    def _update(self, order: Sequence[OptimizerChunk], number: int, inputs: Inputs, now: Work) -> None:
        chunk, slot = order[number], number % STAGED
        block = self._blocks[chunk]
        if number + 1 < len(order):
            self._blocks[order[number + 1]].read_ahead()
        gradient = self._arrived_gradient(order, number, now)
        assert self._gate_copy is not None
        self._gate_copy.synchronize()
        result_block, result = self._result(slot, chunk)
        if (copy := self._result_copies[slot]) is not None:
            copy.synchronize()
        chunk.step(chunk.state, gradient, result, self._scratch, dataclasses.replace(inputs, gate=self._gate[1]))
        block.write_back()
        if chunk.bucket.offloaded is None:
            pairs = [(result, chunk.parameters)]
            copy = self._engine.to_device(f"parameters of {chunk.label}", pairs, result_block, [now])
            self._result_copies[slot] = self._parameter_copies[chunk] = copy
        if not self.overlap and number + STAGED < len(order):
            self._fill(order, number + STAGED, now)

    def _arrived_gradient(self, order: Sequence[OptimizerChunk], number: int, now: Work) -> Tensor:
        """Waits for the gradient of a chunk and returns it."""
        chunk = order[number]
        if not self.overlap and number == 0:
            for first in range(min(STAGED, len(order))):
                self._fill(order, first, now)
        self._gradient_copies.pop(chunk).synchronize()
        _, gradient = self._gradients[chunk] if self.overlap else self._gradient_buffer(order, number)
        return gradient

    def _fill(self, order: Sequence[OptimizerChunk], number: int, now: Work) -> None:
        chunk = order[number]
        self._copy_gradient(chunk, self._gradient_buffer(order, number), [(0, chunk.size)], now)

    def _gradient_buffer(self, order: Sequence[OptimizerChunk], number: int) -> Buffer:
        return self._buffer("gradient", number % STAGED, order[number].size, torch.float32)

    def _result(self, slot: int, chunk: OptimizerChunk) -> Buffer:
        """Returns the memory to which the update writes the chunk's new parameters, and from which they are copied.

        fp32 masters are copied directly unless they are on disk. Offloaded weights are updated in place, because
        nothing has been copied from them since backward.
        """
        if chunk.bucket.offloaded is not None:
            return self._blocks[chunk], chunk.parameters
        if not chunk.half and not self._states.is_on_disk:
            return self._blocks[chunk], chunk.state["master"]
        dtype = chunk.bucket.param_shard.dtype
        return self._buffer(f"result {dtype}", slot, chunk.size, dtype)

    def _buffer(self, kind: str, slot: int, size: int, dtype: torch.dtype) -> Buffer:
        """Returns one of two buffers, which grow to the largest chunk."""
        buffer = self._buffers.get((kind, slot))
        if buffer is None or len(buffer[1]) < size:
            if buffer is not None:
                self._pool.discard(buffer[0])
            buffer = self._buffers[kind, slot] = self._new_buffer(size, dtype)
        block, tensor = buffer
        return block, tensor[:size]

    def _new_buffer(self, size: int, dtype: torch.dtype) -> Buffer:
        block, tensors = self._pool.take_tensors({"buffer": (size, dtype)})
        return block, tensors["buffer"]


def _summed_over_tp(chunk: OptimizerChunk) -> list[Range]:
    """The elements whose gradients are summed over tp after their bucket was reduced."""
    runs = chunk.bucket.runs(lambda info, section: section.partial)
    within = [(max(start, chunk.start), min(stop, chunk.stop)) for start, stop, partial in runs if partial]
    return [(start - chunk.start, stop - chunk.start) for start, stop in within if start < stop]


def _others(ranges: Sequence[Range], size: int) -> list[Range]:
    """The elements of 0 .. size that are in none of these ranges, which are in order."""
    starts, stops = [0, *(stop for _, stop in ranges)], [*(start for start, _ in ranges), size]
    return [(start, stop) for start, stop in zip(starts, stops, strict=True) if start < stop]
