"""The memory of multi-head latent attention (LatentAttention in core/transformer/attention.py), event by event."""

from __future__ import annotations

import dataclasses
import functools

from megatron.spec.latent_attention import LatentAttentionSpec
from megatron.spec.memory.attention_kernel import heads_of
from megatron.spec.memory.context_parallel import core_memory
from megatron.spec.memory.core_attention import ComputedAgain, CoreAttentionMemory
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
)
from megatron.spec.norm import NormSpec
from megatron.spec.sizes import Sizes


class LatentMemory:
    """From the input of the projections down to the output of the last one. See AttentionMemory for the arguments and
    the methods."""

    def __init__(self, spec: LatentAttentionSpec, sizes: Sizes, *, again: bool, input_kind: str) -> None:
        self._rotates = spec.rotary is not None
        self._heads = heads = heads_of(spec.core, sizes)
        core = core_memory(spec.core, sizes, heads, copies_queries=False)
        self._core: CoreAttentionMemory = ComputedAgain(core) if again else core
        strided = core.strided and not sizes.target.wide
        self._proj = LinearMemory(spec.linear_proj, sizes, (ATTENTION, WORK), strided=strided)
        self._shares_output = self._core.keeps_output and not sizes.split_backward
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
        self._rotated = heads.queries * spec.rotated // spec.core.qk_dim

    @property
    def saves_output(self) -> bool:
        """See AttentionMemory."""
        return self._core.keeps_output

    @property
    def early(self) -> int:
        """See AttentionMemory."""
        return self._core.early

    @property
    def readers(self) -> tuple[LinearMemory, ...]:
        """See AttentionMemory."""
        return (self._queries_down or self._queries_up, self._keys_down)

    def project(self, trace: MemoryTrace) -> None:
        """The layers that read the hidden states."""
        for linear in self.readers:
            linear.forward(trace)

    def forward(self, trace: MemoryTrace) -> None:
        """From latents to queries, keys and values; then the core and the output projection, whose result is left as
        work space."""
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
        self._core.start(trace)
        if self._queries_norm is not None:
            self._queries_norm.forward(trace)
        if self._queries_down is not None:
            self._queries_up.forward(trace)
        if self._rotates:
            trace.use(ATTENTION, self._heads.queries + self._rotated)
        self._core.forward(trace, ATTN_PROJ)
        self._proj.forward(trace)
        if not self._core.keeps_queries:
            trace.free(ATTENTION, self._heads.queries, CORE_ATTN)

    def end_layer(self, trace: MemoryTrace) -> None:
        """Keys and values as the kernel gets them live as long as the layer's function."""
        if not self._core.keeps_keys:
            trace.free(ATTENTION, self._heads.keys, CORE_ATTN)
        if not self._core.keeps_values:
            trace.free(ATTENTION, self._heads.values, CORE_ATTN)

    def backward(self, trace: MemoryTrace, grad: int) -> None:
        """From the gradient of the output, of `grad` bytes, to those of what `readers` return."""
        self._proj.backward(trace, grad)  # frees the attended, as the projection's input
        shared = self._heads.output if self._shares_output else 0  # the core keeps it, too
        trace.take(ATTENTION, shared)
        self._core.backward(trace, functools.partial(self._release, trace))
        trace.free(ATTENTION, shared)
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

    def _release(self, trace: MemoryTrace, *, queries: bool, keys: bool, values: bool) -> None:
        """Frees what was kept for the core, see core_attention.py."""
        trace.free(ATTENTION, self._heads.queries if queries else 0)
        trace.free(ATTENTION, self._heads.keys if keys else 0)
        trace.free(ATTENTION, self._heads.values if values else 0)


def _latent_norm(spec: NormSpec | None, sizes: Sizes, part: str) -> tuple[NormMemory | None, str]:
    """The norm of a latent, whose statistics count to `part`, and the kind of the memory that is projected up."""
    if spec is None:
        return None, ATTENTION
    return NormMemory(spec, dataclasses.replace(sizes, h=spec.size, r=sizes.e), part, QKV_LINEAR), NORMS
