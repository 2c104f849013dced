"""Parameters that every rank holds whole: gathered after an update, waited for where they are read."""

from __future__ import annotations

from torch import nn

from megatron.core.comm.bucket_comm import BucketComm
from megatron.core.comm.collectives import Handle
from megatron.core.distributed.bucket import Bucket
from megatron.core.distributed.param_table import watch_reads


class ParamGate:
    """Closed for buckets whose gather is in flight; opens a bucket where one of its parameters is first read."""

    def __init__(self, model: nn.Module, buckets: list[Bucket], comm: BucketComm, *, overlap: bool) -> None:
        """Without `overlap` parameters are gathered at the end of a step, and readers never wait."""
        self._buckets, self._comm, self._overlap = buckets, comm, overlap
        self._bucket_of = {id(parameter): bucket for bucket in buckets for parameter in bucket.parameters.values()}
        self._closed: dict[int, Handle] = {}
        if overlap and comm.shards > 1:
            watch_reads(model, self._before_read)

    def publish(self, bucket: Bucket) -> None:
        """The bucket's `param_shard` has been updated. With overlap: start to gather it."""
        if self._overlap and self._comm.shards > 1:
            self._closed[bucket.index] = self._comm.gather(bucket.whole, bucket.label)

    def end_step(self) -> None:
        """All buckets have been updated. Without overlap: gather them, and wait."""
        if not self._overlap and self._comm.shards > 1:
            for handle in [self._comm.gather(bucket.whole, bucket.label) for bucket in reversed(self._buckets)]:
                handle.wait()

    def gradients_complete(self, bucket: Bucket) -> None:
        """Backward needs the bucket's parameters no more; they stay."""

    def end_backward(self) -> None:
        """Nothing is given up."""

    def settle(self) -> None:
        """Wait for every gather in flight."""
        for index in sorted(self._closed, reverse=True):
            self._closed.pop(index).wait()

    def _before_read(self, parameter: nn.Parameter) -> None:
        if self._closed:
            bucket = self._bucket_of.get(id(parameter))
            if bucket is not None and bucket.index in self._closed:
                self._closed.pop(bucket.index).wait()
