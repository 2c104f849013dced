"""Weights whose home is far memory visit the device for their update, a bucket's slice at a time.

While one is updated the next one comes and the one before it leaves, so at most three slices are near. Values come only
where an update reads them: masters of a half-precision model say all that its weights will be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from megatron.core.distributed.bucket import Bucket
from megatron.core.distributed.home import Travel


class Visits:
    """Of one step's updates."""

    def __init__(self, buckets: Iterable[Bucket], reads: Callable[[Bucket], bool]) -> None:
        """`buckets`: those that the device updates, in the order of their updates. reads: whether updates need values."""
        order = [bucket for bucket in buckets if bucket.home is not None]
        self._after = dict(zip((bucket.index for bucket in order), order[1:], strict=False))
        self._reads = reads
        self._coming: dict[int, tuple[Tensor, Travel | None]] = {}
        self._leaving: Travel | None = None

    def enter(self, bucket: Bucket) -> Tensor:
        """[size / shards] near memory of the bucket's slice; with its values, or zeros where those are not read."""
        if bucket.home is None:
            return bucket.param_shard
        if bucket.index not in self._coming:
            self._fetch(bucket)
        near, copy = self._coming.pop(bucket.index)
        if bucket.index in self._after:
            self._fetch(self._after[bucket.index])
        if copy is not None:
            copy.wait()
        return near

    def leave(self, bucket: Bucket, near: Tensor, parts: Sequence[tuple[int, int]]) -> None:
        """These elements of the slice, (start, stop), have been updated."""
        if bucket.home is None:
            return
        before, self._leaving = self._leaving, bucket.home.store([(start, near[start:stop]) for start, stop in parts])
        if before is not None:
            before.wait()  # bounds what is near

    def _fetch(self, bucket: Bucket) -> None:
        assert bucket.home is not None
        # Zeros: padding is never updated, and stays what it is.
        near = torch.zeros(len(bucket.param_shard), dtype=bucket.dtype, device=bucket.device)
        self._coming[bucket.index] = near, bucket.home.bring(near) if self._reads(bucket) else None
