"""What the tests of context parallelism share: groups, inputs, and one rank's attention."""

import functools

import torch
import torch.distributed as dist

from megatron.core.context_parallel import layout
from megatron.core.context_parallel.attention import context_parallel_attention
from megatron.core.groups import Group
from megatron.kernels.choose_attention import choose_attention
from megatron.kernels.ops import attention, attention_lse
from megatron.kernels.ops.attention_scores import Scores
from megatron.spec.attention import CoreSpec
from tests import pool
from tests.unit.kernels.close import random

CPU = torch.device("cpu")
SCORES = Scores(8**-0.5)


def nested(ranks, inner):
    """(runs of `inner` neighbours, ranks of the same place in them)"""
    return [ranks[i : i + inner] for i in range(0, len(ranks), inner)], [ranks[i::inner] for i in range(inner)]


@functools.cache
def nested_groups(inner):
    """(inner, outer) of this process's world."""
    cp = pool.groups(cp=dist.get_world_size()).cp
    made = []
    for name, lists in zip(("cp_inner", "cp_outer"), nested(cp.ranks, inner), strict=True):
        for ranks in lists:
            group = dist.new_group(list(ranks)) if len(ranks) > 1 else None
            if cp.ranks[cp.rank] in ranks:
                made.append(Group(name, ranks, ranks.index(cp.ranks[cp.rank]), group, cp.heartbeat))
    return tuple(made)


def make(comm_type, size, block_kernel=attention_lse.cpu, kernel=attention.fused):
    """(the attention over a world of `size`, its cp group). The inner groups of a2a+p2p have 2 ranks."""
    cp = pool.groups(cp=size).cp
    inner, outer = nested_groups(2) if comm_type == "a2a+p2p" else (cp, cp)
    return context_parallel_attention(comm_type, cp, inner, outer, kernel, block_kernel), cp


def whole_inputs(s, n, g, *, b=2, d=8, v_dim=None, dtype=torch.float32):
    """q, k, v and the gradient of the output, of the whole sequence. v_dim: channels of a value, as many as d if
    None."""
    v_dim = v_dim or d
    shapes = [(s, b, n, d), (s, b, g, d), (s, b, g, v_dim), (s, b, n * v_dim)]
    return [random(*shape, dtype=dtype, seed=seed) for seed, shape in enumerate(shapes)]


def local_inputs(whole, cp):
    """This rank's parts; q, k and v are leaves."""
    q, k, v, grad = (layout.take(x, 0, cp.rank, cp.size).clone() for x in whole)
    return [x.requires_grad_() for x in (q, k, v)], grad


def part(rank, size, kind, heads, s, options, dtype=torch.float32, backend="auto", v_dim=8):
    """This rank's [out, dq, dk, dv]."""
    scores = options["scores"]
    chosen = choose_attention(
        [CoreSpec(*heads, 8, v_dim, options["window"], scores.scale, scores.softcap, 0.0)],
        backend,
        dtype,
        CPU,
        blocks=True,
        documents=True,
    )
    attend, cp = make(kind, size, chosen.blocks, chosen.attention)
    leaves, grad = local_inputs(whole_inputs(s, *heads, v_dim=v_dim, dtype=dtype), cp)
    out = attend(*leaves, **options)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def alone(heads, s, options, dtype=torch.float32, v_dim=8):
    """[out, dq, dk, dv] of one process, in fp64."""
    *leaves, grad = (x.double() for x in whole_inputs(s, *heads, v_dim=v_dim, dtype=dtype))
    leaves = [x.requires_grad_() for x in leaves]
    out = attention.unfused(*leaves, **options)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def joined(parts):
    """[out, dq, dk, dv] of the whole sequence from the ranks' parts."""
    size = len(parts)
    return [layout.to_natural_order(torch.cat(rows), 0, size) for rows in zip(*parts, strict=True)]


def error(found, expected):
    """Largest difference, relative to the largest element."""
    return float((found.double() - expected).abs().max() / expected.abs().max())
