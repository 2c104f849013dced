"""Self-attention with grouped key/value heads.

Shapes: s full sequence, b batch, g key/value heads (groups), q query heads per group, d channels per query or key, v
channels per value; /tp where sharded. [Note: fewer groups than ranks] Where tp is a multiple of g, tp / g neighbours
share a group: each holds a copy of its key and value rows, and its part of the query heads. So g/tp reads 1 and q reads
q g / tp. Each has the part of the copies' gradient that comes from its own query heads: see `Section.partial`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from torch import Tensor, nn

from megatron.core.transformer.context import Build, KeyValueCache, Positions
from megatron.core.transformer.norm import Norm
from megatron.kernels.ops.attention import AttentionKernel
from megatron.kernels.ops.attention_scores import Scores
from megatron.kernels.ops.attention_segments import Segments
from megatron.kernels.ops.rope import rotate, split_and_rotate
from megatron.spec.attention import AttentionSpec


class SelfAttention(nn.Module):
    """[s or s/tp, b, h] -> the same.

    core: attention of queries, keys and values; under context parallelism it exchanges keys and values with other
    ranks. prefetch: called with keys and values as soon as they are there, if `core` can start their exchange before
    its call.
    """

    def __init__(
        self,
        build: Build,
        spec: AttentionSpec,
        core: AttentionKernel,
        prefetch: Callable[[Tensor, Tensor], None] | None = None,
    ) -> None:
        super().__init__()
        tp = build.groups.tp.size
        self.linear_qkv = build.column(spec.linear_qkv)
        self.linear_proj = build.row(spec.linear_proj)
        self.q_layernorm = build.optional_norm(spec.q_norm)
        self.k_layernorm = build.optional_norm(spec.k_norm)
        shape = spec.core
        self._local_groups, self._d = shape.local_groups(tp), shape.qk_dim
        self._per_group = shape.heads // shape.groups // shape.group_holders(tp)
        self.core, self._prefetch = core, prefetch
        self._rotary = None if spec.rotary is None else build.spec.rotaries.index(spec.rotary)
        self.rotate = functools.partial(rotate, once=build.kernels.fused.rotate_once)
        normed = spec.q_norm is not None or spec.k_norm is not None
        splits = not normed and spec.rotary is not None and shape.qk_dim == shape.v_dim
        self._split = build.kernels.fused.split if splits else None
        self._scores = Scores(shape.scale, shape.softcap)
        self._spec, self._rng = spec, build.rng

    def forward(self, x: Tensor, positions: Positions, cache: KeyValueCache | None = None) -> Tensor:
        """With a cache, x holds only the new positions and attends to all."""
        qkv = self.linear_qkv(x)  # [s, b, g/tp * (q d + d + v)]
        s, b, _ = qkv.shape
        tables = positions.rotary[self._rotary] if self._rotary is not None and positions.rotary else None
        if self._split is not None and self._spec.rotary is not None and tables is not None:
            interleaved = self._spec.rotary.interleaved
            heads = qkv.view(s, b, self._local_groups, self._per_group + 2, -1)
            q, k, v = split_and_rotate(heads, *tables, interleaved=interleaved, kernel=self._split)
            k, v = self._exchanged(k, v, cache)
        else:
            heads = qkv.view(s, b, self._local_groups, -1)
            keys, values = self._per_group * self._d, (self._per_group + 1) * self._d  # where a group's begin
            k, v = heads[..., keys:values], heads[..., values:]  # [s, b, g/tp, d] and [s, b, g/tp, v]
            k = self._normed_and_rotated(k, self.k_layernorm, tables)
            if v.requires_grad and tables is not None and self.k_layernorm is None:
                # The rotated keys and queries are copies: as a view, v alone would keep all of qkv until backward.
                v = v.contiguous()
            k, v = self._exchanged(k, v, cache)
            q = heads[..., :keys].reshape(s, b, -1, self._d)  # [s, b, g/tp * q, d]
            q = self._normed_and_rotated(q, self.q_layernorm, tables)
        return self.linear_proj(self._attend(q, k, v, positions.segments))

    def _exchanged(self, k: Tensor, v: Tensor, cache: KeyValueCache | None) -> tuple[Tensor, Tensor]:
        """Returns keys and values with those of the cache. Their exchange with other ranks starts here, if it can."""
        if cache is not None:
            k, v = cache.append(k, v)
        if self._prefetch is not None:
            self._prefetch(k, v)
        return k, v

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, segments: Segments | None) -> Tensor:
        window, dropout, scores = self._spec.core.window, self._spec.core.dropout, self._scores
        if dropout == 0.0 or not self.training:
            return self.core(q, k, v, scores=scores, segments=segments, window=window, dropout=0.0)
        with self._rng.stream("sharded"):
            return self.core(q, k, v, scores=scores, segments=segments, window=window, dropout=dropout)

    def _normed_and_rotated(self, x: Tensor, norm: Norm | None, tables: tuple[Tensor, Tensor] | None) -> Tensor:
        """[s, b, heads, d] -> the same."""
        if norm is not None:
            x = norm(x)
        if tables is None or self._spec.rotary is None:
            return x
        return self.rotate(x, *tables, interleaved=self._spec.rotary.interleaved)
