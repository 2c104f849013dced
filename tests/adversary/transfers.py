"""Collectives and messages of torch.distributed that arrive when they are waited for, and not earlier."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.groups import Group
from tests.adversary.memory import Agent, Race, Weak
from tests.adversary.runtime import Runtime

# (tensors to send, tensors to receive into) -> the work of torch.distributed
Launch = Callable[[list[Tensor], list[Tensor]], Any]


class Transfer(Agent):
    """A collective or message in flight, between copies of its tensors.

    Those that it receives into are poisoned until `wait`. Those that it sends must be the same, and alive, until then.
    """

    must_be_waited_for = True

    def __init__(
        self, runtime: Runtime, title: str, sent: Sequence[Tensor], received: Sequence[Tensor], launch: Launch
    ) -> None:
        """A tensor that is sent and received into stands in `received` alone."""
        within = runtime.agent()  # the operation that it is a part of
        clock, _ = runtime.submitted(None)
        super().__init__(title if within is None else f"{within.title.text}, {title}", clock)
        self._runtime, self._lock = runtime, threading.RLock()
        for tensor in sent:
            runtime.memory.access(tensor, self, "sending", writes=False)
        for tensor in received:
            runtime.memory.access(tensor, self, "receiving", writes=True)
        with torch._C._DisableTorchDispatch():
            # `data`: without a version of their own, as tensors are written by a transport.
            self._sent = [(Weak(tensor), tensor.data.clone()) for tensor in sent]
            self._received = [(Weak(tensor), tensor.data.clone()) for tensor in received]
            for tensor in received:
                _poison(tensor.data)
            self._work: Any = launch([copy for _, copy in self._sent], [copy for _, copy in self._received])
        runtime.pending[self.number] = self

    def wait(self) -> None:
        """See Waitable."""
        self._runtime.opportunity()
        self.arrive()
        with self._lock:
            self._runtime.pending.pop(self.number, None)
            self._deliver()
        self._runtime.order_behind(self.release(), host=False)

    def arrive(self) -> None:
        """Block until the messages are there, which shows nowhere."""
        with self._lock:
            if self._work is not None:
                self._work.wait()
                self._work = None

    def is_completed(self) -> bool:
        """Not before it was waited for: it may be that late."""
        return self.number not in self._runtime.pending

    def nudge(self) -> None:
        """It cannot be told whether it would block."""

    def finish(self) -> None:
        """See Pending."""
        self.wait()

    def described(self) -> str:
        """See Pending."""
        return self.title.text

    def _deliver(self) -> None:
        with torch._C._DisableTorchDispatch():
            for weak, copy in self._received:
                if (tensor := weak.tensor()) is None:
                    raise Race(f"the tensor into which {self.title.text} receives was freed before it was waited for")
                tensor.copy_(copy)
            for weak, copy in self._sent:
                if (tensor := weak.tensor()) is None:
                    raise Race(f"the tensor that {self.title.text} sends was freed before it was waited for")
                if not torch.equal(_bytes(tensor), _bytes(copy)):
                    raise Race(f"the tensor that {self.title.text} sends was overwritten before it was waited for")
        self._received, self._sent = [], []


class Message(NamedTuple):
    """As dist.P2POp, which knows only torch's own functions."""

    start: Callable[..., Transfer]
    tensor: Tensor
    peer: int
    group: Any = None
    tag: int = 0


class Distributed:
    """Stands for the module torch.distributed in core/comm: its asynchronous calls are Transfers, all else is its
    own."""

    P2POp = Message

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def isend(self, tensor: Tensor, peer: int, group: Any = None, tag: int = 0) -> Transfer:
        """As torch's."""
        return Transfer(
            self._runtime,
            f"a message to rank {peer}",
            [tensor],
            [],
            lambda out, _: dist.isend(out[0], peer, group, tag),
        )

    def irecv(self, tensor: Tensor, peer: int, group: Any = None, tag: int = 0) -> Transfer:
        """As torch's."""
        return Transfer(
            self._runtime,
            f"a message from rank {peer}",
            [],
            [tensor],
            lambda _, into: dist.irecv(into[0], peer, group, tag),
        )

    def batch_isend_irecv(self, messages: Sequence[Message]) -> list[Transfer]:
        """As torch's, on gloo: one after the other."""
        return [each.start(each.tensor, each.peer, each.group, each.tag) for each in messages]

    def all_reduce(self, tensor: Tensor, op: Any, group: Any, *, async_op: bool) -> Transfer:
        """As torch's."""
        return self._in_place("an all-reduce", tensor, lambda copy: dist.all_reduce(copy, op, group, async_op=True))

    def broadcast(self, tensor: Tensor, source: int, group: Any, *, async_op: bool) -> Transfer:
        """As torch's."""
        return self._in_place("a broadcast", tensor, lambda copy: dist.broadcast(copy, source, group, async_op=True))

    def all_to_all_single(
        self,
        received: Tensor,
        sent: Tensor,
        receive: list[int] | None = None,
        send: list[int] | None = None,
        *,
        group: Any,
        async_op: bool,
    ) -> Transfer:
        """As torch's."""

        def launch(out: list[Tensor], into: list[Tensor]) -> Any:
            return dist.all_to_all_single(into[0], out[0], receive, send, group=group, async_op=True)

        return Transfer(self._runtime, "an all-to-all", [sent], [received], launch)

    def gather_into(self, plain: Callable[..., Any], full: Tensor, shard: Tensor, *, group: Any) -> Transfer:
        """As `plain`, torch's all-gather into one tensor."""

        def launch(out: list[Tensor], into: list[Tensor]) -> Any:
            return plain(into[0], out[0], group=group, async_op=True)

        return Transfer(self._runtime, "an all-gather", [shard], [full], launch)

    def receive(self, group: Group, incoming: Tensor, r: int, tag: int) -> Transfer:
        """As pairwise.receive."""
        return Transfer(
            self._runtime,
            f"a message from rank {group.ranks[r]} of {group.name}",
            [],
            [incoming],
            lambda _, into: _pg(group).recv(into, r, tag),
        )

    def send(self, group: Group, outgoing: Tensor, r: int, tag: int) -> Transfer:
        """As pairwise.send."""
        return Transfer(
            self._runtime,
            f"a message to rank {group.ranks[r]} of {group.name}",
            [outgoing],
            [],
            lambda out, _: _pg(group).send(out, r, tag),
        )

    def _in_place(self, title: str, tensor: Tensor, launch: Callable[[Tensor], Any]) -> Transfer:
        return Transfer(self._runtime, title, [], [tensor], lambda _, into: launch(into[0]))


def _pg(group: Group) -> Any:
    assert group.process_group is not None
    return group.process_group


def _poison(tensor: Tensor) -> None:
    if tensor.is_floating_point():
        tensor.fill_(float("nan"))
    elif tensor.dtype != torch.bool:
        tensor.fill_(torch.iinfo(tensor.dtype).max)


def _bytes(tensor: Tensor) -> Tensor:
    """To compare: NaN differs from itself."""
    return tensor.contiguous().flatten().view(torch.uint8)
