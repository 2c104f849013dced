"""Every rank of a ring or an all-gather in one process: the same blocks and merges, no messages."""

import torch

from megatron.core.context_parallel import layout
from megatron.core.context_parallel.block_plan import other_blocks, own_blocks, ring_blocks
from megatron.core.context_parallel.blocks import (
    Attention,
    Gradient,
    PairShape,
    blocks_of,
    joined,
    rule_of_all,
    rule_of_rank,
    zeros_like,
)
from megatron.kernels.ops import attention
from megatron.kernels.ops.attention_scores import Scores
from megatron.kernels.ops.attention_segments import segments_of

SCORES = Scores(0.3)


def cut(x, dim, size):
    return [layout.take(x, dim, rank, size) for rank in range(size)]


def inside(blocks, ids, *where):
    """The blocks inside documents with these ids, if there are any."""
    return blocks_of(blocks, None if ids is None else segments_of(ids.cpu(), ids.device), *where)


def ring(kernel, q, k, v, grad, size, segments=None, window=None, drop=None, scores=SCORES):
    """[out, dq, dk, dv] of the whole sequence; q, grad [s, b, n, d], k, v [s, b, g, d]."""
    queries, grads, keys = cut(q, 0, size), cut(grad, 0, size), cut(joined(k, v), 0, size)
    whole = rule_of_all(scores, 0.0 if drop is None else drop.rate, drop and drop.seed, len(q))
    dkv, results = [zeros_like(kv) for kv in keys], []
    for rank in range(size):
        sources = [(rank - step) % size for step in range(size)]
        plans = [(s, ring_blocks(rank, s, size, len(queries[rank]) // 2, window)) for s in sources]
        todo = [(s, inside(blocks, segments, rank, s, size, len(queries[rank]))) for s, blocks in plans]
        rules = {s: rule_of_rank(whole, rank, s, size) for s in sources}
        forward = Attention(kernel, queries[rank], PairShape.of(k, v))
        for source, blocks in todo:
            forward.add(keys[source], blocks, rules[source])
        out = forward.out.to(q.dtype)
        backward = Gradient(kernel, grads[rank], queries[rank], out, forward.lse, PairShape.of(k, v))
        for source, blocks in todo:
            backward.add(keys[source], dkv[source], blocks, rules[source])
        results.append((out, backward.dq))
    out, dq = (layout.to_natural_order(torch.cat(x), 0, size) for x in zip(*results, strict=True))
    return [out, dq, *PairShape.of(k, v).apart(layout.to_natural_order(torch.cat(dkv), 0, size))]


def gathered(kernel, q, k, v, grad, size, segments=None, window=None, drop=None, scores=SCORES):
    """As `ring`, for keys and values that were gathered."""
    queries, grads, kv = cut(q, 0, size), cut(grad, 0, size), joined(k, v)
    keys = cut(kv, 0, size)
    whole = rule_of_all(scores, 0.0 if drop is None else drop.rate, drop and drop.seed, len(q))
    dkv, results = zeros_like(kv), []
    own_dkv = [zeros_like(x) for x in keys]
    for rank in range(size):
        own, others = (plan(rank, size, len(queries[rank]) // 2, window) for plan in (own_blocks, other_blocks))
        own = inside(own, segments, rank, rank, size, len(queries[rank]))
        others = inside(others, segments, rank, None, size, len(queries[rank]))
        own_rule, all_rules = rule_of_rank(whole, rank, rank, size), rule_of_rank(whole, rank, None, size)
        forward = Attention(kernel, queries[rank], PairShape.of(k, v))
        forward.add(keys[rank], own, own_rule)
        forward.add(kv, others, all_rules)
        out = forward.out.to(q.dtype)
        backward = Gradient(kernel, grads[rank], queries[rank], out, forward.lse, PairShape.of(k, v))
        backward.add(kv, dkv, others, all_rules)
        backward.add(keys[rank], own_dkv[rank], own, own_rule)
        results.append((out, backward.dq))
    out, dq = (layout.to_natural_order(torch.cat(x), 0, size) for x in zip(*results, strict=True))
    dkv += layout.to_natural_order(torch.cat(own_dkv), 0, size)
    return [out, dq, *PairShape.of(k, v).apart(dkv)]


def exact(q, k, v, grad, segments=None, window=None, factors=1.0, scores=SCORES):
    """The same of one process, in fp64. factors: [b, n, s, t] on the probabilities."""
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for x in leaves[1:])
    found = scores.scale * torch.einsum("sbnd,tbnd->bnst", leaves[0], k)
    if scores.softcap is not None:
        found = scores.softcap * torch.tanh(found / scores.softcap)
    visible = attention.causal_mask(len(q), len(k), segments, window, q.device)
    weights = found.masked_fill(~visible, float("-inf")).softmax(-1) * factors
    out = torch.einsum("bnst,tbnd->sbnd", weights, v)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.double())]
