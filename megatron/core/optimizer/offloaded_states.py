"""Keeps optimizer states in host memory between steps, and copies them to the device for their update.

There are two buffers on the device. While a chunk is updated in one of them, the previous chunk is stored from the
other one, and then the next chunk is fetched into it. On CUDA all of this is queued ahead: a buffer is refilled after
the last copy out of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron.core.offload.copy_engine import CopyEngine
from megatron.core.offload.host_pool import HostBlock, HostPool
from megatron.core.optimizer.optimizer_chunk import OptimizerChunk
from megatron.core.optimizer.precision import Scratch
from megatron.core.optimizer.update_rule import Inputs
from megatron.core.streams.stream import Work
from megatron.spec.optimizer_state import STAGED


class OffloadedStates:
    """Owns the states of `chunks`, which are listed in the order of their updates."""

    def __init__(
        self, chunks: Sequence[OptimizerChunk], pool: HostPool, engine: CopyEngine, device: torch.device
    ) -> None:
        self._engine, self._chunks = engine, list(chunks)
        self._number = {chunk: number for number, chunk in enumerate(chunks)}
        self._blocks: list[HostBlock] = []
        largest: dict[str, tuple[int, torch.dtype]] = {}
        for chunk in chunks:
            shapes = chunk.shapes(on_cpu=False)
            block, states = pool.take_tensors(shapes)
            chunk.begin(states, on_cpu=False)
            self._blocks.append(block)
            for key, (size, dtype) in shapes.items():
                largest[key] = max(size, largest.get(key, (0, dtype))[0]), dtype
        self._buffers = [
            {key: torch.empty(size, dtype=dtype, device=device) for key, (size, dtype) in largest.items()}
            for _ in range(min(STAGED, len(self._chunks)))
        ]
        self._fetched: list[Work | None] = [None] * STAGED  # the last copy into each buffer
        self._stored: list[Work | None] = [None] * STAGED  # the last copy out of each buffer

    @property
    def nbytes(self) -> int:
        """Bytes of the optimizer states in host memory or on disk."""
        return sum(chunk.nbytes for chunk in self._chunks)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the buffers on the device."""
        return sum(tensor.nbytes for buffer in self._buffers for tensor in buffer.values())

    def update(self, chunk: OptimizerChunk, parameters: Tensor, scratch: Scratch, inputs: Inputs) -> None:
        """Updates the next chunk, whose weights are `parameters`, on the device.

        Every step must update all chunks, in order."""
        number = self._number[chunk]
        if number == 0:
            for first in range(len(self._buffers)):
                self._fetch(first)
        slot, block = number % STAGED, self._blocks[number]
        states, fetched = self._views(chunk, slot), self._fetched[slot]
        assert fetched is not None
        fetched.wait()
        chunk.step(states, chunk.gradient, parameters, scratch, inputs)
        pairs = [(tensor, chunk.state[key]) for key, tensor in states.items()]
        self._stored[slot] = self._engine.to_host(f"states of {chunk.label}", pairs, block)
        block.write_back()
        if number + STAGED < len(self._chunks):
            self._fetch(number + STAGED)

    def synchronize(self) -> None:
        """Blocks the host until host memory is current."""
        for stored in self._stored:
            if stored is not None:
                stored.synchronize()

    def _fetch(self, number: int) -> None:
        slot, chunk = number % STAGED, self._chunks[number]
        if number + 1 < len(self._chunks):
            self._blocks[number + 1].read_ahead()
        pairs = [(chunk.state[key], tensor) for key, tensor in self._views(chunk, slot).items()]
        stored = self._stored[slot]
        after = [] if stored is None else [stored]
        self._fetched[slot] = self._engine.to_device(f"states of {chunk.label}", pairs, self._blocks[number], after)

    def _views(self, chunk: OptimizerChunk, slot: int) -> dict[str, Tensor]:
        """Returns the chunk's part of a buffer, by key."""
        return {key: self._buffers[slot][key][:size] for key, (size, _) in chunk.shapes(on_cpu=False).items()}
