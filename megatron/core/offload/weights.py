"""Weights that live in host memory and are copied to the device for a forward, a backward, and their update.

A forward and a backward do not change weights, so their copies on the device are dropped afterwards; only an update is
copied to the host. distributed/param_unsharder.py decides when weights are fetched for a forward or backward, and
optimizer/weight_prefetch.py when for an update.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import Tensor

from megatron.core.offload.copy_engine import CopyEngine
from megatron.core.offload.host_pool import HostPool
from megatron.core.streams.stream import Work


class WeightOffload:
    """Offloads the parameters with certain names: their buckets' shards are kept in host memory."""

    def __init__(self, names: Collection[str], pool: HostPool, engine: CopyEngine) -> None:
        """`names` must be the same on all ranks."""
        self._names, self._pool, self._engine = frozenset(names), pool, engine

    def includes(self, name: str) -> bool:
        """Whether this parameter is offloaded."""
        return name in self._names

    def offload(self, label: str, shard: Tensor) -> OffloadedShard:
        """Copy a shard's values to host memory. `label`: its bucket, for timelines. Raises ConfigError when a disk is
        full."""
        return OffloadedShard(f"weights of {label}", shard, self._pool, self._engine)


class OffloadedShard:
    """One rank's shard of a bucket, in host memory. Copies from and to it happen in the order of the calls.

    shard [size / shards]: the weights in host memory. The host may read and write them after `synchronize`.
    """

    def __init__(self, name: str, values: Tensor, pool: HostPool, engine: CopyEngine) -> None:
        """`values`: initial values, flat, on the device."""
        self._name, self._engine = name, engine
        self._block, tensors = pool.take_tensors({"shard": (len(values), values.dtype)})
        self.shard = tensors["shard"]
        self.shard.copy_(values)

    def to_device(self, destination: Tensor) -> Work:
        """Start to copy the whole shard to device memory [size / shards]."""
        return self._engine.to_device(self._name, [(self.shard, destination)], self._block)

    def update(self, parts: Sequence[tuple[int, Tensor]]) -> Work:
        """Start to copy (first element, new values on the device) into the shard."""
        copies = [(values, self.shard[start : start + len(values)]) for start, values in parts]
        return self._engine.to_host(self._name, copies, self._block)

    def synchronize(self) -> None:
        """Block the host until no copy is under way."""
        self._block.synchronize()
