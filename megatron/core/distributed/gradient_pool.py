"""Memory for gradients that are reduced and then dropped: a few blocks, reused by buckets of about their size."""

from __future__ import annotations

import torch
from torch import Tensor


class GradientPool:
    """Lends blocks of fp32 memory.

    It keeps at most `max_blocks` blocks, lent or free, and lends more only if needed.

    Layers are alike, so nearly all buckets find a free block of their size. The large bucket of the embedding has a
    block of its own, so the other blocks need not be as large. A free block is lent on the stream that gave it back,
    after that stream has waited for the last use.
    """

    def __init__(self, max_blocks: int, device: torch.device) -> None:
        self._max_blocks, self._device = max_blocks, device
        self._free: list[Tensor] = []
        self._lent: list[int] = []  # elements of each

    @property
    def is_exhausted(self) -> bool:
        """Whether `max_blocks` blocks are lent. Then take another one only if none can be given back."""
        return len(self._lent) >= self._max_blocks

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks, lent and free."""
        return 4 * (sum(self._lent) + sum(len(block) for block in self._free))

    def take(self, size: int) -> Tensor:
        """Returns a block of `size` to `2 * size` undefined elements."""
        fitting = [number for number, block in enumerate(self._free) if size <= len(block) <= 2 * size]
        if fitting:
            taken = self._free.pop(min(fitting, key=lambda number: len(self._free[number])))
        else:
            if self._free and len(self._free) + len(self._lent) >= self._max_blocks:
                del self._free[0]  # the one that was free longest; freed before the new one is allocated
            taken = torch.empty(size, dtype=torch.float32, device=self._device)
        self._lent.append(len(taken))
        return taken

    def give_back(self, block: Tensor) -> None:
        """Ends the use of a block."""
        self._lent.remove(len(block))
        if len(self._free) + len(self._lent) < self._max_blocks:
            self._free.append(block)

    def clear(self) -> None:
        """Frees all blocks that are not lent."""
        self._free.clear()
