"""Messages between pipeline ranks: activations up the model, gradients down, each beside compute.

Messages of one direction between two ranks arrive in the order in which they were sent, and are received in that order:
schedules see to it (pipeline_parallel/passes.py). To higher and to lower ranks they travel on two communicators, so that
on NCCL, where a communicator is a queue, an activation never waits for a gradient. Shapes are known at both ends.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.comm.collectives import Handle, announced
from megatron.core.groups import Group, Groups
from megatron.core.timeline import Span, Timeline


class Mailbox:
    """Sends and receives of one pipeline rank; `peer` is a rank of the pipeline, counted from 0."""

    def __init__(self, groups: Groups, device: torch.device, timeline: Timeline) -> None:
        self._groups, self._device, self._timeline = groups, device, timeline
        self._lines: dict[tuple[int, int], Group] = {}
        self._sent: deque[tuple[Handle, Span | None]] = deque()

    def send(self, tensor: Tensor, peer: int, name: str) -> None:
        """Start to send; the tensor is kept until it has left, and must not be changed. `name`: for the timeline."""
        self._retire(wait=False)
        tensor = tensor.contiguous()
        line = self._line(self._groups.pp.rank, peer)
        span = self._timeline.begin("p2p", f"send {name}")
        with announced("send", line, tuple(tensor.shape), tensor.dtype, tensor.nbytes):
            work = dist.isend(tensor, line.ranks[-1], line.process_group)
        self._sent.append((self._handle("send", line, work, tensor), span))

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, peer: int, name: str) -> Received:
        """Make room and start to receive."""
        tensor = torch.empty(shape, dtype=dtype, device=self._device)
        line = self._line(peer, self._groups.pp.rank)
        span = self._timeline.begin("p2p", f"receive {name}")
        with announced("receive", line, shape, dtype, tensor.nbytes):
            work = dist.irecv(tensor, line.ranks[0], line.process_group)
        return Received(tensor, self._handle("receive", line, work, tensor), span)

    def flush(self) -> None:
        """Return when everything has left (on CUDA: order what follows after it)."""
        self._retire(wait=True)

    def _retire(self, *, wait: bool) -> None:
        while self._sent and (wait or self._sent[0][0].is_completed()):
            handle, span = self._sent.popleft()
            handle.wait()
            if span is not None:
                span.end()

    def _line(self, source: int, destination: int) -> Group:
        """The way from one rank to another as a group of two, whose messages the heartbeat counts at both ends."""
        if (source, destination) not in self._lines:
            both = self._groups.up if source < destination else self._groups.down
            ranks = (both.ranks[source], both.ranks[destination])
            me = (source, destination).index(both.rank)
            name = f"pp {ranks[0]}>{ranks[1]}"
            self._lines[source, destination] = Group(name, ranks, me, both.process_group, both.heartbeat)
        return self._lines[source, destination]

    def _handle(self, op: str, line: Group, work: Any, tensor: Tensor) -> Handle:
        if tensor.is_cuda:
            line.heartbeat.track(op, line.ranks, line.name, work.is_completed)
        return Handle(op, line, work, (tensor,))


class Received:
    """A message on its way."""

    def __init__(self, tensor: Tensor, handle: Handle, span: Span | None) -> None:
        self._tensor, self._handle, self._span = tensor, handle, span

    def take(self) -> Tensor:
        """Wait for it. Raises CommError when it does not come."""
        self._handle.wait()
        if self._span is not None:
            self._span.end()
        return self._tensor
