"""Self-attention with grouped key/value heads, or with keys and values that are projected up from latents.

Shapes: s full sequence, b batch, g key/value heads (groups), q query heads per group, d channels per query or key, v
channels per value; /tp where sharded. [Note: fewer groups than ranks] Where tp is a multiple of g, tp / g neighbours
share a group: each holds a copy of its key and value rows, and its part of the query heads. So g/tp reads 1 and q reads
q g / tp. Each has the part of the copies' gradient that comes from its own query heads: see `Section.partial`.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor, nn

from megatron.config.layer_forms import OFF_BY_ONE
from megatron.core.comm.regions import to_shards
from megatron.core.parameter import Parameter
from megatron.core.recompute.rerun import RecomputedOutputs
from megatron.core.tensor_parallel.linear import ColumnParallelLinear, ReplicatedLinear
from megatron.core.transformer.context import Build, KeyValueCache, Positions
from megatron.core.transformer.norm import Norm
from megatron.kernels.ops.alibi import slope_channels, with_channels
from megatron.kernels.ops.attention import AttentionKernel
from megatron.kernels.ops.attention_scores import Scores
from megatron.kernels.ops.attention_segments import Segments
from megatron.kernels.ops.latent_scores import attend_to_latents
from megatron.kernels.ops.output_gate import sigmoid_gate
from megatron.kernels.ops.rope import rotate, split_and_rotate
from megatron.spec.attention import AttentionSpec
from megatron.spec.latent_attention import LatentAttentionSpec

Reader = ColumnParallelLinear | ReplicatedLinear
_NO_SIZES: Mapping[int, AttentionKernel] = MappingProxyType({})


class AttentionLayer(nn.Module, ABC):
    """[s or s/tp, b, h] -> the same: projections around the core.

    core: attention of queries, keys and values; under context parallelism it exchanges keys and values with other
    ranks. prefetch: called with keys and values as soon as they are there, if `core` can start their exchange before
    its call. sized: `core` for sequences that other numbers of ranks share, by this number.
    """

    def __init__(
        self,
        build: Build,
        spec: AttentionSpec | LatentAttentionSpec,
        core: AttentionKernel,
        prefetch: Callable[[Tensor, Tensor], None] | None = None,
        sized: Mapping[int, AttentionKernel] = _NO_SIZES,
    ) -> None:
        super().__init__()
        self.core, self._prefetch, self._sized = core, prefetch, sized
        self._rotary = None if spec.rotary is None else build.spec.rotaries.index(spec.rotary)
        self._interleaved = spec.rotary is not None and spec.rotary.interleaved
        self.rotate = functools.partial(rotate, once=build.kernels.fused.rotate_once)
        self._shape, self._scores = spec.core, Scores(spec.core.scale, spec.core.softcap)
        if spec.core.softmax_type == OFF_BY_ONE:
            heads = spec.core.heads // build.groups.tp.size
            self._scores = self._scores._replace(sinks=torch.zeros(heads, dtype=build.dtype, device=build.device))
        sinks = spec.sinks if isinstance(spec, AttentionSpec) else None
        self.core_attention = None if sinks is None else SoftmaxOffset(build.parameter(sinks.weight))
        self._rng = build.rng

    @property
    @abstractmethod
    def readers(self) -> tuple[Reader, ...]:
        """The layers that read the hidden states."""

    @abstractmethod
    def forward(self, x: Tensor, positions: Positions, cache: KeyValueCache | None = None) -> Tensor:
        """With a cache, x holds only the new positions and attends to all."""

    def _tables(self, positions: Positions) -> tuple[Tensor, Tensor] | None:
        """cos and sin of this layer, or None where nothing is rotated."""
        return positions.rotary[self._rotary] if self._rotary is not None and positions.rotary else None

    def _exchanged(self, k: Tensor, v: Tensor, cache: KeyValueCache | None) -> tuple[Tensor, Tensor]:
        """Returns keys and values with those of the cache. Their exchange with other ranks starts here, if it can."""
        if cache is not None:
            k, v = cache.append(k, v)
        if self._prefetch is not None:
            self._prefetch(k, v)
        return k, v

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, positions: Positions) -> Tensor:
        window, dropout, scores = self._shape.window, self._shape.dropout, self._scores
        segments = _segments_of_keys(positions, k)
        if self.core_attention is not None:
            scores = scores._replace(sinks=self.core_attention.softmax_offset)
        core = self.core if positions.context is None else self._sized[positions.context]
        if dropout == 0.0 or not self.training:
            return core(q, k, v, scores=scores, segments=segments, window=window, dropout=0.0)
        with self._rng.stream("sharded"):
            return core(q, k, v, scores=scores, segments=segments, window=window, dropout=dropout)


class SoftmaxOffset(nn.Module):
    """The trained sinks of a layer's heads, [n/tp]."""

    def __init__(self, softmax_offset: Parameter) -> None:
        super().__init__()
        self.softmax_offset = softmax_offset


