"""The memory of self-attention (core/transformer/attention.py) and of the kernels it chooses, event by event."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod

from megatron.spec.attention import AttentionSpec
from megatron.spec.latent_attention import LatentAttentionSpec
from megatron.spec.memory.attention_kernel import heads_of
from megatron.spec.memory.context_parallel import core_memory
from megatron.spec.memory.core_attention import ComputedAgain, CoreAttentionMemory
from megatron.spec.memory.linear import LinearMemory
from megatron.spec.memory.norm import row_statistics, shifted_weight
from megatron.spec.memory.trace import (
    ATTENTION,
    ATTN_PROJ,
    BACKWARD,
    CORE_ATTN,
    WORK,
    MemoryTrace,
)
from megatron.spec.norm import NormSpec
from megatron.spec.sizes import FP32, Sizes


class AttentionLayerMemory(ABC):
    """From the input of the projections before the core to the output of the one behind it.

    again: attention between its projections is computed again in backward. copies_queries: the core cannot read queries
    as they are, and keeps a copy. gated: the output of the core is multiplied by a gate.
    """

    def __init__(
        self,
        spec: AttentionSpec | LatentAttentionSpec,
        sizes: Sizes,
        *,
        again: bool,
        copies_queries: bool = False,
        gated: bool = False,
    ) -> None:
        self._heads = heads = heads_of(spec.core, sizes)
        core = core_memory(spec.core, sizes, heads, copies_queries=copies_queries)
        self._core: CoreAttentionMemory = ComputedAgain(core) if again else core
        strided = core.strided and not sizes.target.wide and not gated
        self._proj = LinearMemory(spec.linear_proj, sizes, (ATTENTION, WORK), strided=strided)
        # The core keeps the output that the projection reads, too.
        self._shared_output = heads.output if self._core.keeps_output and not sizes.split_backward else 0
        self._gates, self._wide = heads.output if gated else 0, heads.output // sizes.e * FP32

    @property
    def saves_output(self) -> bool:
        """Whether the kernel, and not only the projection, keeps the attention's output."""
        return self._core.keeps_output

    @property
    def early(self) -> int:
        """Bytes that are in use from the beginning of the layer's backward, before that of its MLP."""
        return self._core.early

    @property
    @abstractmethod
    def readers(self) -> tuple[LinearMemory, ...]:
        """The linear layers that read the hidden states, in the order of the forward."""

    def project(self, trace: MemoryTrace) -> None:
        """The layers that read the hidden states."""
        for linear in self.readers:
            linear.forward(trace)

    @abstractmethod
    def forward(self, trace: MemoryTrace) -> None:
        """Core attention and the output projection, whose result is left as work space."""

    def end_layer(self, trace: MemoryTrace) -> None:
        """Keys and values as the kernel gets them live as long as the layer's function."""
        if not self._core.keeps_keys:
            trace.free(ATTENTION, self._given_keys, CORE_ATTN)
        if not self._core.keeps_values:
            trace.free(ATTENTION, self._given_values, CORE_ATTN)

    @abstractmethod
    def backward(self, trace: MemoryTrace, grad: int) -> None:
        """From the gradient of the output, of `grad` bytes (see LinearMemory), to those of what `readers` return."""

    def _core_backward(self, trace: MemoryTrace, grad: int) -> None:
        """From the gradient of the output to those of queries, keys and values."""
        self._proj.backward(trace, grad)  # frees the attended, as the projection's input, or their product with gates
        if self._gates:
            trace.use(WORK, self._gates + 3 * self._wide)
            trace.take(BACKWARD, self._gates)
            trace.free(ATTENTION, 0 if self._core.keeps_output else self._gates)
        self._make_again(trace)
        shared = self._gates if self._gates and self._core.keeps_output else self._shared_output
        trace.take(ATTENTION, 0 if self._gates else shared)
        self._core.backward(trace, functools.partial(self._release, trace))
        trace.free(ATTENTION, shared)

    def _make_again(self, trace: MemoryTrace) -> None:
        """Computes queries, keys and values again if they were not kept. By default they were."""
        return

    def _release(self, trace: MemoryTrace, *, queries: bool, keys: bool, values: bool) -> None:
        """Frees what was kept for the core, see core_attention.py."""
        trace.free(ATTENTION, self._given_queries if queries else 0)
        trace.free(ATTENTION, self._given_keys if keys else 0)
        trace.free(ATTENTION, self._given_values if values else 0)

    @property
    def _given_queries(self) -> int:
        """Bytes of the queries that the kernel gets, where they are a tensor of their own."""
        return self._heads.queries

    @property
    def _given_keys(self) -> int:
        return self._heads.keys

    @property
    def _given_values(self) -> int:
        return self._heads.values


