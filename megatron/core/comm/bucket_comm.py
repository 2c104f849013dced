"""Collectives of gradient and parameter buckets: in place, beside compute, in the order they are asked for.

A bucket [S * n] is cut into S slices; slice r belongs to rank r of the `shard` group. Ranks of the `replicas` group own
the same slice of other copies of the model. Plain data parallelism is S = 1 with all ranks as replicas; a fully sharded
optimizer has one replica.

[Note: buckets on CUDA]
Work is queued on a stream of its own: it waits for the stream that wrote the bucket, NCCL's kernels wait for it, and
`Handle.wait` makes the *current* stream wait for its event. Order comes from events alone, so nothing depends on the
number of hardware queues (CUDA_DEVICE_MAX_CONNECTIONS). Buckets must stay allocated until the wait; what is allocated
here for the wire is allocated on that stream, and so reused by it only. On the CPU a lane does the same: see lane.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.comm.collectives import Handle, announced, gather_into, scatter_into
from megatron.core.comm.lane import Lane, Steps
from megatron.core.comm.pairwise import exchange, staging_like, sum_in_rank_order
from megatron.core.groups import Group
from megatron.core.timeline import Timeline

_IN_FLIGHT = 4  # buckets on the wire at once: enough to keep it busy, and a bound on staging memory


class BucketComm:
    """Reduces and gathers buckets over one pair of groups. All ranks must ask for the same buckets in the same order."""

    def __init__(
        self,
        shard: Group,
        gather: Group,
        replicas: Group,
        device: torch.device,
        reduce_in: torch.dtype,
        timeline: Timeline,
    ) -> None:
        """`gather`: the ranks of `shard` again, with connections of their own, so that a gather that is waited for does
        not queue behind reductions. `reduce_in`: dtype of gradients on the wire; they are added in fp32 on the CPU."""
        self._shard, self._gather, self._replicas, self._reduce_in = shard, gather, replicas, reduce_in
        self._on_cuda = device.type == "cuda"
        if self._on_cuda:
            self._reduce_stream = torch.cuda.Stream(device, priority=-1)
            self._gather_stream = torch.cuda.Stream(device, priority=-1)
        else:
            self._reduce_lane = Lane("reduce", in_flight=_IN_FLIGHT)
            self._gather_lane = Lane("gather", in_flight=_IN_FLIGHT)
        self._tag = 0
        self._timeline = timeline

    @property
    def shards(self) -> int:
        """S: slices of a bucket."""
        return self._shard.size

    def own(self, full: Tensor) -> Tensor:
        """This rank's slice of a bucket, a view."""
        return full.view(self._shard.size, -1)[self._shard.rank]

    def reduce(self, full: Tensor, label: str, then: Callable[[], None] | None = None) -> Handle:
        """Sum an fp32 bucket over both groups into this rank's slice of it; the other slices are then undefined.

        `label` names the bucket in the timeline. `then` runs when the sum is there, before `wait` returns: on the lane's
        thread, or queued on the CUDA stream.
        Communication: a reduce-scatter over `shard`, then an all-reduce of the slice over `replicas`.
        """
        op, group = ("reduce_scatter", self._shard) if self._shard.size > 1 else ("all_reduce", self._replicas)
        if group.size == 1:
            if then is not None:
                then()
            return Handle(op, group, None, ())
        wire = full.new_empty(0, dtype=self._reduce_in)
        with announced(op, group, tuple(full.shape), self._reduce_in, full.numel() * wire.itemsize):
            row = op.replace("_", "-")
            if self._on_cuda:
                work: Any = self._queue_reduce(full, then, row, label)
            else:
                self._tag += 1
                steps = self._reduce_steps(full, then, self._tag)
                work = self._reduce_lane.submit(self._timed(row, label, steps))
        return _handle(op, group, work, full)

    def gather(self, full: Tensor, label: str, after: Any = None) -> Handle:
        """Copy every rank's slice of a bucket to all ranks of `shard`: an all-gather.

        after: what brings this rank's slice, if it is on its way: a lane's job, or a CUDA event. With one shard it is not
        waited for.
        """
        group = self._gather
        if group.size == 1:
            return Handle("all_gather", group, None, ())
        with announced("all_gather", group, tuple(self.own(full).shape), full.dtype, self.own(full).nbytes):
            if self._on_cuda:
                work: Any = self._queue_gather(full, label, after)
            else:
                self._tag += 1
                steps = self._timed("all-gather", label, self._gather_steps(full, self._tag))
                work = self._gather_lane.submit(steps if after is None else _behind(after, steps))
        return _handle("all_gather", group, work, full)

    def _timed(self, row: str, label: str, steps: Steps) -> Steps:
        span = self._timeline.begin(row, label)
        yield from steps
        if span is not None:
            span.end()

    def _reduce_steps(self, full: Tensor, then: Callable[[], None] | None, tag: int) -> Steps:
        shard, replicas, out = self._shard, self._replicas, self.own(full)
        if shard.size > 1:
            pieces = full.to(self._reduce_in).view(shard.size, -1).unbind()
            received = staging_like(pieces, shard.rank)
            yield exchange(shard, pieces, received, tag)
            sum_in_rank_order(received, shard.rank, out)
        if replicas.size > 1:
            # All-reduce as a reduce-scatter and an all-gather between the replicas.
            wire = out.to(self._reduce_in)
            pieces = wire.tensor_split(replicas.size)
            received = staging_like(pieces, replicas.rank)
            yield exchange(replicas, pieces, received, tag)
            sum_in_rank_order(received, replicas.rank, pieces[replicas.rank])
            yield exchange(replicas, [pieces[replicas.rank]] * replicas.size, pieces, tag)
            if wire is not out:
                out.copy_(wire)
        if then is not None:
            then()

    def _gather_steps(self, full: Tensor, tag: int) -> Steps:
        pieces = full.view(self._gather.size, -1).unbind()
        yield exchange(self._gather, [pieces[self._gather.rank]] * self._gather.size, pieces, tag)

    def _queue_reduce(self, full: Tensor, then: Callable[[], None] | None, row: str, label: str) -> _Queued:
        self._reduce_stream.wait_stream(torch.cuda.current_stream(full.device))
        with torch.cuda.stream(self._reduce_stream):
            with self._timeline.span(row, label):
                wire = full.to(self._reduce_in)
                out = self.own(wire)
                if self._shard.size > 1:
                    scatter_into(out, wire, group=self._shard.process_group, async_op=True).wait()
                if self._replicas.size > 1:
                    dist.all_reduce(out, group=self._replicas.process_group, async_op=True).wait()
                if wire is not full:
                    self.own(full).copy_(out)
                if then is not None:
                    then()
            return _Queued(self._reduce_stream.record_event())

    def _queue_gather(self, full: Tensor, label: str, after: torch.cuda.Event | None) -> _Queued:
        self._gather_stream.wait_stream(torch.cuda.current_stream(full.device))
        if after is not None:
            self._gather_stream.wait_event(after)
        with torch.cuda.stream(self._gather_stream):
            with self._timeline.span("all-gather", label):
                gather_into(full, self.own(full), group=self._gather.process_group, async_op=True).wait()
            return _Queued(self._gather_stream.record_event())


class _Queued:
    """Work queued on a CUDA stream up to an event."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._event)

    def is_completed(self) -> bool:
        return bool(self._event.query())


def _behind(job: Any, steps: Steps) -> Steps:
    """Steps of a lane that begin when a job of this rank alone, on another lane, is done. Messages are told apart by their
    tags, so others may be posted meanwhile."""
    yield [job]
    yield from steps


def _handle(op: str, group: Group, work: Any, full: Tensor) -> Handle:
    if full.is_cuda:
        group.heartbeat.track(op, group.ranks, group.name, work.is_completed)
    return Handle(op, group, work, (full,))
