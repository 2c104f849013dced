"""Every collective of the tree. A group of one rank returns at once and communicates nothing.

Each call is announced to the group's heartbeat, so recorders can count it and a hang can say who is missing. Failures
and timeouts raise CommError with the collective's name, its group and the missing ranks.

[Note: async collectives and tensor lifetimes] `*_async` returns a Handle that owns references to every tensor the
transport still reads or writes. On CUDA the collective runs on NCCL's stream: `wait` makes the *current stream* wait,
not the host, so tensors may be used right after `wait` on that stream and freed once the handle is dropped. On gloo
`wait` blocks the host. A handle must be waited for before any of its tensors is read, overwritten or freed; dropping
one unwaited is a bug, so `wait` is never optional.

[Note: what the heartbeat holds on CUDA] The host goes on after `wait`, so the heartbeat has to follow a collective to
its end. NCCL's work would tell, but it holds the result until it is freed itself, and a second of a large model is many
gigabytes of results. So the heartbeat asks the work only until `wait`, while the handle holds the same tensors anyway.
From then on it asks an event that is recorded behind the collective on the stream that waited, and holds no tensor.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.base.errors import CommError, first_line
from megatron.base.heartbeat import Call, QueuedWork
from megatron.core.groups import Group
from megatron.core.streams.cuda import everything_queued
from megatron.core.streams.graph import is_capturing

# torch 2.13 renamed these two and warns about the old names; the arguments are the same.
gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
scatter_into = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class Handle(NamedTuple):
    """A collective in flight: the transport's work object and the tensors that must outlive it."""

    op: str
    group: Group
    work: Any | None  # None when the group has one rank
    kept: tuple[Tensor, ...]
    finish: Callable[[], None] | None = None  # the rest of the work on this rank, when the transport is done
    number: int | None = None  # among the collectives of the group, for the error message; by default the newest

    def wait(self) -> None:
        """Order everything after the collective (see the note above). Raises CommError when it failed."""
        if self.work is not None:
            heartbeat, name = self.group.heartbeat, self.group.name
            heartbeat.wait_in(self.op, name)
            with _named_failure(self.op, self.group, self.number), heartbeat.during_wait(self.op, name):
                self.work.wait()
            if self.finish is not None:
                self.finish()

    def is_completed(self) -> bool:
        """Whether `wait` would not have to wait."""
        return self.work is None or bool(self.work.is_completed())


def all_reduce(tensor: Tensor, group: Group, op: str = "sum") -> Tensor:
    """Reduce `tensor` in place over the group ("sum", "max" or "min") and return it."""
    all_reduce_async(tensor, group, op).wait()
    return tensor


def all_reduce_in_rank_order(tensor: Tensor, group: Group) -> Tensor:
    """Returns the sum over the group, added in rank order: the order in which an all-reduce adds depends on an
    element's place in the tensor. Half precision is added in fp32 and rounded once. Communication: an all-gather.
    """
    if group.size == 1:
        return tensor
    return _sum_in_order(all_gather(tensor.unsqueeze(0), group))


def all_reduce_async(tensor: Tensor, group: Group, op: str = "sum") -> Handle:
    """As `all_reduce`, not waited for."""
    return _start("all_reduce", group, tensor, lambda pg: dist.all_reduce(tensor, _OPS[op], pg, async_op=True), tensor)


def all_gather(shard: Tensor, group: Group) -> Tensor:
    """[n, ...] on each rank -> [size * n, ...] on all, in group order."""
    full, handle = all_gather_async(shard, group)
    handle.wait()
    return full


def all_gather_async(shard: Tensor, group: Group) -> tuple[Tensor, Handle]:
    """As `all_gather`; the result may be read after the handle's `wait`."""
    if group.size == 1:
        return shard, Handle("all_gather", group, None, (shard,))
    shard = shard.contiguous()
    full = shard.new_empty((group.size * shard.shape[0], *shard.shape[1:]))
    handle = _start(
        "all_gather",
        group,
        shard,
        lambda pg: gather_into(full, shard, group=pg, async_op=True),
        full,
        shard,
    )
    return full, handle


def reduce_scatter(full: Tensor, group: Group) -> Tensor:
    """[size * n, ...] on each rank -> the sum's piece [n, ...] of this rank."""
    shard, handle = reduce_scatter_async(full, group)
    handle.wait()
    return shard


