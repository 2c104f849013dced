"""The memory of self-attention (core/transformer/attention.py) and of the kernels it chooses, event by event."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from megatron.spec.attention import AttentionSpec
from megatron.spec.memory.linear import LinearMemory
from megatron.spec.memory.norm import row_statistics, shifted_weight
from megatron.spec.memory.trace import (
    ATTENTION,
    ATTN_PROJ,
    BACKWARD,
    COMMUNICATION,
    CORE_ATTN,
    WORK,
    MemoryTrace,
)
from megatron.spec.norm import NormSpec
from megatron.spec.sizes import FP32, INT32, MASK, Sizes
from megatron.spec.work_space import ATTENTION_MATRIX


@dataclass(frozen=True)
class KernelMemory:
    """Bytes. kept: by the kernel, besides its arguments and its output. forward, backward: its work space.

    keeps_queries, keeps_keys, keeps_values: it keeps those as they are given, and no copies. keeps_output: it keeps the
    output as it returns it. strided: its output is in the order of its own dims.
    """

    kept: int
    forward: int = 0
    backward: int = 0
    keeps_queries: bool = True
    keeps_keys: bool = True
    keeps_values: bool = True
    keeps_output: bool = False
    strided: bool = True


@dataclass(frozen=True)
class Heads:
    """Bytes of a rank's queries, and of its keys; values take as much as keys. number: of query heads."""

    number: int
    queries: int
    keys: int


def heads_of(spec: AttentionSpec, sizes: Sizes) -> Heads:
    """Heads of one of `sizes.tp` ranks."""
    number, width = spec.heads // sizes.tp, sizes.tokens * spec.head_dim * sizes.e
    return Heads(number, number * width, spec.local_groups(sizes.tp) * width)


def kernel_memory(spec: AttentionSpec, sizes: Sizes) -> KernelMemory:
    """The memory of the kernel that a run of these sizes has.

    Fused kernels keep one number a query and head, not the matrix of probabilities (Dao et al., arXiv 2205.14135). torch's
    for the CPU knows no dropout; then, as in the reference, the matrix is kept: of the softmax, and with dropout of its
    factors and of the product. Both of those work on copies of keys (and values) for every query head. No fused kernel
    caps scores: plain torch computes some queries at a time, and the reference keeps the hyperbolic tangents, too.
    Documents are a mask where the matrix is kept, and else see `_packed_memory`.
    """
    heads, dropout, capped = heads_of(spec, sizes), spec.dropout > 0, spec.softcap is not None
    lse = sizes.tokens * heads.number * FP32
    if sizes.cp > 1 and sizes.comm_type != "a2a":  # keys and values are kept as one tensor
        fp32 = FP32 // sizes.e
        forward = fp32 * 2 * heads.queries
        backward = forward + fp32 * 4 * heads.keys
        if dropout or capped:
            largest, in_backward = _weights_at_once(heads.number, sizes)
            forward, backward = forward + 3 * FP32 * largest, backward + (5 if dropout else 3) * FP32 * in_backward
        whole = not (sizes.unfused_attention or sizes.target.wide)
        return KernelMemory(
            lse + 2 * heads.keys, forward, backward, True, False, False, keeps_output=whole, strided=False
        )
    keys = sizes.s * (sizes.cp if sizes.comm_type in ("all_gather", "a2a") else 1)  # that a query meets at once
    matrix = sizes.b * heads.number * sizes.s * keys  # elements
    masked = keys * keys * (sizes.b if sizes.documents else 1)  # elements of the mask
    if sizes.unfused_attention:
        rounded = sizes.e if sizes.e < FP32 else 0
        kept = (
            matrix * (FP32 + rounded + (2 * sizes.e if dropout else 0) + (FP32 if capped else 0))
            + 2 * heads.queries
            + masked * MASK
        )
        return KernelMemory(kept, FP32 * matrix, 2 * FP32 * matrix, True, False, False, strided=False)
    if capped:
        return _rows_memory(heads, sizes, matrix, lse, dropout=dropout)
    width = FP32 if sizes.target.wide else sizes.e
    wide = width // sizes.e
    if dropout and sizes.target.cpu:
        repeated = heads.queries * wide if heads.keys < heads.queries else 0
        kept = 3 * matrix * width + 2 * heads.queries * wide + (repeated or (wide > 1) * heads.keys * wide)
        whole = not repeated and wide == 1
        return KernelMemory(kept, matrix * width, 2 * matrix * width, False, False, whole, strided=False)
    if wide > 1:  # fp32 copies of queries, keys, values and output; the output of documents is put together
        copies = wide * 2 * (heads.queries + heads.keys)
        return KernelMemory(lse + copies, wide * heads.queries, 0, False, False, False)
    if sizes.documents:
        return _packed_memory(heads, sizes, lse)
    if heads.keys < heads.queries and sizes.e == FP32 and not sizes.target.cpu:
        # The memory-efficient kernel, which gets keys and values of every query head.
        return KernelMemory(lse + 2 * heads.queries, keeps_keys=False, keeps_values=False, keeps_output=True)
    return KernelMemory(lse, keeps_output=True)


