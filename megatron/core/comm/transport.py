"""How large tensors move between ranks: by gloo's messages on the CPU, by the backend's collectives on CUDA.

All methods give operations for a stream (core/streams). gloo's own reduce-scatter moves as much as an all-reduce and
its rings wait at every hop, so on the CPU collectives are direct messages between every pair of ranks: see pairwise.py.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.comm.collectives import gather_into, scatter_into
from megatron.core.comm.pairwise import exchange, receive, send, staging_like, sum_in_rank_order
from megatron.core.groups import Group
from megatron.core.streams.stream import Operation, Stream, Waitable


class ChunkExchange(Protocol):
    """One chunk to rank r + step of a group, one from rank r - step. `received` and `sent` are there after `send`."""

    received: Waitable
    sent: Waitable

    def send(self, outgoing: Tensor) -> None:
        """Start to send; `outgoing` is kept until it has left."""
        ...


class Transport(Protocol):
    """`tag`: tells apart collectives of one group that are in flight at the same time; all ranks give the same."""

    def reduce_scatter(self, group: Group, full: Tensor, dtype: torch.dtype, tag: int) -> Operation:
        """Sum `full` [size * n], fp32 or bf16, over the group into this rank's slice of it. dtype: of what is sent."""
        ...

    def all_reduce(self, group: Group, tensor: Tensor, dtype: torch.dtype, tag: int) -> Operation:
        """Sum a tensor [n], fp32 or bf16, in place over the group. dtype: of what is sent."""
        ...

    def all_gather(self, group: Group, full: Tensor, tag: int) -> Operation:
        """Copy every rank's slice of `full` [size * n] to all ranks."""
        ...

    def exchange_chunk(
        self, group: Group, step: int, incoming: Tensor, tag: int, stream: Stream, name: str
    ) -> ChunkExchange:
        """Get ready to receive a chunk into `incoming`, and to send one. name: of its span in the timeline."""
        ...

    def steps_in_flight(self, size: int) -> int:
        """Steps of a gather, of size - 1, whose chunks are sent at once."""
        ...


def transport_of(device: torch.device) -> Transport:
    """The transport of tensors on this device."""
    return CudaTransport() if device.type == "cuda" else CpuTransport()


class CpuTransport:
    """See Transport. Sums are taken in rank order, half precision in fp32."""

    def reduce_scatter(self, group: Group, full: Tensor, dtype: torch.dtype, tag: int) -> Operation:
        """See Transport."""
        slices = full.to(dtype).view(group.size, -1).unbind()
        received = staging_like(slices, group.rank)
        yield exchange(group, slices, received, tag)
        sum_in_rank_order(received, group.rank, _own(full, group))

    def all_reduce(self, group: Group, tensor: Tensor, dtype: torch.dtype, tag: int) -> Operation:
        """See Transport. A reduce-scatter and an all-gather."""
        wire = tensor.to(dtype)
        slices = wire.tensor_split(group.size)
        received = staging_like(slices, group.rank)
        yield exchange(group, slices, received, tag)
        sum_in_rank_order(received, group.rank, slices[group.rank])
        yield exchange(group, [slices[group.rank]] * group.size, slices, tag)
        if wire is not tensor:
            tensor.copy_(wire)

    def all_gather(self, group: Group, full: Tensor, tag: int) -> Operation:
        """See Transport."""
        slices = full.view(group.size, -1).unbind()
        yield exchange(group, [slices[group.rank]] * group.size, slices, tag)

    def exchange_chunk(
        self, group: Group, step: int, incoming: Tensor, tag: int, stream: Stream, name: str
    ) -> ChunkExchange:
        """See Transport."""
        return _CpuExchange(group, step, incoming, tag, stream, name)

    def steps_in_flight(self, size: int) -> int:
        """See Transport. Chunks that gloo is given together arrive together, at the end: connections share the
        network."""
        return 1


class CudaTransport:
    """See Transport. The tag is not needed: NCCL keeps the order of a communicator's operations."""

    def reduce_scatter(self, group: Group, full: Tensor, dtype: torch.dtype, tag: int) -> Operation:
        """See Transport."""
        wire = full.to(dtype)
        shard = _own(wire, group)
        yield [scatter_into(shard, wire, group=group.process_group, async_op=True)]
        if wire is not full:
            _own(full, group).copy_(shard)

    def all_reduce(self, group: Group, tensor: Tensor, dtype: torch.dtype, tag: int) -> Operation:
        """See Transport."""
        wire = tensor.to(dtype)
        yield [dist.all_reduce(wire, group=group.process_group, async_op=True)]
        if wire is not tensor:
            tensor.copy_(wire)

    def all_gather(self, group: Group, full: Tensor, tag: int) -> Operation:
        """See Transport."""
        yield [gather_into(full, _own(full, group), group=group.process_group, async_op=True)]

    def exchange_chunk(
        self, group: Group, step: int, incoming: Tensor, tag: int, stream: Stream, name: str
    ) -> ChunkExchange:
        """See Transport."""
        return _CudaExchange(group, step, incoming, stream, name)

    def steps_in_flight(self, size: int) -> int:
        """See Transport."""
        return size - 1


class _CpuExchange:
    """The receive is posted at once: a rank that is ahead need not wait for this one to be ready to send."""

    def __init__(self, group: Group, step: int, incoming: Tensor, tag: int, stream: Stream, name: str) -> None:
        self._group, self._step, self._tag = group, step, tag
        self._stream, self._name = stream, name
        self._kept = [incoming]
        self._arriving = receive(group, incoming, (group.rank - step) % group.size, tag)

    def send(self, outgoing: Tensor) -> None:
        """See ChunkExchange."""
        self._kept.append(outgoing)
        span = self._stream.begin(self._name)
        self.sent: Waitable = send(self._group, outgoing, (self._group.rank + self._step) % self._group.size, self._tag)
        self.received = self._stream.follow(self._arriving, span)


class _CudaExchange:
    """One launch for both messages: NCCL could wait for ever for one of two launches."""

    def __init__(self, group: Group, step: int, incoming: Tensor, stream: Stream, name: str) -> None:
        self._group, self._step, self._incoming = group, step, incoming
        self._stream, self._name = stream, name

    def send(self, outgoing: Tensor) -> None:
        """See ChunkExchange."""
        group = self._group
        work = self._stream.submit(self._messages(outgoing), self._name, keep=(self._incoming, outgoing))
        group.heartbeat.track("chunks", group.ranks, group.name, work.is_completed)
        self.received: Waitable = work
        self.sent: Waitable = work

    def _messages(self, outgoing: Tensor) -> Operation:
        group = self._group
        to, source = (group.ranks[(group.rank + offset) % group.size] for offset in (self._step, -self._step))
        yield dist.batch_isend_irecv(
            [
                dist.P2POp(dist.irecv, self._incoming, source, group.process_group),
                dist.P2POp(dist.isend, outgoing, to, group.process_group),
            ]
        )


def _own(full: Tensor, group: Group) -> Tensor:
    """This rank's slice, a view."""
    return full.view(group.size, -1)[group.rank]
