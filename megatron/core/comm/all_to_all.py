"""Every rank's piece for every other rank, in one exchange."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.comm.collectives import Handle, announced, in_flight
from megatron.core.groups import Group


def all_to_all_async(tensor: Tensor, group: Group) -> tuple[Tensor, Handle]:
    """[size, ...] on each rank -> [size, ...] in which entry r is the one that rank r held for this rank.

    The result may be read after the handle's `wait`, and `tensor` must not be written before.
    """
    if group.size == 1:
        return tensor, Handle("all_to_all", group, None, (tensor,))
    tensor = tensor.contiguous()
    received = torch.empty_like(tensor)
    with announced("all_to_all", group, tuple(tensor.shape), tensor.dtype, tensor.nbytes):
        work = dist.all_to_all_single(received, tensor, group=group.process_group, async_op=True)
    return received, in_flight("all_to_all", group, tensor, work, (tensor, received))
