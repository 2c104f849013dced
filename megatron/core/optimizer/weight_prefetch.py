"""Copies offloaded weights to the device for their update, one bucket's shard at a time.

While one shard is updated, the next one is fetched and the previous one is stored, so at most three are on the device.
Values are fetched only where an update reads them: the masters of a half-precision model already determine its weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from megatron.core.distributed.bucket import Bucket
from megatron.core.streams.stream import Work


class WeightPrefetch:
    """Prefetches offloaded weight shards to the device for one optimizer step."""

    def __init__(self, buckets: Iterable[Bucket], reads_weights: Callable[[Bucket], bool]) -> None:
        """`buckets`: those that the device updates, in the order of their updates. `reads_weights(bucket)`: whether the
        update of a bucket reads its weights."""
        order = [bucket for bucket in buckets if bucket.offloaded is not None]
        self._next = dict(zip((bucket.index for bucket in order), order[1:], strict=False))
        self._reads_weights = reads_weights
        self._fetched: dict[int, tuple[Tensor, Work | None]] = {}
        self._storing: Work | None = None

    def fetch(self, bucket: Bucket) -> Tensor:
        """Returns the bucket's shard [size / shards] on the device, or zeros if the update does not read its values."""
        if bucket.offloaded is None:
            return bucket.param_shard
        if bucket.index not in self._fetched:
            self._start_fetch(bucket)
        shard, copy = self._fetched.pop(bucket.index)
        if bucket.index in self._next:
            self._start_fetch(self._next[bucket.index])
        if copy is not None:
            copy.wait()
        return shard

    def store(self, bucket: Bucket, shard: Tensor, parts: Sequence[tuple[int, int]]) -> None:
        """Copies the updated parts, (start, stop), of a fetched shard back to the host."""
        if bucket.offloaded is None:
            return
        updated = [(start, shard[start:stop]) for start, stop in parts]
        before, self._storing = self._storing, bucket.offloaded.update(updated)
        if before is not None:
            before.wait()  # bounds the memory on the device

    def _start_fetch(self, bucket: Bucket) -> None:
        assert bucket.offloaded is not None
        # Zeros: padding is never updated, and keeps its value.
        shard = torch.zeros(len(bucket.param_shard), dtype=bucket.dtype, device=bucket.device)
        copy = bucket.offloaded.to_device(shard) if self._reads_weights(bucket) else None
        self._fetched[bucket.index] = shard, copy
