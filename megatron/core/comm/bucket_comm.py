"""Collectives of gradient and parameter buckets: in place, overlapped with compute, in the order they are asked for.

A bucket [S * n] has S slices; slice r belongs to rank r of the `shard` group of its view (core/groups.py). Ranks of the
`replicas` group own the same slice of other copies of the model. Plain data parallelism is S = 1 with all ranks as
replicas; a fully sharded optimizer has one replica.

Buckets must stay allocated until the wait. Reductions have a stream of their own and so have gathers: see core/streams.
That of reductions has high priority, because casts and sums of gradients run on it; the priority of NCCL's own kernels
is a matter of the groups (core/groups.py).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megatron.core.comm.collectives import Handle, announced, in_flight
from megatron.core.comm.transport import transport_of
from megatron.core.groups import View
from megatron.core.streams.stream import Operation, Waitable
from megatron.core.streams.streams import Streams
from megatron.spec.buckets import IN_FLIGHT


class BucketComm:
    """Reduces and gathers buckets over the groups of their view. All ranks must ask for the same buckets in the same
    order.

    A gather has connections of its own (`View.gather`), so that one that is waited for does not queue behind
    reductions.
    """

    def __init__(self, reduce_in: torch.dtype, streams: Streams) -> None:
        """`reduce_in`: dtype of gradients on the network; they are added in fp32 on the CPU."""
        self._transport, self._streams, self._reduce_in = transport_of(streams.device), streams, reduce_in
        self._reductions = streams.stream("reduce", in_flight=IN_FLIGHT, high_priority=True)
        self._gathers = streams.stream("all-gather", in_flight=IN_FLIGHT)
        self._tag = 0

    def reduce(self, view: View, full: Tensor, label: str, then: Callable[[], None] | None = None) -> Handle:
        """Sum a bucket, fp32 or bf16, over `shard` and `replicas` into this rank's slice of it; the other slices are
        then undefined.

        `label` names the bucket in the timeline. `then` runs when the sum is there, before `wait` returns: on the comm
        thread, or queued on the comm stream.
        Communication: a reduce-scatter over `shard`, then an all-reduce of the slice over `replicas`.
        """
        op, group = ("reduce_scatter", view.shard) if view.shard.size > 1 else ("all_reduce", view.replicas)
        if group.size == 1:
            if then is not None:
                then()
            return Handle(op, group, None, ())
        self._tag += 1
        operation = self._reduction(view, full, then, self._tag)
        with announced(op, group, tuple(full.shape), self._reduce_in, full.numel() * self._reduce_in.itemsize):
            work = self._reductions.submit(operation, label, row=op.replace("_", "-"), keep=(full,))
        return in_flight(op, group, full, work, (full,))

    def gather(self, view: View, full: Tensor, label: str, after: Waitable | None = None) -> Handle:
        """Copy every rank's slice of a bucket to all ranks of `shard`: an all-gather.

        after: the copy that brings this rank's slice, if it is in flight. With one shard it is not waited for.
        """
        group, shard = view.gather, view.own(full)
        if group.size == 1:
            return Handle("all_gather", group, None, ())
        self._tag += 1
        operation = self._transport.all_gather(group, full, self._tag)
        behind = None if after is None else (self._streams.mark(), after)
        with announced("all_gather", group, tuple(shard.shape), full.dtype, shard.nbytes):
            work = self._gathers.submit(operation, label, after=behind, keep=(full,))
        return in_flight("all_gather", group, full, work, (full,))

    def _reduction(self, view: View, full: Tensor, then: Callable[[], None] | None, tag: int) -> Operation:
        if view.shard.size > 1:
            yield from self._transport.reduce_scatter(view.shard, full, self._reduce_in, tag)
        if view.replicas.size > 1:
            yield from self._transport.all_reduce(view.replicas, view.own(full), self._reduce_in, tag)
        if then is not None:
            then()