def _segments_of_keys(positions: Positions, k: Tensor) -> Segments | None:
    """The segments of keys [t, ...]: a cache of a window has fewer than the sequence."""
    segments = positions.segments
    return segments if segments is None or segments.starts is not None else segments.of_last(len(k))


class SelfAttention(AttentionLayer):
    """One projection to queries, keys and values, of grouped heads."""

    def __init__(
        self,
        build: Build,
        spec: AttentionSpec,
        core: AttentionKernel,
        prefetch: Callable[[Tensor, Tensor], None] | None = None,
        sized: Mapping[int, AttentionKernel] = _NO_SIZES,
    ) -> None:
        super().__init__(build, spec, core, prefetch, sized)
        tp = build.groups.tp.size
        self.linear_qkv = build.column(spec.linear_qkv)
        self.linear_proj = build.row(spec.linear_proj)
        self.q_layernorm = build.optional_norm(spec.q_norm)
        self.k_layernorm = build.optional_norm(spec.k_norm)
        shape = spec.core
        self._local_groups, self._d = shape.local_groups(tp), shape.plain_dim
        self._per_group = shape.heads // shape.groups // shape.group_holders(tp)
        self._gated, self._query = spec.gated, self._d + (shape.v_dim if spec.gated else 0)
        self._norms_rotated = spec.norm_after_rotation
        normed, has_positions = spec.q_norm is not None, spec.rotary is not None or spec.alibi is not None
        # Queries and keys with their positions are copies. Norms before that keep their inputs: views of all of qkv.
        self._positions_first = has_positions and (not normed or spec.norm_after_rotation)
        splits = self._positions_first and spec.alibi is None and not spec.gated and shape.qk_dim == shape.v_dim
        self._split = build.kernels.fused.split if splits else None
        self._slopes: Tensor | None = None  # the channels of queries for ALiBi
        if spec.alibi is not None:
            heads = shape.heads // tp
            slopes = spec.alibi.slopes[build.groups.tp.rank * heads :][:heads]
            self._slopes, self._rotary = slope_channels(slopes, build.dtype, build.device), 0
        self._clip, self._clips_apart = spec.clip, normed

    @property
    def readers(self) -> tuple[Reader, ...]:
        """See AttentionLayer."""
        return (self.linear_qkv,)

    def forward(self, x: Tensor, positions: Positions, cache: KeyValueCache | None = None) -> Tensor:
        """See AttentionLayer."""
        qkv = self.linear_qkv(x)  # [s, b, g/tp * (q d + d + v)]
        if not self._clips_apart:
            qkv = self._clipped(qkv)
        s, b, _ = qkv.shape
        tables = self._tables(positions)
        of_queries, of_keys = self._alibi_channels(tables)
        if self._split is not None and tables is not None:
            heads = qkv.view(s, b, self._local_groups, self._per_group + 2, -1)
            q, k, v = split_and_rotate(heads, *tables, interleaved=self._interleaved, kernel=self._split)
            k, v = self._exchanged(_normed(k, self.k_layernorm), v, cache)
            q = _normed(q, self.q_layernorm)
        else:
            heads = qkv.view(s, b, self._local_groups, -1)
            keys = self._per_group * self._query  # where a group's key begins, and then its value
            values = keys + self._d
            k, v = heads[..., keys:values], heads[..., values:]  # [s, b, g/tp, d] and [s, b, g/tp, v]
            k = self._with_positions(k, self.k_layernorm, tables, of_keys)
            if v.requires_grad and self._positions_first:
                v = v.contiguous()  # as a view, v alone would keep all of qkv until backward
            if self._clips_apart:
                v = self._clipped(v)
            k, v = self._exchanged(k, v, cache)
            q = heads[..., :keys].reshape(s, b, -1, self._query)  # [s, b, g/tp * q, d, or d + v with gates]
            if self._gated:
                q, gate = q.split((self._d, self._query - self._d), dim=-1)
                q = _scaled(self._with_positions(q, self.q_layernorm, tables, of_queries), positions)
                attended = self._attend(q, k, v, positions).view(gate.shape)
                return self.linear_proj(sigmoid_gate(attended, gate).flatten(2))
            q = self._with_positions(q, self.q_layernorm, tables, of_queries)
        q = _scaled(q, positions)
        return self.linear_proj(self._attend(q, k, v, positions))

    def _alibi_channels(self, tables: tuple[Tensor, Tensor] | None) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Returns the further channels of queries and of keys, none without ALiBi."""
        return ((), ()) if self._slopes is None or tables is None else ((self._slopes,), tables)

    def _with_positions(
        self, x: Tensor, norm: Norm | None, tables: tuple[Tensor, Tensor] | None, channels: tuple[Tensor, ...]
    ) -> Tensor:
        """[s, b, heads, d] -> the same, normalized and rotated, or with the channels of ALiBi behind it."""
        if norm is not None and not self._norms_rotated:
            x = self._clipped(norm(x))
        if tables is not None:
            x = with_channels(x, channels) if channels else self.rotate(x, *tables, interleaved=self._interleaved)
        return _normed(x, norm) if self._norms_rotated else x

    def _clipped(self, x: Tensor) -> Tensor:
        """x, between the limit and its negative if there is one."""
        return x if self._clip is None else x.clamp(-self._clip, self._clip)


def _scaled(q: Tensor, positions: Positions) -> Tensor:
    """Queries [s, b, heads, d] times the factors of their positions."""
    return q if positions.query_scales is None else q * positions.query_scales


def _normed(x: Tensor, norm: Norm | None) -> Tensor:
    return x if norm is None else norm(x)


class LatentAttention(AttentionLayer):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434).

    r channels per token, which all heads share, are projected up to the keys and values of n heads. A further few
    channels are the rotated part of every head's key. The projections down are replicated; with sequence parallelism
    latents are gathered, and not the wider hidden states. Communication over tp: that of the projections up and of
    `linear_proj`, and of the rotated channels a gather, and in backward the sum.
    """

    def __init__(
        self,
        build: Build,
        spec: LatentAttentionSpec,
        core: AttentionKernel,
        prefetch: Callable[[Tensor, Tensor], None] | None = None,
        sized: Mapping[int, AttentionKernel] = _NO_SIZES,
        *,
        recomputes: bool = False,
    ) -> None:
        """recomputes: backward projects up again (mla_up_proj of --recompute-modules), so that latents are kept and not
        queries, keys and values, which are the largest tensors of the layer."""
        super().__init__(build, spec, core, prefetch, sized)
        if spec.q_down is None:
            self.linear_q_proj = build.column(spec.q_up)
        else:
            self.linear_q_down_proj = build.replicated(spec.q_down)
            self.q_layernorm = build.optional_norm(spec.q_norm)
            self.linear_q_up_proj = build.column(spec.q_up)
        self.linear_kv_down_proj = build.replicated(spec.kv_down)
        self.kv_layernorm = build.optional_norm(spec.kv_norm)
        self.linear_kv_up_proj = build.column(spec.kv_up)
        self.linear_proj = build.row(spec.linear_proj)
        self._latent, self._rotated, self._compressed = spec.latent, spec.rotated, spec.q_down is not None
        self._tp, self._sequence_parallel, self._recomputes = build.groups.tp, build.sequence_parallel, recomputes
        self._absorbs = not build.config.batch_invariant_mode  # in another order of sums than training

    @property
    def readers(self) -> tuple[Reader, ...]:
        """See AttentionLayer."""
        return (self.linear_q_down_proj if self._compressed else self.linear_q_proj, self.linear_kv_down_proj)

    def forward(self, x: Tensor, positions: Positions, cache: KeyValueCache | None = None) -> Tensor:
        """See AttentionLayer."""
        tables = self._tables(positions)
        if self._recomputes and torch.is_grad_enabled():
            q = self.linear_q_down_proj(x) if self._compressed else x
            latents = self.linear_kv_down_proj(x)
            return self.linear_proj(self._attend_to_recomputed(q, latents, tables, positions))
        q = self.readers[0](x)
        latent, shared = self._separate(self.linear_kv_down_proj(x), tables)
        if cache is not None:
            q = self._queries(q, tables, positions)
            return self.linear_proj(self._attend_to_cache(q, latent, shared, positions, cache))
        k, v = self._keys_and_values(latent, shared)
        del latent, shared
        k, v = self._exchanged(k, v, None)
        q = self._queries(q, tables, positions)
        return self.linear_proj(self._attend(q, k, v, positions))

    def _attend_to_cache(
        self, q: Tensor, latent: Tensor, shared: Tensor, positions: Positions, cache: KeyValueCache
    ) -> Tensor:
        """q: of every head. latent, shared: see `_separate`. The cache has one head: LatentAttentionSpec.cached."""
        joined = torch.cat((latent.unsqueeze(2), shared), dim=-1)
        known, _ = cache.append(joined, joined[..., :0])
        # A prompt takes a quarter of the operations with keys and values of every head. Adapters are not absorbed.
        if len(q) > 1 or self.linear_kv_up_proj.lora is not None or not self._absorbs:
            k, v = self._keys_and_values(known[:, :, 0, : self._latent], known[..., self._latent :])
            return self._attend(q, k, v, positions)
        return attend_to_latents(
            q,
            self._rotated,
            known[:, :, 0],
            self.linear_kv_up_proj.weight,
            scores=self._scores,
            segments=_segments_of_keys(positions, known),
            window=self._shape.window,
        )

    def _attend_to_recomputed(
        self, q: Tensor, latents: Tensor, tables: tuple[Tensor, Tensor] | None, positions: Positions
    ) -> Tensor:
        """q: the latents of queries, or the hidden states that they are projected from."""

        def project(q: Tensor, latents: Tensor) -> tuple[Tensor, ...]:
            keys_and_values = self._keys_and_values(*self._separate(latents, tables))
            q = q if self._compressed else self.linear_q_proj(q)
            return self._queries(q, tables, positions), *keys_and_values

        projected = RecomputedOutputs(project, [q, latents], self._rng)
        q, k, v = projected.outputs
        k, v = self._exchanged(k, v, None)
        with projected.dropped():
            return self._attend(q, k, v, positions)

    def _queries(self, x: Tensor, tables: tuple[Tensor, Tensor] | None, positions: Positions) -> Tensor:
        """[s or s/tp, b, channels of the latent], or already projected up -> [s, b, n/tp, qk_dim]."""
        if self._compressed:
            x = self.linear_q_up_proj(x if self.q_layernorm is None else self.q_layernorm(x))
        heads = x.unflatten(-1, (-1, self._shape.qk_dim))
        if tables is not None:
            plain, rotated = heads.split((self._shape.qk_dim - self._rotated, self._rotated), dim=-1)
            heads = torch.cat((plain, self.rotate(rotated, *tables, interleaved=self._interleaved)), dim=-1)
        return _scaled(heads, positions)

    def _separate(self, x: Tensor, tables: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
        """[s or s/tp, b, r + rotated] -> normed latents [s or s/tp, b, r], and the part of keys that all heads share,
        [s, b, 1, rotated]."""
        latent, shared = (part.contiguous() for part in x.split((self._latent, self._rotated), dim=-1))
        del x
        shared = to_shards(shared, self._tp, self._sequence_parallel).unsqueeze(2)
        if tables is not None:
            shared = self.rotate(shared, *tables, interleaved=self._interleaved)
        return latent if self.kv_layernorm is None else self.kv_layernorm(latent), shared

    def _keys_and_values(self, latent: Tensor, shared: Tensor) -> tuple[Tensor, Tensor]:
        """Projects what `_separate` returns up to keys [s, b, n/tp, qk_dim] and values [s, b, n/tp, v_dim]."""
        plain = self._shape.qk_dim - self._rotated
        heads = self.linear_kv_up_proj(latent).unflatten(-1, (-1, plain + self._shape.v_dim))
        k, v = heads.split((plain, self._shape.v_dim), dim=-1)
        k = torch.cat((k, shared.expand(-1, -1, k.shape[2], -1)), dim=-1)
        return k, v.contiguous()  # as a view it would keep the keys, too, until backward