def _packed_memory(heads: Heads, sizes: Sizes, lse: int) -> KernelMemory:
    """The memory of documents without a mask (kernels/ops/attention_packed.py).

    Several samples are copied into one row. FlashAttention on CUDA takes halves, and all documents at once. Other kernels
    take one document after the other and keep the output of each, which are put together afterwards; that for fp32 on CUDA
    gets keys and values of every query head.
    """
    one = sizes.b == 1
    copied = 0 if one else heads.queries
    if not sizes.target.cpu and sizes.e < FP32:
        kept = lse + copied + (0 if one else 2 * heads.keys)
        return KernelMemory(kept, 0, 0, one, one, one, keeps_output=True)
    repeated = heads.keys < heads.queries and not sizes.target.cpu
    pairs = 2 * heads.queries if repeated else 0 if one else 2 * heads.keys
    as_given = one and not repeated
    return KernelMemory(lse + heads.queries + copied + pairs, 0, 0, one, as_given, as_given)


def _rows_memory(heads: Heads, sizes: Sizes, matrix: int, lse: int, *, dropout: bool) -> KernelMemory:
    """The memory of plain torch, some queries at a time (kernels/ops/attention_rows.py). matrix: probabilities in all.

    Backward holds weights, slopes and a gradient of some rows, with dropout also its factors; of halves fp32 copies of keys,
    values and those rows.
    """
    once, fp32 = min(matrix, ATTENTION_MATRIX), FP32 // sizes.e
    copies = 2 * heads.keys + 3 * heads.queries * once // matrix if fp32 > 1 else 0
    forward = fp32 * (2 * heads.queries + copies) + 3 * FP32 * once
    backward = fp32 * (2 * heads.queries + 4 * heads.keys + copies) + (4 if dropout else 3) * FP32 * once
    return KernelMemory(lse + (INT32 if dropout else 0), forward, backward, keeps_output=True, strided=False)


