"""Parameters that every rank holds whole: gathered after an update, waited for where they are read."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from torch import Tensor, nn

from megatron.core.comm.bucket_comm import BucketComm
from megatron.core.comm.collectives import Handle
from megatron.core.distributed.bucket import Bucket
from megatron.core.distributed.param_table import watch_reads
from megatron.core.parameter import Parameter

_AHEAD = 1  # buckets whose late update is awaited, and whose gather is started, before they are read


class ParamGate:
    """Closed for buckets that are updated late or gathered; opens a bucket where one of its parameters is first read.

    Late updates end in forward order, and buckets are gathered in that order on all ranks, whenever those end.
    """

    def __init__(
        self, model: nn.Module, buckets: list[Bucket], comm: BucketComm, *, overlap: bool, late_updates: bool = False
    ) -> None:
        """Without `overlap` shared parameters are gathered at the end of a step, and readers never wait.

        late_updates: updates may end after the step.
        """
        self._buckets, self._comm = buckets, comm
        self._gathers = comm.shards > 1
        self._overlap = overlap and self._gathers
        self._waits_late = late_updates and (self._overlap or not self._gathers)
        self._bucket_of = {id(parameter): bucket for bucket in buckets for parameter in bucket.parameters.values()}
        self._late: deque[tuple[Bucket, Callable[[], None]]] = deque()
        self._closed: dict[int, Handle] = {}
        if self._overlap or self._waits_late:
            watch_reads(model, self._before_read)

    def publish(self, bucket: Bucket, finish: Callable[[], None] | None = None) -> None:
        """The bucket's `param_shard` has been updated, or is when `finish` returns. With overlap: start to gather it."""
        if finish is None and not self._late:
            self._start(bucket)
        else:
            self._late.append((bucket, finish or _nothing))

    def end_step(self) -> None:
        """All buckets have been updated, but for late ones. Without overlap: gather them, and wait."""
        if not self._waits_late:
            self._catch_up(len(self._late))
        if self._gathers and not self._overlap:
            for handle in [self._comm.gather(bucket.whole, bucket.label) for bucket in reversed(self._buckets)]:
                handle.wait()

    def begin_step(self, microbatches: int) -> None:
        """Parameters are there, or are waited for where they are read."""

    def begin_backward(self) -> None:
        """Parameters are there."""

    def been_through(self, bucket: Bucket) -> None:
        """Backward needs one of the bucket's parameters no more; it stays."""

    def parameter_of(self, tensor: Tensor) -> Parameter | None:
        """No parameter comes and goes."""
        return None

    def end_backward(self) -> None:
        """Nothing is given up."""

    def settle(self) -> None:
        """Wait for every late update and every gather in flight."""
        self._catch_up(len(self._late))
        for index in sorted(self._closed, reverse=True):
            self._closed.pop(index).wait()

    def settle_update(self, bucket: Bucket) -> None:
        """Wait for this bucket's late update: its gradient is about to be overwritten."""
        self._catch_up(self._late_until(bucket))

    def _before_read(self, parameter: nn.Parameter) -> None:
        if not (self._closed or self._late):
            return
        bucket = self._bucket_of.get(id(parameter))
        if bucket is None:
            return
        if until := self._late_until(bucket):
            self._catch_up(min(until + _AHEAD * self._overlap, len(self._late)))
        if bucket.index in self._closed:
            self._closed.pop(bucket.index).wait()

    def _late_until(self, bucket: Bucket) -> int:
        """How many late buckets there are up to this one; 0 when it is none of them."""
        return next((number for number, (late, _) in enumerate(self._late, start=1) if late is bucket), 0)

    def _catch_up(self, count: int) -> None:
        for _ in range(count):
            bucket, finish = self._late.popleft()
            finish()
            self._start(bucket)

    def _start(self, bucket: Bucket) -> None:
        if self._overlap:
            self._closed[bucket.index] = self._comm.gather(bucket.whole, bucket.label)


def _nothing() -> None:
    pass
