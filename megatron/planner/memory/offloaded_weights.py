"""Weights that live in host memory: which of their buckets are on the device while a layer runs.

One bucket is there all through a step: the one that forward released last, or that backward needs first. A module's own
bucket and the next one are there while it runs. A layer that is computed again in backward has read all its buckets by
then, and backward is about to read them: they are there together, and the next one.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from megatron.spec.buckets import BucketLayout


@dataclass(frozen=True)
class OffloadedBuckets:
    """The buckets of one rank in the order of backward. sizes: whole, in bytes. layers: those whose weights each holds."""

    sizes: tuple[int, ...] = ()
    layers: tuple[frozenset[int], ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        return sum(self.sizes)

    @property
    def always(self) -> int:
        """Bytes of the one that is on the device all through a step."""
        return max(self.sizes, default=0)

    @property
    def pair(self) -> int:
        """Bytes of two: the one that is read and the next."""
        return sum(sorted(self.sizes)[-2:])

    def fetched(self, layers: Collection[int], *, again: bool) -> int:
        """Bytes on the device besides `always` while one of `layers` runs, or while they are computed `again` and backward
        begins."""
        read = [place for place, held in enumerate(self.layers) if not held.isdisjoint(layers)]
        if not read:
            return 0
        if not again:
            return self.pair - self.always
        return max(0, sum(self.sizes[read[0] : read[-1] + 2]) - self.always)


def offloaded_buckets(buckets: Sequence[BucketLayout], width: int) -> OffloadedBuckets:
    """The buckets of parameters that live in host memory. width: bytes per element."""
    return OffloadedBuckets(
        tuple(width * bucket.size for bucket in buckets),
        tuple(frozenset(int(name.split(".")[2]) for name in bucket.offsets) for bucket in buckets),
    )