class AttentionMemory:
    """From the input of the fused projection to the output of the other one.

    again: attention between its projections is computed again in backward. input_kind: of the memory that it reads.
    """

    def __init__(self, spec: AttentionSpec, sizes: Sizes, *, again: bool, input_kind: str) -> None:
        self._spec, self._sizes, self._rope = spec, sizes, spec.rotary is not None
        self._heads = heads = heads_of(spec, sizes)
        self._qk_norm = spec.q_norm is not None
        self.qkv = LinearMemory(spec.linear_qkv, sizes, (input_kind, ATTENTION), CORE_ATTN)
        self._changed = self._rope or self._qk_norm  # what the kernel gets are tensors of their own
        first = kernel_memory(spec, sizes)
        if sizes.unfused_attention and not self._changed and spec.local_groups(sizes.tp) == 1 < heads.number:
            # Plain GEMMs cannot read queries of one group as a view of the fused projection.
            first = dataclasses.replace(first, kept=first.kept + heads.queries, keeps_queries=False)
        self._kernel, self._again = first, None if not again else first
        if again:  # until then only its arguments are left of it
            self._kernel = dataclasses.replace(KernelMemory(0, first.forward + first.kept), strided=first.strided)
        strided = first.strided and not sizes.target.wide
        self._proj = LinearMemory(spec.linear_proj, sizes, (ATTENTION, WORK), strided=strided)
        self._exchanged = _exchanged(heads, sizes)
        # Gathered while the backward of the layer's MLP runs (core/context_parallel/all_gather.py).
        self.early = self._exchanged if sizes.comm_type == "all_gather" else 0
        # A view of the fused projection where queries lie together: with one group, or one query per group.
        self._copied = heads.queries if spec.local_groups(sizes.tp) > 1 and heads.keys < heads.queries else 0
        self._copies_values = self._rope and not self._qk_norm

    @property
    def saves_output(self) -> bool:
        """Whether the kernel, and not only the projection, keeps the attention's output."""
        return self._kernel.keeps_output

    def project(self, trace: MemoryTrace) -> None:
        """The fused projection to queries, keys and values."""
        self.qkv.forward(trace)

    def forward(self, trace: MemoryTrace) -> None:
        """The rest. Leaves the output as work space."""
        kernel = self._kernel
        self._turn(trace, self._spec.k_norm, self._heads.keys)
        trace.take(ATTENTION, self._given_values, CORE_ATTN)
        trace.take(ATTENTION, self._copied, CORE_ATTN)
        self._turn(trace, self._spec.q_norm, self._heads.queries)
        if self._rope and not self._qk_norm:
            trace.free(ATTENTION, self._copied, CORE_ATTN)
        trace.take(COMMUNICATION, self._exchanged)
        trace.take(ATTENTION, kernel.kept, CORE_ATTN)
        trace.take(ATTENTION, self._heads.queries, ATTN_PROJ)
        trace.use(WORK, kernel.forward)
        trace.free(COMMUNICATION, self._exchanged)
        self._proj.forward(trace)
        if not kernel.keeps_queries:
            trace.free(ATTENTION, self._given_queries, CORE_ATTN)
        if not self._keeps_fused and self._copies_values:
            trace.free(ATTENTION, self.qkv.out, CORE_ATTN)

    def end_layer(self, trace: MemoryTrace) -> None:
        """Keys and values as the kernel gets them live as long as the layer's function."""
        if not self._kernel.keeps_keys:
            trace.free(ATTENTION, self._given_keys, CORE_ATTN)
        if not self._kernel.keeps_values:
            trace.free(ATTENTION, self._given_values, CORE_ATTN)
        if not self._keeps_fused and not self._copies_values:
            trace.free(ATTENTION, self.qkv.out, CORE_ATTN)

    def backward(self, trace: MemoryTrace, grad: int) -> None:
        """As LinearMemory's, from the output to the result of the fused projection."""
        sizes, kernel = self._sizes, self._kernel
        self._proj.backward(trace, grad)  # frees the attended, as the projection's input
        if self._again is not None:
            trace.take(ATTENTION, self._again.kept + self._made_again)
            trace.use(WORK, self._again.forward)
        gradients = self._heads.queries + 2 * self._heads.keys
        wide = FP32 // sizes.e if sizes.target.wide else 1
        widened = wide * self._heads.queries if wide > 1 else 0
        trace.take(BACKWARD, widened)
        trace.take(COMMUNICATION, self._exchanged - self.early)
        trace.use(WORK, (self._again or kernel).backward)
        trace.take(BACKWARD, wide * gradients)
        trace.free(COMMUNICATION, self._exchanged)
        trace.free(BACKWARD, widened + self._heads.queries)
        trace.free(ATTENTION, kernel.kept)
        if self._again is not None:
            trace.free(ATTENTION, self._again.kept + self._made_again)
        trace.free(ATTENTION, self._given_queries if kernel.keeps_queries else 0)
        trace.free(ATTENTION, self._given_keys if kernel.keeps_keys else 0)
        trace.free(ATTENTION, self._given_values if kernel.keeps_values else 0)
        if self._keeps_fused and not self._qk_norm:
            trace.free(ATTENTION, self.qkv.out)
        if wide > 1:
            trace.take(BACKWARD, gradients)
            trace.free(BACKWARD, wide * gradients)
        self._gather_gradients(trace)
        if self._qk_norm:
            trace.free(ATTENTION, self._copied + self.qkv.out)

    def _gather_gradients(self, trace: MemoryTrace) -> None:
        """From the gradients of queries, keys and values to that of the fused projection: one of its size for each,
        added."""
        fused = self.qkv.out
        self._turn_back(trace, self._spec.q_norm, self._heads.queries)
        trace.take(BACKWARD, fused)
        trace.free(BACKWARD, self._heads.queries)
        self._turn_back(trace, self._spec.k_norm, self._heads.keys)
        for _ in range(2):
            trace.use(BACKWARD, fused)
            trace.free(BACKWARD, self._heads.keys)

    def _turn(self, trace: MemoryTrace, norm: NormSpec | None, size: int) -> None:
        """Norm and rotation of queries or keys of this size. Leaves the result."""
        if norm is not None:
            trace.take(ATTENTION, self._statistics(norm, size) + size, CORE_ATTN)
        if self._rope:
            trace.take(ATTENTION, size, CORE_ATTN)
            trace.use(WORK, self._half(size))
            if norm is not None:
                trace.free(ATTENTION, size, CORE_ATTN)

    def _turn_back(self, trace: MemoryTrace, norm: NormSpec | None, size: int) -> None:
        if self._rope:
            trace.take(BACKWARD, size)
            trace.use(WORK, self._half(size))
            trace.free(BACKWARD, size)
        if norm is not None:
            trace.use(WORK, (4 if self._sizes.e < FP32 else 3) * FP32 * (size // self._sizes.e))
            trace.free(ATTENTION, self._statistics(norm, size))

    def _half(self, size: int) -> int:
        """Bytes of one product of the rotation."""
        channels = 0 if self._spec.rotary is None else self._spec.rotary.channels
        return size * (channels // 2) // self._spec.head_dim

    def _statistics(self, norm: NormSpec, size: int) -> int:
        """Bytes that the norm of queries or keys keeps besides its input."""
        rows = size // self._sizes.e // norm.local_channels(self._sizes.tp)
        return rows * row_statistics(norm, self._sizes) + shifted_weight(norm, self._sizes)

    @property
    def _made_again(self) -> int:
        """Bytes of the output that a second run makes: a fused kernel keeps it, plain GEMMs end before it."""
        return (
            self._heads.queries if self._again is not None and (self._again.strided or self._again.keeps_output) else 0
        )

    @property
    def _given_queries(self) -> int:
        """Bytes of the queries that the kernel gets, when they are no view of the fused projection."""
        return self._heads.queries if self._changed else self._copied

    @property
    def _given_keys(self) -> int:
        return self._heads.keys if self._changed else 0

    @property
    def _given_values(self) -> int:
        return self._heads.keys if self._copies_values else 0

    @property
    def _keeps_fused(self) -> bool:
        """Whether something that is kept is a view of the fused projection: the norms' inputs, values, or all."""
        views = not self._changed and self._kernel.keeps_queries
        return self._qk_norm or (self._kernel.keeps_values and not self._copies_values) or views


def _weights_at_once(heads: int, sizes: Sizes) -> tuple[int, int]:
    """Probabilities of the largest block, in forward and in backward, where plain torch computes them."""
    own = sizes.b * heads * sizes.s**2
    if sizes.comm_type == "all_gather":
        largest = min(max(own, own * (sizes.cp - 1) // 2), ATTENTION_MATRIX)
        return largest, largest
    if sizes.comm_type == "a2a+p2p":  # at most: longer blocks of fewer heads
        own *= sizes.cp
    return min(own, ATTENTION_MATRIX), min(own // 2, ATTENTION_MATRIX)  # a ring's backward has its own block in parts


def _exchanged(heads: Heads, sizes: Sizes) -> int:
    """Keys and values of other ranks that are here at once: those of a ring's step and of the next, or all of them."""
    if sizes.cp == 1:
        return 0
    if sizes.comm_type == "p2p":
        return 4 * heads.keys
    if sizes.comm_type == "all_gather":
        return 2 * sizes.cp * heads.keys
    return 2 * (heads.queries + heads.keys)  # of the heads that are exchanged: queries, keys, values, output
