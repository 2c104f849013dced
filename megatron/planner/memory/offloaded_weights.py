"""Weights that live in host memory: the buckets of them that are on the device while a layer runs.

Throughout a step one bucket is on the device: the one that forward released last, which backward needs first. While a
module runs, its own bucket and the next one are there. When backward recomputes a group of layers, all buckets of the
group have been read before its backward begins, which reads them again. So they are there together, with the next one.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from megatron.planner.memory.rank_buckets import Buckets


@dataclass(frozen=True)
class OffloadedBuckets:
    """The offloaded buckets of one rank, in the order of backward.

    sizes: bytes of each whole bucket. layers: the layers whose weights each bucket holds.
    """

    sizes: tuple[int, ...] = ()
    layers: tuple[frozenset[int], ...] = ()

    @property
    def resident(self) -> int:
        """Bytes of the bucket that is on the device throughout a step."""
        return max(self.sizes, default=0)

    @property
    def pair(self) -> int:
        """Bytes of two buckets: the one that is read and the next one."""
        return sum(sorted(self.sizes)[-2:])

    def fetched(self, layers: Collection[int], *, again: bool) -> int:
        """Returns the bytes on the device in addition to `resident` while one of `layers` runs.

        again: while backward recomputes `layers` as one group.
        """
        read = [place for place, held in enumerate(self.layers) if not held.isdisjoint(layers)]
        if not read:
            return 0
        if not again:
            return self.pair - self.resident
        return max(0, sum(self.sizes[read[0] : read[-1] + 2]) - self.resident)


def offloaded_buckets(buckets: Buckets, width: int) -> OffloadedBuckets:
    """Returns those of a rank's buckets that live in host memory. width: bytes per element."""
    numbers = np.flatnonzero(buckets.on_host).tolist()
    return OffloadedBuckets(
        tuple(width * int(buckets.sizes[number]) for number in numbers),
        tuple(frozenset(int(name.split(".")[2]) for name in buckets.names[number]) for number in numbers),
    )
