"""torch's fused GEMMs over symmetric memory: all-gather + GEMM and GEMM + reduce-scatter in one operation (CUDA only).

Ranks of one host read and write each other's memory, so copy engines move the chunks and no processor of the GPU is
taken from the GEMMs. Private names of torch are used in this file alone.
"""

from __future__ import annotations

import socket
from typing import Any

import torch
from torch import Tensor
from torch.distributed import _symmetric_memory as symmetric_memory

from megatron.base.errors import first_line
from megatron.core.comm.collectives import announced, gather_objects
from megatron.core.groups import Group

_PROBE = 1024  # bytes


def why_not(group: Group, device: torch.device) -> str | None:
    """Why the group cannot use it, or None when it can. Collective over the group, which agrees on the answer."""
    if device.type != "cuda":
        return "no CUDA device"
    places = gather_objects((socket.gethostname(), device.index), group)
    if len({host for host, _ in places}) > 1:
        return f"{group.name} spans hosts"
    indices = [index for _, index in places]
    missing = _unreachable(device, indices)
    if not any(gather_objects(missing, group)):
        missing = _probe(group, device)
    return next((reason for reason in gather_objects(missing, group) if reason), None)


def gather_matmul(shard: Tensor, matrix: Tensor, group: Group, *, keep: bool) -> tuple[Tensor | None, Tensor]:
    """shard [n, in], matrix [in, out] -> (gathered [size * n, in] if `keep`, its product [size * n, out]).

    Communication: an all-gather, overlapped with the GEMM.
    """
    with announced("all_gather", group, tuple(shard.shape), shard.dtype, shard.nbytes):
        full, (product,) = torch.ops.symm_mem.fused_all_gather_matmul(
            shard.contiguous(), [matrix], 0, _name(group), return_A=keep
        )
    return full, product


def matmul_scatter(x: Tensor, matrix: Tensor, group: Group) -> Tensor:
    """x [size * n, in], matrix [in, out] -> this rank's [n, out] of the product's sum over the group.

    Communication: a reduce-scatter, overlapped with the GEMM.
    """
    shape, nbytes = (x.shape[0], matrix.shape[1]), x.shape[0] * matrix.shape[1] * x.itemsize
    with announced("reduce_scatter", group, shape, x.dtype, nbytes):
        shard: Tensor = torch.ops.symm_mem.fused_matmul_reduce_scatter(x.contiguous(), matrix, "sum", 0, _name(group))
    return shard


def _name(group: Group) -> Any:  # a type of its own from torch 2.13 on
    assert group.process_group is not None
    return group.process_group.group_name


def _unreachable(device: torch.device, indices: list[int]) -> str | None:
    if len(set(indices)) < len(indices):
        return "processes see different devices under one number (CUDA_VISIBLE_DEVICES)"
    for other in indices:
        if other >= torch.cuda.device_count():
            return f"GPU {other} is not visible to all processes"
        if other != device.index and not torch.cuda.can_device_access_peer(device.index, other):
            return f"GPU {device.index} cannot reach GPU {other}'s memory"
    return None


def _probe(group: Group, device: torch.device) -> str | None:
    try:
        symmetric_memory.enable_symm_mem_for_group(_name(group))
        memory = symmetric_memory.empty(_PROBE, dtype=torch.uint8, device=device)
        symmetric_memory.rendezvous(memory, _name(group))
    except RuntimeError as error:  # a driver or container without the calls it needs
        return first_line(error)
    return None
