"""Builders of pieces for the checkpoint tests."""

import torch

from megatron.core.dist_checkpointing.sharded_tensor import ShardedTensor


def whole(name, data, writer=True):
    """The whole tensor as one piece."""
    return ShardedTensor(name, data, tuple(data.shape), (0,) * data.dim(), writer)


def shard(name, full, dim, rank, size, writer=True):
    """This rank's equal share of `full` along `dim`, as a view."""
    length = full.shape[dim] // size
    offset = [0] * full.dim()
    offset[dim] = rank * length
    return ShardedTensor(name, full.narrow(dim, rank * length, length), tuple(full.shape), tuple(offset), writer)


def empty_like(pieces):
    """The same pieces with other storage, filled with a wrong value."""
    return [ShardedTensor(p.name, torch.full_like(p.data, 99), p.global_shape, p.offset, p.writer) for p in pieces]


def bits(tensor):
    """The tensor's bytes, so that NaN and signed zero compare too."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def same(a, b):
    """Bit for bit."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))
