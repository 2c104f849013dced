"""Every rank of a ring or an all-gather in one process: the same blocks and merges, no messages."""

import torch

from megatron.core.context_parallel import layout
from megatron.core.context_parallel.blocks import Attention, Gradient, zeros_like
from megatron.core.context_parallel.plan import other_blocks, own_blocks, ring_blocks
from megatron.kernels.ops import attention


def cut(x, dim, size):
    return [layout.take(x, dim, rank, size) for rank in range(size)]


def ring(kernel, q, k, v, grad, size, segments=None, window=None):
    """[out, dq, dk, dv] of the whole sequence; q, grad [s, b, n, d], k, v [s, b, g, d]."""
    queries, grads, keys = cut(q, 0, size), cut(grad, 0, size), cut(torch.stack((k, v)), 1, size)
    ids = [None] * size if segments is None else cut(segments, 1, size)
    dkv, results = [zeros_like(kv) for kv in keys], []
    for rank in range(size):
        sources = [(rank - step) % size for step in range(size)]
        todo = [(s, ring_blocks(rank, s, size, len(queries[rank]) // 2, window)) for s in sources]
        pairs = {s: None if segments is None else (ids[rank], ids[s]) for s in sources}
        forward = Attention(kernel, queries[rank])
        for source, blocks in todo:
            forward.add(keys[source], blocks, pairs[source])
        out = forward.out.to(q.dtype)
        backward = Gradient(kernel, grads[rank], queries[rank], out, forward.lse)
        for source, blocks in todo:
            backward.add(keys[source], dkv[source], blocks, pairs[source])
        results.append((out, backward.dq))
    out, dq = (layout.to_natural_order(torch.cat(x), 0, size) for x in zip(*results, strict=True))
    return [out, dq, *layout.to_natural_order(torch.cat(dkv, dim=1), 1, size).unbind()]


def gathered(kernel, q, k, v, grad, size, segments=None, window=None):
    """As `ring`, for keys and values that were gathered."""
    queries, grads, kv = cut(q, 0, size), cut(grad, 0, size), torch.stack((k, v))
    keys = cut(kv, 1, size)
    ids = [None] * size if segments is None else cut(segments, 1, size)
    dkv, results = zeros_like(kv), []
    own_dkv = [zeros_like(x) for x in keys]
    for rank in range(size):
        own, others = (plan(rank, size, len(queries[rank]) // 2, window) for plan in (own_blocks, other_blocks))
        own_ids = None if segments is None else (ids[rank], ids[rank])
        all_ids = None if segments is None else (ids[rank], segments)
        forward = Attention(kernel, queries[rank])
        forward.add(keys[rank], own, own_ids)
        forward.add(kv, others, all_ids)
        out = forward.out.to(q.dtype)
        backward = Gradient(kernel, grads[rank], queries[rank], out, forward.lse)
        backward.add(kv, dkv, others, all_ids)
        backward.add(keys[rank], own_dkv[rank], own, own_ids)
        results.append((out, backward.dq))
    out, dq = (layout.to_natural_order(torch.cat(x), 0, size) for x in zip(*results, strict=True))
    dkv += layout.to_natural_order(torch.cat(own_dkv, dim=1), 1, size)
    return [out, dq, *dkv.unbind()]


def exact(q, k, v, grad, segments=None, window=None):
    """The same of one process, by the reference kernel in fp64."""
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    out = attention.unfused(*leaves, segments=segments, window=window, dropout=0.0).view(q.shape)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.double())]
