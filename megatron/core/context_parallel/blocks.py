"""Attention over lists of blocks: results merged by log-sum-exp, gradients added up, both in fp32. No communication."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron.core.context_parallel.plan import Block
from megatron.kernels.ops.attention_lse import BlockKernel, merge_
from megatron.kernels.ops.attention_rule import Rule

Segments = tuple[Tensor, Tensor] | None  # ids of the queries [b, s] and of the keys [b, t]


class Attention:
    """Attention of q [s, b, n, d] to the keys added so far: `out` [s, b, n, d] and `lse` [b, n, s] in fp32."""

    def __init__(self, kernel: BlockKernel, q: Tensor) -> None:
        s, b, n, _ = q.shape
        self._kernel, self._q = kernel, q
        self.out = zeros_like(q)
        self.lse = torch.full((b, n, s), float("-inf"), dtype=self.out.dtype, device=q.device)

    def add(self, kv: Tensor, blocks: Sequence[Block], segments: Segments) -> None:
        """Attend `blocks` of keys and values [2, t, b, g, d]. The first block of a query must show it a key."""
        k, v = kv.unbind()
        for block in blocks:
            queries, keys = block.queries, block.keys
            out, lse = self._kernel.forward(self._q[queries], k[keys], v[keys], _rule(block, segments))
            merge_(self.out[queries], self.lse[..., queries], out, lse)


class Gradient:
    """Gradient of an attention whose merged results are `out` [s, b, n, d] and `lse` [b, n, s]: `dq` in fp32, so far."""

    def __init__(self, kernel: BlockKernel, grad: Tensor, q: Tensor, out: Tensor, lse: Tensor) -> None:
        self._kernel, self._grad, self._q, self._out, self._lse = kernel, grad, q, out, lse
        self.dq = zeros_like(q)

    def add(self, kv: Tensor, dkv: Tensor, blocks: Sequence[Block], segments: Segments) -> None:
        """Add what `blocks` of keys and values [2, t, b, g, d] give: to `dq`, and to their gradient `dkv`, fp32."""
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
                _rule(block, segments),
            )
            self.dq[queries] += dq
            dkv[0, keys] += dk
            dkv[1, keys] += dv


def zeros_like(x: Tensor) -> Tensor:
    """Contiguous zeros of x's shape, in fp32, or fp64 for fp64."""
    return torch.zeros(x.shape, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)


def _rule(block: Block, segments: Segments) -> Rule:
    cut = None if segments is None else (segments[0][:, block.queries], segments[1][:, block.keys])
    return Rule(block.offset, block.window, cut)