def reduce_scatter_async(full: Tensor, group: Group) -> tuple[Tensor, Handle]:
    """As `reduce_scatter`; the result may be read after the handle's `wait`. `full` is not changed.

    gloo's own reduce-scatter moves as much as an all-reduce. On the CPU the pieces are exchanged all-to-all instead,
    the least that can be moved, and summed here in rank order: 2 to 4 times as fast between 2 and 4 processes of one
    host.
    """
    if group.size == 1:
        return full, Handle("reduce_scatter", group, None, (full,))
    full = full.contiguous()
    shard = full.new_empty((full.shape[0] // group.size, *full.shape[1:]))
    if not full.is_cuda:
        return shard, _exchange_and_sum(full, shard, group)
    handle = _start(
        "reduce_scatter",
        group,
        full,
        lambda pg: scatter_into(shard, full, group=pg, async_op=True),
        full,
        shard,
    )
    return shard, handle


def broadcast(tensor: Tensor, group: Group, source: int = 0) -> Tensor:
    """Copy `tensor` in place from the group's rank number `source`."""
    root = group.ranks[source]
    _start("broadcast", group, tensor, lambda pg: dist.broadcast(tensor, root, pg, async_op=True), tensor).wait()
    return tensor


def barrier(group: Group) -> None:
    """Return on every rank only after all have called it."""
    if group.process_group is not None:
        # NCCL needs a tensor for it, and would guess the device from the rank if the group has not been used before.
        nccl = dist.get_backend(group.process_group) == "nccl"
        with announced("barrier", group, ()):
            dist.barrier(group.process_group, device_ids=[torch.cuda.current_device()] if nccl else None)


def gather_objects(value: Any, group: Group) -> list[Any]:
    """Small picklable values of all ranks, in group order, on every rank. Not for the step's hot path."""
    if group.process_group is None:
        return [value]
    gathered: list[Any] = [None] * group.size
    with announced("gather_objects", group, ()):
        dist.all_gather_object(gathered, value, group.process_group)
    return gathered


def _exchange_and_sum(full: Tensor, shard: Tensor, group: Group) -> Handle:
    received = torch.empty_like(full)
    handle = _start(
        "reduce_scatter",
        group,
        full,
        lambda pg: dist.all_to_all_single(received, full, group=pg, async_op=True),
        full,
        received,
    )

    def add() -> None:
        shard.copy_(_sum_in_order(received.view(group.size, *shard.shape)))

    return handle._replace(finish=add)


def _sum_in_order(pieces: Tensor) -> Tensor:
    """pieces [ranks, ...] -> [...]. Half precision is added in fp32 and rounded once."""
    total = pieces[0].to(torch.float32 if pieces.dtype.itemsize == 2 else pieces.dtype, copy=True)
    for piece in pieces[1:]:
        total.add_(piece)
    return total.to(pieces.dtype)


def _start(op: str, group: Group, sent: Tensor, launch: Any, *kept: Tensor) -> Handle:
    if group.process_group is None:
        return Handle(op, group, None, kept)
    with announced(op, group, tuple(sent.shape), sent.dtype, sent.nbytes):
        work = launch(group.process_group)
    return in_flight(op, group, sent, work, kept)


def in_flight(
    op: str, group: Group, sent: Tensor, work: Any, kept: tuple[Tensor, ...] = (), number: int | None = None
) -> Handle:
    """The handle of a collective that was started on the tensor `sent`; the other arguments: see Handle.

    On CUDA the heartbeat follows its work: the host goes on, and would not see that it hangs. In a capture nothing
    runs.
    """
    if sent.is_cuda and not is_capturing():
        work = _Followed(work, group.heartbeat.track(op, group.ranks, group.name, work.is_completed), sent.device)
    return Handle(op, group, work, kept, number=number)


class _Followed:
    """A work that the heartbeat follows: see [Note: what the heartbeat holds on CUDA]."""

    def __init__(self, work: Any, queued: QueuedWork, device: torch.device) -> None:
        self._work, self._queued, self._device = work, queued, device

    def wait(self) -> None:
        """See Waitable."""
        self._work.wait()
        self._queued.done = everything_queued(self._device).is_completed

    def is_completed(self) -> bool:
        """See Work."""
        return bool(self._work.is_completed())


@contextlib.contextmanager
def announced(
    op: str,
    group: Group,
    shape: tuple[int, ...],
    dtype: torch.dtype | None = None,
    nbytes: int = 0,
    *,
    name: str | None = None,
) -> Iterator[int]:
    """Tell the group's heartbeat of a collective that the body starts; without a dtype it carries objects.

    name: of this call, for messages; by default `op`, which recorders get. Gives its number on the group.
    """
    kind = "object" if dtype is None else str(dtype).removeprefix("torch.")
    number = group.heartbeat.enter(name or op, group.name, Call(op, group.name, shape, kind, nbytes))
    with _named_failure(name or op, group, number):
        yield number


@contextlib.contextmanager
def _named_failure(op: str, group: Group, number: int | None) -> Iterator[None]:
    started = time.monotonic()
    try:
        yield
    except RuntimeError as error:  # raised by gloo and NCCL for a timeout or a lost peer
        cause = first_line(error)
        seconds = time.monotonic() - started
        raise CommError(group.heartbeat.explain(op, group.name, group.ranks, seconds, cause, number)) from error
    group.heartbeat.leave()