class AttentionMemory(AttentionLayerMemory):
    """The fused projection of grouped heads. input_kind: of the memory that it reads."""

    def __init__(self, spec: AttentionSpec, sizes: Sizes, *, again: bool, input_kind: str) -> None:
        self._spec, self._sizes, self._rope = spec, sizes, spec.rotary is not None
        self._qk_norm = spec.q_norm is not None
        self._has_channels = spec.alibi is not None  # of positions, in copies of queries and keys
        self._copies = self._rope or self._has_channels
        # The norms keep their inputs: views of the fused projection, or rotated copies.
        self._after_rotation = spec.norm_after_rotation
        self._norms_views = self._qk_norm and not self._after_rotation
        self._changed = self._copies or self._qk_norm  # what the kernel gets are tensors of their own
        groups, heads = spec.core.local_groups(sizes.tp), heads_of(spec.core, sizes)
        # Plain GEMMs cannot read queries of one group as a view of the fused projection.
        copied = sizes.unfused_attention and not self._changed and groups == 1 < heads.number
        super().__init__(spec, sizes, again=again, copies_queries=copied, gated=spec.gated)
        self.qkv = LinearMemory(spec.linear_qkv, sizes, (input_kind, ATTENTION), CORE_ATTN)
        # A view of the fused projection where queries lie together: with one group, or one query per group. With gates,
        # queries and gates are copied together.
        self._copied = heads.queries + self._gates if groups > 1 and heads.keys < heads.queries else 0
        self._clips = spec.clip is not None
        # Of values alone, or with the queries and keys that norms do not copy.
        self._copies_values = self._clips if self._norms_views else self._copies
        self._clipped_fused = self.qkv.out if self._clips and not self._qk_norm else 0

    @property
    def readers(self) -> tuple[LinearMemory, ...]:
        """See AttentionLayerMemory."""
        return (self.qkv,)

    def forward(self, trace: MemoryTrace) -> None:
        """See AttentionLayerMemory. Clipping keeps its input."""
        trace.take(ATTENTION, self._clipped_fused, CORE_ATTN)
        self._turn(trace, self._spec.k_norm, self._heads.keys)
        trace.take(ATTENTION, self._given_values, CORE_ATTN)
        self._core.start(trace)
        trace.take(ATTENTION, self._copied, CORE_ATTN)
        self._turn(trace, self._spec.q_norm, self._heads.queries)
        if self._copies and not self._norms_views and not self._gates:
            trace.free(ATTENTION, self._copied, CORE_ATTN)
        self._core.forward(trace, ATTN_PROJ)
        if self._gates:
            trace.use(WORK, 2 * self._wide)
            trace.take(ATTENTION, self._gates, ATTN_PROJ)
        self._proj.forward(trace)
        if not self._core.keeps_queries:
            trace.free(ATTENTION, self._given_queries, CORE_ATTN)
        if not self._keeps_fused and self._copies_values:
            trace.free(ATTENTION, self.qkv.out, CORE_ATTN)

    def end_layer(self, trace: MemoryTrace) -> None:
        """See AttentionLayerMemory."""
        super().end_layer(trace)
        if not self._keeps_fused and not self._copies_values:
            trace.free(ATTENTION, self.qkv.out, CORE_ATTN)

    def backward(self, trace: MemoryTrace, grad: int) -> None:
        """See AttentionLayerMemory."""
        self._core_backward(trace, grad)
        if self._keeps_fused and not self._norms_views:
            trace.free(ATTENTION, self.qkv.out)
        if self._gates and not self._norms_views:
            trace.free(ATTENTION, self._copied)
        self._gather_gradients(trace)
        if self._norms_views:
            trace.free(ATTENTION, self._copied + self.qkv.out)

    def _gather_gradients(self, trace: MemoryTrace) -> None:
        """From the gradients of queries, keys and values to that of the fused projection: one of its size for each,
        added."""
        fused, together = self.qkv.out, self._heads.queries + self._gates
        self._turn_back(trace, self._spec.q_norm, self._heads.queries)
        trace.use(BACKWARD, together if self._gates else 0)
        trace.take(BACKWARD, fused)
        trace.free(BACKWARD, together)
        self._core.finish(trace)
        self._turn_back(trace, self._spec.k_norm, self._heads.keys)
        for nbytes in (self._heads.keys, self._heads.values):
            trace.use(BACKWARD, fused)
            trace.free(BACKWARD, nbytes)
        if self._clipped_fused:
            trace.use(BACKWARD, fused)
            trace.free(ATTENTION, fused)

    def _turn(self, trace: MemoryTrace, norm: NormSpec | None, size: int) -> None:
        """Norm and rotation of queries or keys of this size. Leaves the result."""
        if norm is not None and not self._after_rotation:
            trace.take(ATTENTION, self._statistics(norm, size) + size + self._behind(norm, size), CORE_ATTN)
        if self._copies:
            trace.take(ATTENTION, size, CORE_ATTN)
            trace.use(WORK, self._half(size))
            if self._norms_views:
                trace.free(ATTENTION, size, CORE_ATTN)
        if norm is not None and self._after_rotation:
            trace.take(ATTENTION, self._statistics(norm, size) + size + self._behind(norm, size), CORE_ATTN)

    def _turn_back(self, trace: MemoryTrace, norm: NormSpec | None, size: int) -> None:
        if norm is not None and self._after_rotation:
            self._norm_back(trace, norm, size, size)
        if self._rope:
            trace.take(BACKWARD, size)
            trace.use(WORK, self._half(size))
            trace.free(BACKWARD, size)
        if norm is not None and not self._after_rotation:
            self._norm_back(trace, norm, size, 0)

    def _norm_back(self, trace: MemoryTrace, norm: NormSpec, size: int, kept: int) -> None:
        """kept: bytes of an input of its own."""
        trace.free(ATTENTION, self._behind(norm, size))
        trace.use(WORK, (4 if self._sizes.e < FP32 else 3) * FP32 * (size // self._sizes.e))
        trace.free(ATTENTION, self._statistics(norm, size) + kept)

    def _half(self, size: int) -> int:
        """Bytes of one product of the rotation."""
        channels = 0 if self._spec.rotary is None else self._spec.rotary.channels
        return size * (channels // 2) // self._spec.core.qk_dim

    def _behind(self, norm: NormSpec, size: int) -> int:
        """Bytes of the norm's output that clipping keeps, and that the product with a weight for every head keeps."""
        return size * (self._clips + norm.per_head)

    def _statistics(self, norm: NormSpec, size: int) -> int:
        """Bytes that the norm of queries or keys keeps besides its input."""
        channels = norm.size if norm.per_head else norm.local_channels(self._sizes.tp)
        rows = size // self._sizes.e // channels
        return rows * row_statistics(norm, self._sizes) + shifted_weight(norm, self._sizes)

    @property
    def _given_queries(self) -> int:
        """Bytes of the queries that the kernel gets, when they are no view of the fused projection."""
        return self._heads.queries if self._changed else self._copied

    @property
    def _given_keys(self) -> int:
        return self._heads.keys if self._changed else 0

    @property
    def _given_values(self) -> int:
        return self._heads.values if self._copies_values else 0

    @property
    def _keeps_fused(self) -> bool:
        """Whether something that is kept is a view of the fused projection: the norms' inputs, values, or all."""
        views = not self._changed and self._core.keeps_queries
        gates = self._gates > 0 and not self._copied
        return self._norms_views or gates or (self._core.keeps_values and not self._copies_values) or views
