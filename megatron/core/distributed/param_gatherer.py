"""Gathers the parameters that every rank holds in full after their update; readers wait for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from torch import Tensor, nn

from megatron.core.comm.bucket_comm import BucketComm
from megatron.core.comm.collectives import Handle
from megatron.core.distributed.bucket import Bucket
from megatron.core.distributed.read_hooks import register_read_hook
from megatron.core.parameter import Parameter

_PREFETCHED = 1  # buckets whose deferred update is awaited, and whose gather is started, before they are read


class ParamGatherer:
    """Gathers resident buckets after their update, and makes readers wait for updates and gathers in flight.

    Buckets are gathered in forward order on all ranks, in whichever order their deferred updates end.
    """

    def __init__(
        self, model: nn.Module, buckets: list[Bucket], comm: BucketComm, *, overlap: bool, late_updates: bool = False
    ) -> None:
        """Without `overlap` parameters are gathered at the end of a step, and readers never wait.

        late_updates: updates may end after the step.
        """
        self._buckets, self._comm = buckets, comm
        self._gathers = any(bucket.shards > 1 for bucket in buckets)
        self._overlap = overlap and self._gathers
        self._defers = late_updates and (self._overlap or not self._gathers)
        self._bucket_of = {id(parameter): bucket for bucket in buckets for parameter in bucket.parameters.values()}
        self._deferred: deque[tuple[Bucket, Callable[[], None]]] = deque()
        self._gathering: dict[int, Handle] = {}
        if self._overlap or self._defers:
            register_read_hook(model, self.before_read)

    def before_read(self, parameter: nn.Parameter) -> None:
        """Makes the reader of a parameter wait for its update and its gather, if they are in flight."""
        if not (self._gathering or self._deferred):
            return
        bucket = self._bucket_of.get(id(parameter))
        if bucket is None:
            return
        if until := self._num_deferred_until(bucket):
            self._finish_updates(min(until + _PREFETCHED * self._overlap, len(self._deferred)))
        if bucket.index in self._gathering:
            self._gathering.pop(bucket.index).wait()

    def mark_updated(self, bucket: Bucket, finish: Callable[[], None] | None = None) -> None:
        """Call when the bucket's `param_shard` is updated, or will be when `finish` returns.

        With overlap its gather starts.
        """
        if finish is None and not self._deferred:
            self._start_gather(bucket)
        else:
            self._deferred.append((bucket, finish or _nothing))

    def end_step(self) -> None:
        """Call when all buckets are marked as updated. Without overlap it gathers them, and waits."""
        if not self._defers:
            self._finish_updates(len(self._deferred))
        if self._gathers and not self._overlap:
            for handle in [
                self._comm.gather(bucket.view, bucket.whole, bucket.label) for bucket in reversed(self._buckets)
            ]:
                handle.wait()

    def begin_step(self, microbatches: int) -> None:
        """No-op: reads wait for their buckets."""

    def begin_backward(self) -> None:
        """No-op: parameters are resident."""

    def mark_done(self, bucket: Bucket) -> None:
        """No-op: unsharded parameters are never freed."""

    def parameter_of(self, tensor: Tensor) -> Parameter | None:
        """Returns None, because the memory of resident parameters never changes."""
        return None

    def end_backward(self) -> None:
        """No-op: unsharded parameters are never freed."""

    def synchronize(self) -> None:
        """Waits for every deferred update and every gather in flight."""
        self._finish_updates(len(self._deferred))
        for index in sorted(self._gathering, reverse=True):
            self._gathering.pop(index).wait()

    def finish_update(self, bucket: Bucket) -> None:
        """Waits for this bucket's deferred update, because its gradient is about to be overwritten."""
        self._finish_updates(self._num_deferred_until(bucket))

    def _num_deferred_until(self, bucket: Bucket) -> int:
        """Returns the number of deferred buckets up to this one, inclusive; 0 if its update is not deferred."""
        return next((number for number, (deferred, _) in enumerate(self._deferred, start=1) if deferred is bucket), 0)

    def _finish_updates(self, count: int) -> None:
        for _ in range(count):
            bucket, finish = self._deferred.popleft()
            finish()
            self._start_gather(bucket)

    def _start_gather(self, bucket: Bucket) -> None:
        if self._overlap:
            self._gathering[bucket.index] = self._comm.gather(bucket.view, bucket.whole, bucket.label)


def _nothing() -> None:
    pass
