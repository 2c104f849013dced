"""Attention over lists of blocks: results merged by log-sum-exp, gradients added up, both in fp32. No communication."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.core.context_parallel import layout
from megatron.core.context_parallel.block_plan import Block, inside_documents, runs_of
from megatron.kernels.ops.attention_lse import BlockKernel
from megatron.kernels.ops.attention_rule import Drop, Rule
from megatron.kernels.ops.attention_scores import Scores
from megatron.kernels.ops.attention_segments import Segments
from megatron.kernels.ops.attention_sinks import add_sinks_, gradient_of_sinks


def rule_of_all(scores: Scores, dropout: float, seed: Tensor | None, length: int) -> Rule:
    """The rule of all `length` queries and keys of a sequence; its blocks know the documents. seed: see `draw_seed`."""
    if seed is None:
        return Rule(scores)
    places = torch.arange(length, dtype=torch.int32, device=seed.device)
    return Rule(scores, drop=Drop(dropout, seed, places, places))


def rule_of_rank(rule: Rule, rank: int, source: int | None, size: int) -> Rule:
    """The part of `rule` for the queries of `rank` and the keys of rank `source`; None: all keys."""
    drop = rule.drop
    if drop is None:
        return rule
    keys = drop.keys if source is None else layout.take(drop.keys, 0, source, size)
    return Rule(rule.scores, drop=Drop(drop.rate, drop.seed, layout.take(drop.queries, 0, rank, size), keys))


def blocks_of(
    blocks: list[Block], segments: Segments | None, rank: int, source: int | None, size: int, length: int
) -> list[Block]:
    """The same blocks inside the documents of the whole sequence. They are of `rank`'s queries and rank `source`'s
    keys, or None of all keys in natural order; a rank has `length` tokens.
    """
    if segments is None:
        return blocks
    chunk, samples = length // 2, segments.by_sample()
    theirs = range(2 * size) if source is None else layout.chunks_of(source, size)
    queries, keys = (
        [runs_of(lengths, of, chunk) for lengths in samples] for of in (layout.chunks_of(rank, size), theirs)
    )
    return inside_documents(blocks, queries, keys)


class PairShape(NamedTuple):
    """Keys and values in one tensor [t, b, g (d + v)]: the g keys of a token, then its g values."""

    groups: int
    qk_dim: int
    v_dim: int

    @staticmethod
    def of(k: Tensor, v: Tensor) -> PairShape:
        """Returns the shape of keys [t, b, g, d] and values [t, b, g, v]."""
        return PairShape(k.shape[2], k.shape[3], v.shape[3])

    def apart(self, pairs: Tensor) -> tuple[Tensor, Tensor]:
        """Returns views of keys [t, b, g, d] and values [t, b, g, v]."""
        k, v = pairs.split([self.groups * self.qk_dim, self.groups * self.v_dim], dim=-1)
        return k.unflatten(-1, (self.groups, -1)), v.unflatten(-1, (self.groups, -1))


def joined(k: Tensor, v: Tensor) -> Tensor:
    """Returns keys [t, b, g, d] and values [t, b, g, v] as one tensor [t, b, g (d + v)]."""
    return torch.cat((k.flatten(2), v.flatten(2)), dim=-1)


class Attention:
    """Attention of q [s, b, n, d] to the keys added so far: `out` [s, b, n, v] and `lse` [b, n, s] in fp32."""

    def __init__(self, kernel: BlockKernel, q: Tensor, shape: PairShape) -> None:
        s, b, n, _ = q.shape
        self._kernel, self._q, self._shape = kernel, q, shape
        dtype = torch.promote_types(q.dtype, torch.float32)
        self.out = torch.zeros((s, b, n, shape.v_dim), dtype=dtype, device=q.device)
        self.lse = torch.full((b, n, s), float("-inf"), dtype=self.out.dtype, device=q.device)

    def add(self, kv: Tensor, blocks: Sequence[Block], rule: Rule) -> None:
        """Attend `blocks` of keys and values [t, b, g (d + v)] under `rule`. A query's first block must show it a
        key."""
        k, v = self._shape.apart(kv)
        for block in blocks:
            (queries, keys), samples = block[:2], block.samples
            q, block_rule = self._q[queries, samples], _rule(block, rule)
            out, lse = self._kernel.forward(q, k[keys, samples], v[keys, samples], block_rule)
            self._kernel.merge(self.out[queries, samples], self.lse[samples, :, queries], out, lse)
            del out, lse  # before those of the next block are there

    def add_sinks(self, sinks: Tensor | None) -> None:
        """Add sinks [n], if there are any, when all blocks have been added."""
        if sinks is not None:
            add_sinks_(self.out, self.lse, sinks)


class Gradient:
    """Gradient of an attention whose merged results are `out` [s, b, n, v] and `lse` [b, n, s]: `dq` in fp32, so
    far."""

    def __init__(
        self, kernel: BlockKernel, grad: Tensor, q: Tensor, out: Tensor, lse: Tensor, shape: PairShape
    ) -> None:
        self._kernel, self._grad, self._q, self._out, self._lse = kernel, grad, q, out, lse
        self._shape = shape
        self.dq = zeros_like(q)

    def add(self, kv: Tensor, dkv: Tensor, blocks: Sequence[Block], rule: Rule) -> None:
        """Add the gradients of `blocks` of keys and values [t, b, g (d + v)] to `dq` and to fp32 `dkv`."""
        (k, v), (keys_grad, values_grad) = self._shape.apart(kv), self._shape.apart(dkv)
        for block in blocks:
            (queries, keys), samples = block[:2], block.samples
            dq, dk, dv = self._kernel.backward(
                self._grad[queries, samples],
                self._q[queries, samples],
                k[keys, samples],
                v[keys, samples],
                self._out[queries, samples],
                self._lse[samples, :, queries],
                _rule(block, rule),
            )
            self.dq[queries, samples] += dq
            keys_grad[keys, samples] += dk
            values_grad[keys, samples] += dv
            del dq, dk, dv  # before those of the next block are there

    def of_sinks(self, sinks: Tensor | None) -> Tensor | None:
        """The gradient of sinks [n], if there are any."""
        return None if sinks is None else gradient_of_sinks(self._grad, self._out, self._lse, sinks)


def zeros_like(x: Tensor) -> Tensor:
    """Contiguous zeros of x's shape, in fp32, or fp64 for fp64."""
    return torch.zeros(x.shape, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)


def _rule(block: Block, rule: Rule) -> Rule:
    return rule.cut(block.queries, block.keys, block.samples.start or 0)._replace(
        offset=block.offset, window=block.window
    )
