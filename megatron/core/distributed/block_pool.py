"""Memory for gradients that pass through and are not kept: a few blocks, used again for buckets of about their size."""

from __future__ import annotations

import torch
from torch import Tensor


class BlockPool:
    """Lends blocks of fp32 memory. Keeps no free ones beyond `most` blocks, lent or free.

    Layers repeat, so nearly all buckets find a block of their size; a single large one (the embedding's) has its own,
    and the others need not be as large. A free block is handed out on the stream that gave it back, after it waited for
    whoever used it.
    """

    def __init__(self, most: int, device: torch.device) -> None:
        self._most, self._device = most, device
        self._free: list[Tensor] = []
        self._lent: list[int] = []  # elements of each

    @property
    def is_exhausted(self) -> bool:
        """`most` blocks are lent: take another only if none can be had back."""
        return len(self._lent) >= self._most

    @property
    def nbytes(self) -> int:
        """Size of all blocks, lent and free."""
        return 4 * (sum(self._lent) + sum(len(block) for block in self._free))

    def take(self, size: int) -> Tensor:
        """A block of `size` elements or up to twice as many, undefined."""
        fitting = [number for number, block in enumerate(self._free) if size <= len(block) <= 2 * size]
        if fitting:
            found = self._free.pop(min(fitting, key=lambda number: len(self._free[number])))
        else:
            if self._free and len(self._free) + len(self._lent) >= self._most:
                del self._free[0]  # the one that was free longest; gone before the new one is there
            found = torch.empty(size, dtype=torch.float32, device=self._device)
        self._lent.append(len(found))
        return found

    def give_back(self, block: Tensor) -> None:
        """End of its use."""
        self._lent.remove(len(block))
        if len(self._free) + len(self._lent) < self._most:
            self._free.append(block)

    def clear(self) -> None:
        """Free what is not lent."""
        self._free.clear()
