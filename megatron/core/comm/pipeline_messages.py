"""Messages between pipeline ranks: activations up the model, gradients down, both overlapped with compute.

Messages of one direction between two ranks arrive in the order in which they were sent, and are received in that order:
schedules see to it (schedule/passes.py). To higher and to lower ranks they are sent in two process groups, so that on
NCCL, where a communicator is a queue, an activation never waits for a gradient. Shapes are known at both ends.

The stream of a channel waits for its sends, and so frees each tensor when it has left: gloo tells only a thread that
waits. A message that arrives is waited for where it is needed.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.comm.collectives import Handle, announced, in_flight
from megatron.core.groups import Group, Groups
from megatron.core.streams.stream import Operation
from megatron.core.streams.streams import Streams


class Mailbox:
    """Sends and receives of one pipeline rank; `peer` is a rank of the pipeline, counted from 0."""

    def __init__(self, groups: Groups, streams: Streams) -> None:
        self._groups, self._streams = groups, streams
        self._channels: dict[tuple[int, int], Channel] = {}
        self._sent: list[Handle] = []

    def send(self, tensor: Tensor, peer: int, name: str) -> None:
        """Start to send; the tensor is kept until it has left, and must not be changed. `name`: of the action."""
        handle = self._channel(self._groups.pp.rank, peer).send(tensor.contiguous(), name)
        self._retire(wait=False)
        self._sent.append(handle)

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, peer: int, name: str) -> Received:
        """Allocate a tensor and start to receive it."""
        tensor = torch.empty(shape, dtype=dtype, device=self._streams.device)
        return Received(tensor, self._channel(peer, self._groups.pp.rank).receive(tensor, name))

    def flush(self) -> None:
        """Return when everything has left; on CUDA the current stream waits instead. Raises CommError."""
        self._retire(wait=True)

    def _retire(self, *, wait: bool) -> None:
        left = []
        for handle in self._sent:
            if wait or handle.is_completed():
                handle.wait()
            else:
                left.append(handle)
        self._sent = left

    def _channel(self, source: int, destination: int) -> Channel:
        if (source, destination) not in self._channels:
            self._channels[source, destination] = Channel(pair_of(self._groups, source, destination), self._streams)
        return self._channels[source, destination]


def pair_of(groups: Groups, source: int, destination: int) -> Group:
    """The group of two pipeline ranks, counted from 0, for messages from one to the other; this rank is one of them.

    On NCCL it has a communicator of its own, which comm/connections.py makes at set-up.
    """
    both = groups.up if source < destination else groups.down
    ranks = (both.ranks[source], both.ranks[destination])
    me = (source, destination).index(both.rank)
    return Group(f"pp {ranks[0]}>{ranks[1]}", ranks, me, both.process_group, both.heartbeat)


class Channel:
    """One direction between two ranks, `pair`, whose messages the heartbeat counts at both ends."""

    def __init__(self, pair: Group, streams: Streams) -> None:
        self._group, self._other = pair, pair.ranks[1 - pair.rank]
        self._stream = streams.stream(pair.name)

    def send(self, tensor: Tensor, name: str) -> Handle:
        """Post a message that leaves here. name: of the action."""
        with self._announced("send", tensor) as number:
            work = self._stream.submit(self._sending(tensor), f"send {name}", keep=(tensor,))
        # The handle holds no tensor: the operation does, for as long as it must.
        return in_flight(f"send {name}", self._group, tensor, work, number=number)

    def receive(self, tensor: Tensor, name: str) -> Handle:
        """Post a message that arrives here. name: of the action."""
        span = self._stream.begin(f"receive {name}")
        with self._announced("receive", tensor) as number:
            work = dist.irecv(tensor, self._other, self._group.process_group)
            assert work is not None, "both ranks are in the group"
        return in_flight(f"receive {name}", self._group, tensor, self._stream.follow(work, span), number=number)

    def _sending(self, tensor: Tensor) -> Operation:
        work = dist.isend(tensor, self._other, self._group.process_group)
        assert work is not None, "both ranks are in the group"
        yield [work]

    def _announced(self, op: str, tensor: Tensor) -> AbstractContextManager[int]:
        return announced(op, self._group, tuple(tensor.shape), tensor.dtype, tensor.nbytes)


class Received:
    """A message in flight."""

    def __init__(self, tensor: Tensor, handle: Handle) -> None:
        self._tensor, self._handle = tensor, handle

    def take(self) -> Tensor:
        """Wait for it. Raises CommError when it does not arrive."""
        self._handle.wait()
        return self._tensor
