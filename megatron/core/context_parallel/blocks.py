"""Attention over lists of blocks: results merged by log-sum-exp, gradients added up, both in fp32. No communication."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron.core.context_parallel import layout
from megatron.core.context_parallel.block_plan import Block
from megatron.kernels.ops.attention_lse import BlockKernel, merge_
from megatron.kernels.ops.attention_rule import Drop, Rule
from megatron.kernels.ops.attention_scores import Scores


def rule_of_all(scores: Scores, ids: Tensor | None, dropout: float, seed: Tensor | None, length: int) -> Rule:
    """The rule of all `length` queries and keys of a sequence. ids: of their segments [b, s]; seed: see `draw_seed`."""
    segments = None if ids is None else (ids, ids)
    if seed is None:
        return Rule(scores, segments=segments)
    places = torch.arange(length, dtype=torch.int32, device=seed.device)
    return Rule(scores, segments=segments, drop=Drop(dropout, seed, places, places))


def rule_of_rank(rule: Rule, rank: int, source: int | None, size: int) -> Rule:
    """The part of `rule` for the queries of `rank` and the keys of rank `source`; None: all keys."""

    def taken(pair: tuple[Tensor, Tensor], dim: int) -> tuple[Tensor, Tensor]:
        queries, keys = pair
        keys = keys if source is None else layout.take(keys, dim, source, size)
        return layout.take(queries, dim, rank, size), keys

    drop, segments = rule.drop, rule.segments
    if drop is not None:
        drop = Drop(drop.rate, drop.seed, *taken((drop.queries, drop.keys), 0))
    return Rule(rule.scores, segments=None if segments is None else taken(segments, 1), drop=drop)


class Attention:
    """Attention of q [s, b, n, d] to the keys added so far: `out` [s, b, n, d] and `lse` [b, n, s] in fp32."""

    def __init__(self, kernel: BlockKernel, q: Tensor) -> None:
        s, b, n, _ = q.shape
        self._kernel, self._q = kernel, q
        self.out = zeros_like(q)
        self.lse = torch.full((b, n, s), float("-inf"), dtype=self.out.dtype, device=q.device)

    def add(self, kv: Tensor, blocks: Sequence[Block], rule: Rule) -> None:
        """Attend `blocks` of keys and values [2, t, b, g, d] under `rule`. A query's first block must show it a key."""
        k, v = kv.unbind()
        for block in blocks:
            queries, keys = block.queries, block.keys
            out, lse = self._kernel.forward(self._q[queries], k[keys], v[keys], _rule(block, rule))
            merge_(self.out[queries], self.lse[..., queries], out, lse)


class Gradient:
    """Gradient of an attention whose merged results are `out` [s, b, n, d] and `lse` [b, n, s]: `dq` in fp32, so far."""

    def __init__(self, kernel: BlockKernel, grad: Tensor, q: Tensor, out: Tensor, lse: Tensor) -> None:
        self._kernel, self._grad, self._q, self._out, self._lse = kernel, grad, q, out, lse
        self.dq = zeros_like(q)

    def add(self, kv: Tensor, dkv: Tensor, blocks: Sequence[Block], rule: Rule) -> None:
        """Add the gradients of `blocks` of keys and values [2, t, b, g, d] to `dq` and to fp32 `dkv`."""
        k, v = kv.unbind()
        for block in blocks:
            queries, keys = block.queries, block.keys
            dq, dk, dv = self._kernel.backward(
                self._grad[queries],
                self._q[queries],
                k[keys],
                v[keys],
                self._out[queries],
                self._lse[..., queries],
                _rule(block, rule),
            )
            self.dq[queries] += dq
            dkv[0, keys] += dk
            dkv[1, keys] += dv


def zeros_like(x: Tensor) -> Tensor:
    """Contiguous zeros of x's shape, in fp32, or fp64 for fp64."""
    return torch.zeros(x.shape, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)


def _rule(block: Block, rule: Rule) -> Rule:
    return rule.cut(block.queries, block.keys)._replace(offset=block.offset, window=block.window)
