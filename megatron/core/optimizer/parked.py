"""State that waits in far memory between steps and visits the device for its update, chunk by chunk.

Two buffers on the device: while one chunk is updated in one, the next comes into the other, and the last one leaves. On
CUDA all of it is queued ahead; a buffer is refilled after the event of its last copy out.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron.core.optimizer.chunks import Chunk
from megatron.core.optimizer.copies import Copies, Event
from megatron.core.optimizer.far_memory import DiskMemory, Held, HostMemory
from megatron.core.optimizer.precision import Scratch
from megatron.core.optimizer.update_rule import Inputs
from megatron.spec.optimizer_state import STAGED


class ParkedStates:
    """Owns the state of `chunks`, listed in the order of their updates."""

    def __init__(self, chunks: Sequence[Chunk], memory: HostMemory | DiskMemory, device: torch.device) -> None:
        self._copies = Copies(device)
        self._order = {chunk: number for number, chunk in enumerate(chunks)}
        self._chunks = list(chunks)
        self._held: list[Held] = []
        for chunk in chunks:
            self._held.append(memory.take(chunk.shapes(far=False)))
            chunk.begin(self._held[-1].tensors, far=False)
        largest: dict[str, tuple[int, torch.dtype]] = {}
        for chunk in chunks:
            for key, (size, dtype) in chunk.shapes(far=False).items():
                largest[key] = max(size, largest.get(key, (0, dtype))[0]), dtype
        self._slots = [
            {key: torch.empty(size, dtype=dtype, device=device) for key, (size, dtype) in largest.items()}
            for _ in range(min(STAGED, len(self._chunks)))
        ]
        self._arrived: list[Event] = [None] * STAGED
        self._left: list[Event] = [None] * STAGED

    @property
    def nbytes(self) -> int:
        """Of far memory."""
        return sum(chunk.nbytes for chunk in self._chunks)

    @property
    def staging_bytes(self) -> int:
        """Of the buffers on the device."""
        return sum(tensor.nbytes for slot in self._slots for tensor in slot.values())

    def update(self, chunk: Chunk, parameters: Tensor, scratch: Scratch, inputs: Inputs) -> None:
        """Step the next chunk, whose weights are in `parameters`, on the device. Chunks must come in order, all of them in
        every step."""
        number = self._order[chunk]
        if number == 0:
            for first in range(len(self._slots)):
                self._fetch(first)
        slot = number % STAGED
        staged = self._staged(chunk, slot)
        self._copies.device_waits(self._arrived[slot])
        chunk.step(staged, chunk.gradient, parameters, scratch, inputs)
        stepped = self._copies.mark()
        for key, tensor in staged.items():
            self._left[slot] = self._copies.out(self._held[number].tensors[key], tensor, stepped)
        self._held[number].behind()
        if number + STAGED < len(self._chunks):
            self._fetch(number + STAGED)

    def settle(self) -> None:
        """Return when far memory is current."""
        for event in self._left:
            self._copies.host_waits(event)

    def _fetch(self, number: int) -> None:
        slot, held = number % STAGED, self._held[number]
        if number + 1 < len(self._held):
            self._held[number + 1].ahead()
        for key, tensor in self._staged(self._chunks[number], slot).items():
            self._arrived[slot] = self._copies.into(tensor, held.tensors[key], self._left[slot])

    def _staged(self, chunk: Chunk, slot: int) -> dict[str, Tensor]:
        shapes = chunk.shapes(far=False)
        return {key: self._slots[slot][key][:size] for key, (size, _) in shapes.items()}
