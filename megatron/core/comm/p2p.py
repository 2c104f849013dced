"""Messages between two ranks of a group."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.comm.collectives import Handle, announced, in_flight
from megatron.core.groups import Group


class _Both:
    """The works of one exchange as one."""

    def __init__(self, works: list[Any]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


def shift_async(tensor: Tensor, group: Group, tag: int = 0) -> tuple[Tensor, Handle]:
    """Send `tensor` to the group's next rank and receive the previous rank's, of the same shape; the last is before the
    first.

    The result may be read after the handle's `wait`, and `tensor` must not be written before. `tag` tells apart
    messages that are in flight at the same time on gloo; NCCL keeps their order.
    """
    if group.size == 1:
        return tensor, Handle("shift", group, None, (tensor,))
    tensor = tensor.contiguous()
    received = torch.empty_like(tensor)
    following, before = (group.ranks[(group.rank + step) % group.size] for step in (1, -1))
    with announced("shift", group, tuple(tensor.shape), tensor.dtype, tensor.nbytes):
        # Receives are posted first: gloo sends a message only when its receive is posted.
        work = _Both(
            dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.irecv, received, before, group.process_group, tag),
                    dist.P2POp(dist.isend, tensor, following, group.process_group, tag),
                ]
            )
        )
    return received, in_flight("shift", group, tensor, work, (tensor, received))


def send_and_receive(
    outgoing: Tensor | None, destination: int, incoming: Tensor | None, source: int, group: Group
) -> Handle:
    """Sends `outgoing` to one rank of the group, and receives `incoming` from another one; None: nothing.

    The ranks are numbers in the group. Both tensors are contiguous. `incoming` may be read and `outgoing` be written
    after the handle's `wait`. All ranks of a group may do so at once, each with a rank at the same distance.
    """
    tensors = [tensor for tensor in (incoming, outgoing) if tensor is not None]
    operations = []
    if incoming is not None:  # receives are posted first: see shift_async
        operations.append(dist.P2POp(dist.irecv, incoming, group.ranks[source], group.process_group))
    if outgoing is not None:
        operations.append(dist.P2POp(dist.isend, outgoing, group.ranks[destination], group.process_group))
    largest = max(tensors, key=lambda tensor: tensor.nbytes)
    with announced("send_and_receive", group, tuple(largest.shape), largest.dtype, largest.nbytes):
        work = _Both(dist.batch_isend_irecv(operations))
    return in_flight("send_and_receive", group, largest, work, tuple(tensors))
