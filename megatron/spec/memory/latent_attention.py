"""The memory of multi-head latent attention (LatentAttention in core/transformer/attention.py), event by event."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from megatron.spec.latent_attention import LatentAttentionSpec
from megatron.spec.memory.attention import AttentionLayerMemory
from megatron.spec.memory.linear import LinearMemory
from megatron.spec.memory.norm import NormMemory
from megatron.spec.memory.trace import (
    ATTENTION,
    ATTN_PROJ,
    BACKWARD,
    CORE_ATTN,
    NORMS,
    QKV_LINEAR,
    WORK,
    MemoryTrace,
    Profile,
    profile_of,
)
from megatron.spec.norm import NormSpec
from megatron.spec.sizes import Sizes


class LatentMemory(AttentionLayerMemory):
    """The projections down to latents and up from them. input_kind: of the memory that the first ones read.

    up_again: the projections up are computed again in backward, so that latents are kept.
    """

    def __init__(
        self, spec: LatentAttentionSpec, sizes: Sizes, *, again: bool, up_again: bool, input_kind: str
    ) -> None:
        super().__init__(spec, sizes, again=again)
        self._rotates = spec.rotary is not None
        self._keys_down = LinearMemory(spec.kv_down, sizes, (input_kind, ATTENTION))
        self._keys_norm, kind = _latent_norm(spec.kv_norm, sizes, QKV_LINEAR)
        self._keys_up = LinearMemory(spec.kv_up, sizes, (kind, ATTENTION))
        # Queries that are not rotated are what their projection returns.
        self._queries_up = LinearMemory(spec.q_up, sizes, (input_kind, ATTENTION), CORE_ATTN)
        self._queries_down: LinearMemory | None = None
        self._queries_norm: NormMemory | None = None
        if spec.q_down is not None:
            self._queries_norm, kind = _latent_norm(spec.q_norm, sizes, CORE_ATTN)
            self._queries_up = LinearMemory(spec.q_up, sizes, (kind, ATTENTION), CORE_ATTN)
            keeper = QKV_LINEAR if spec.q_norm is None else CORE_ATTN
            self._queries_down = LinearMemory(spec.q_down, sizes, (input_kind, ATTENTION), keeper)
        self._latent = sizes.rows * spec.latent * sizes.e
        # The channels of keys that all heads share: of this rank's part of the sequence, and of all of it.
        self._part, self._shared = (tokens * spec.rotated * sizes.e for tokens in (sizes.rows, sizes.tokens))
        self._rotated = self._heads.queries * spec.rotated // spec.core.qk_dim
        self._region = profile_of(self._project_up) if up_again else None

    @property
    def readers(self) -> tuple[LinearMemory, ...]:
        """See AttentionLayerMemory."""
        return (self._queries_down or self._queries_up, self._keys_down)

    def project(self, trace: MemoryTrace) -> None:
        """See AttentionLayerMemory."""
        if self._region is None:
            super().project(trace)
            return
        for linear in (self._queries_down, self._keys_down):
            if linear is not None:
                linear.forward(trace)

    def forward(self, trace: MemoryTrace) -> None:
        """See AttentionLayerMemory."""
        if self._region is not None:
            self._forward_to_recompute(trace, self._region)
            return
        self._keys_and_values(trace)
        self._core.start(trace)
        self._queries(trace)
        self._core.forward(trace, ATTN_PROJ)
        self._proj.forward(trace)
        if not self._core.keeps_queries:
            trace.free(ATTENTION, self._heads.queries, CORE_ATTN)

    def _forward_to_recompute(self, trace: MemoryTrace, region: Profile) -> None:
        """Keeps the latents, and what the core keeps in addition to its arguments."""
        trace.replay(region)
        trace.take(ATTENTION, self._keys_down.out)
        self._core.start(trace)
        self._core.forward(trace, ATTN_PROJ)
        trace.replay(Profile(_negative(region.net), {}, "", _negative(region.parts)))
        trace.free(ATTENTION, self._keys_down.out)
        self._proj.forward(trace)

    def _make_again(self, trace: MemoryTrace) -> None:
        """See AttentionLayerMemory."""
        if self._region is not None:
            trace.replay(self._region)
            core = self._core
            self._release(trace, queries=not core.keeps_queries, keys=not core.keeps_keys, values=not core.keeps_values)

    def end_layer(self, trace: MemoryTrace) -> None:
        """See AttentionLayerMemory."""
        if self._region is None:
            super().end_layer(trace)

    def _project_up(self, trace: MemoryTrace) -> None:
        """The region between the projections down and the core."""
        self._keys_and_values(trace)
        if self._queries_down is None:
            self._queries_up.forward(trace)
        self._queries(trace)

    def _keys_and_values(self, trace: MemoryTrace) -> None:
        trace.take(ATTENTION, self._latent, QKV_LINEAR)
        trace.take(ATTENTION, self._part)
        trace.free(ATTENTION, self._keys_down.out)
        trace.take(ATTENTION, self._shared)
        trace.free(ATTENTION, self._part)
        trace.use(WORK, 2 * self._shared if self._rotates else 0)
        if self._keys_norm is not None:
            self._keys_norm.forward(trace)
        self._keys_up.forward(trace)
        trace.take(ATTENTION, self._heads.keys, CORE_ATTN)
        trace.take(ATTENTION, self._heads.values, CORE_ATTN)
        trace.free(ATTENTION, self._keys_up.out + self._shared)

    def _queries(self, trace: MemoryTrace) -> None:
        if self._queries_norm is not None:
            self._queries_norm.forward(trace)
        if self._queries_down is not None:
            self._queries_up.forward(trace)
        if self._rotates:
            trace.use(ATTENTION, self._heads.queries + self._rotated)

    def backward(self, trace: MemoryTrace, grad: int) -> None:
        """See AttentionLayerMemory."""
        self._core_backward(trace, grad)
        if self._rotates:
            trace.use(BACKWARD, self._heads.queries + self._rotated)
        self._core.finish(trace)
        if self._queries_down is not None:
            self._up_backward(trace, self._queries_up, self._queries_norm)
        trace.take(BACKWARD, self._shared)
        trace.take(BACKWARD, self._keys_up.out)
        trace.free(BACKWARD, self._heads.pairs)
        self._up_backward(trace, self._keys_up, self._keys_norm)
        trace.take(BACKWARD, self._keys_down.out)
        trace.free(BACKWARD, self._latent + self._shared)

    def _up_backward(self, trace: MemoryTrace, up: LinearMemory, norm: NormMemory | None) -> None:
        """From the gradient of a projection's output to that of the latent, which is freed."""
        up.backward(trace)
        if norm is not None:
            norm.backward(trace)
            trace.free(ATTENTION, norm.out)


def _negative(sizes: Mapping[str, int]) -> dict[str, int]:
    return {name: -size for name, size in sizes.items()}


def _latent_norm(spec: NormSpec | None, sizes: Sizes, part: str) -> tuple[NormMemory | None, str]:
    """The norm of a latent, whose statistics count to `part`, and the kind of the memory that is projected up."""
    if spec is None:
        return None, ATTENTION
    return NormMemory(spec, dataclasses.replace(sizes, h=spec.size, r=sizes.e), part, QKV_LINEAR), NORMS
