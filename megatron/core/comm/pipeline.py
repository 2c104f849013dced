"""Messages between pipeline ranks: activations up the model, gradients down, each beside compute.

Messages of one direction between two ranks arrive in the order in which they were sent, and are received in that order:
schedules see to it (pipeline_parallel/passes.py). To higher and to lower ranks they travel on two communicators, so that
on NCCL, where a communicator is a queue, an activation never waits for a gradient. Shapes are known at both ends.

[Note: who sees a message leave]
gloo tells only a thread that waits. So on the CPU a lane waits for the sends of each direction: it frees their tensors as
they leave. What arrives is waited for by who needs it and, while the timeline records, by a lane too: then spans end when
the message has left or come. On CUDA the works themselves say so, and while the timeline records a stream waits for each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.comm.collectives import Handle, announced
from megatron.core.comm.lane import Lane, Steps
from megatron.core.groups import Group, Groups
from megatron.core.timeline import Span, Timeline

_IN_FLIGHT = 1024  # messages of one direction: more than a schedule has under way


class Mailbox:
    """Sends and receives of one pipeline rank; `peer` is a rank of the pipeline, counted from 0."""

    def __init__(self, groups: Groups, device: torch.device, timeline: Timeline) -> None:
        self._groups, self._device, self._timeline = groups, device, timeline
        self._lines: dict[tuple[int, int], Line] = {}
        self._sent: list[Handle] = []

    def send(self, tensor: Tensor, peer: int, name: str) -> None:
        """Start to send; the tensor is kept until it has left, and must not be changed. `name`: of the action."""
        tensor = tensor.contiguous()
        line = self._line(self._groups.pp.rank, peer)
        span = self._timeline.begin(line.name, f"send {name}")
        handle = line.start("send", name, dist.isend, tensor, span, watched=True)
        self._retire(wait=False)
        self._sent.append(handle)

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, peer: int, name: str) -> Received:
        """Make room and start to receive."""
        tensor = torch.empty(shape, dtype=dtype, device=self._device)
        line = self._line(peer, self._groups.pp.rank)
        span = self._timeline.begin(line.name, f"receive {name}")
        return Received(tensor, line.start("receive", name, dist.irecv, tensor, span, watched=span is not None))

    def flush(self) -> None:
        """Return when everything has left (on CUDA: order what follows after it). Raises CommError."""
        self._retire(wait=True)

    def _retire(self, *, wait: bool) -> None:
        left = []
        for handle in self._sent:
            if wait or handle.is_completed():
                handle.wait()
            else:
                left.append(handle)
        self._sent = left

    def _line(self, source: int, destination: int) -> Line:
        if (source, destination) not in self._lines:
            both = self._groups.up if source < destination else self._groups.down
            self._lines[source, destination] = Line(both, source, destination, self._device)
        return self._lines[source, destination]


class Line:
    """The way from one rank to another as a group of two, whose messages the heartbeat counts at both ends."""

    def __init__(self, both: Group, source: int, destination: int, device: torch.device) -> None:
        ranks = (both.ranks[source], both.ranks[destination])
        me = (source, destination).index(both.rank)
        self.name = f"pp {ranks[0]}>{ranks[1]}"
        self._group = Group(self.name, ranks, me, both.process_group, both.heartbeat)
        self._other = ranks[1 - me]
        self._lane = Lane(self.name, in_flight=_IN_FLIGHT)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def start(
        self, op: str, name: str, call: Callable[..., Any], tensor: Tensor, span: Span | None, *, watched: bool
    ) -> Handle:
        """Post a message. watched: see the note above; without it a span does not end."""
        group = self._group

        def post() -> Any:
            return call(tensor, self._other, group.process_group)

        with announced(op, group, tuple(tensor.shape), tensor.dtype, tensor.nbytes) as number:
            by_lane = watched and self._stream is None
            work = self._lane.submit(_steps(post, span)) if by_lane else post()
        if self._stream is None:
            # A lane's job keeps the tensor for as long as it must.
            return Handle(f"{op} {name}", group, work, () if watched else (tensor,), number=number)
        group.heartbeat.track(op, group.ranks, group.name, work.is_completed)
        if span is not None:
            with torch.cuda.stream(self._stream):
                work.wait()
                span.end()
        return Handle(f"{op} {name}", group, work, (tensor,), number=number)


class Received:
    """A message on its way."""

    def __init__(self, tensor: Tensor, handle: Handle) -> None:
        self._tensor, self._handle = tensor, handle

    def take(self) -> Tensor:
        """Wait for it. Raises CommError when it does not come."""
        self._handle.wait()
        return self._tensor


def _steps(post: Callable[[], Any], span: Span | None) -> Steps:
    yield [post()]
    if span is not None:
        span.end()
