"""Weights that live in far memory and visit the device: for a forward, for a backward, and for their update.

What a visit reads has not changed when it is over, so it is dropped where it was; only an update is copied out. See
distributed/param_window.py for when they come, and optimizer/visits.py for updates.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from megatron.core.memory.copier import Copier, Copy
from megatron.core.memory.tiers import FarMemory


class FarWeights:
    """Homes of the parameters with these names (`Homes` of distributed/home.py)."""

    def __init__(self, names: Collection[str], far: FarMemory, copier: Copier) -> None:
        self._names, self._far, self._copier = frozenset(names), far, copier

    def takes(self, name: str) -> bool:
        """See Homes."""
        return name in self._names

    def home(self, label: str, near: Tensor) -> FarShard:
        """See Homes. Raises ConfigError when a disk is full."""
        return FarShard(f"weights of {label}", near, self._far, self._copier)


class FarShard:
    """One rank's slice of a bucket (`Home` of distributed/home.py)."""

    def __init__(self, name: str, near: Tensor, far: FarMemory, copier: Copier) -> None:
        """`near`: the values it begins with, flat."""
        self._name, self._copier = name, copier
        self._block = far.take(near.nbytes)
        self._bytes = self._block.bytes[: near.nbytes]
        self.shard = self._bytes.view(near.dtype)
        self.shard.copy_(near)

    def bring(self, near: Tensor) -> Copy:
        """See Home."""
        return self._copier.back(self._name, [(self._bytes, near.view(torch.uint8))], self._block)

    def store(self, parts: Sequence[tuple[int, Tensor]]) -> Copy:
        """See Home."""
        moves = []
        for start, near in parts:
            first = start * self.shard.itemsize
            moves.append((near.view(torch.uint8), self._bytes[first : first + near.nbytes]))
        return self._copier.out(self._name, moves, self._block)

    def settle(self) -> None:
        """See Home."""
        self._copier.settle(self._block)
