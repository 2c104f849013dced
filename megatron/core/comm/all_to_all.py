"""Every rank's piece for every other rank, in one exchange: pieces of one size, or of any number of rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.comm.collectives import Handle, announced, in_flight
from megatron.core.groups import Group


def all_to_all_async(tensor: Tensor, group: Group, name: str = "all_to_all") -> tuple[Tensor, Handle]:
    """[size, ...] on each rank -> [size, ...] in which entry r is the one that rank r held for this rank.

    The result may be read after the handle's `wait`, and `tensor` must not be written before. name: for messages.
    """
    if group.size == 1:
        return tensor, Handle(name, group, None, (tensor,))
    tensor = tensor.contiguous()
    received = torch.empty_like(tensor)
    with announced("all_to_all", group, tuple(tensor.shape), tensor.dtype, tensor.nbytes, name=name):
        work = dist.all_to_all_single(received, tensor, group=group.process_group, async_op=True)
    return received, in_flight(name, group, tensor, work, (tensor, received))


def all_to_all_v(
    tensor: Tensor, send: Sequence[int], receive: Sequence[int], group: Group, name: str = "all_to_all_v"
) -> Tensor:
    """[sum of send, ...] on each rank -> [sum of receive, ...]: the rows that each rank had for this one, in rank
    order.

    send[r]: rows for rank r of the group, which stand in rank order. receive[r]: rows from rank r, its send[this rank].
    Any of them may be 0; every rank takes part all the same. name: for messages.
    """
    received, handle = all_to_all_v_async(tensor, send, receive, group, name)
    handle.wait()
    return received


def all_to_all_v_async(
    tensor: Tensor, send: Sequence[int], receive: Sequence[int], group: Group, name: str = "all_to_all_v"
) -> tuple[Tensor, Handle]:
    """As `all_to_all_v`; the result may be read after the handle's `wait`, and `tensor` must not be written before.

    gloo's own exchange is as fast as messages between every pair of ranks (pairwise.py), and faster if they are short.
    """
    assert len(send) == len(receive) == group.size and sum(send) == len(tensor), (
        send,
        receive,
        tensor.shape,
        group.name,
    )
    if group.size == 1:
        return tensor, Handle(name, group, None, (tensor,))
    tensor = tensor.contiguous()
    received = tensor.new_empty((sum(receive), *tensor.shape[1:]))
    with announced("all_to_all_v", group, tuple(tensor.shape), tensor.dtype, tensor.nbytes, name=name) as number:
        work = dist.all_to_all_single(
            received, tensor, list(receive), list(send), group=group.process_group, async_op=True
        )
    return received, in_flight(name, group, tensor, work, (tensor, received), number)
