"""What self-attention takes and frees: core/transformer/attention.py and the kernels it chooses, event by event."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from megatron.config.model import ModelConfig
from megatron.config.recompute import CORE_ATTN
from megatron.planner.product_memory import LinearMemory
from megatron.planner.sizes import ATTENTION, BACKWARD, COMMUNICATION, FP32, MASK, NORMS, WORK, Sizes
from megatron.planner.tally import Tally
from megatron.spec.work_space import ATTENTION_MATRIX

FUSED, UNFUSED = "fused", "unfused"


@dataclass(frozen=True)
class KernelMemory:
    """Bytes. kept: what the kernel keeps beside its arguments and its output. forward, backward: its work space.

    keeps_queries, keeps_keys, keeps_values: it keeps those as they are given, and no copies. strided: its
    output is in the order of its own dims.
    """

    kept: int
    forward: int = 0
    backward: int = 0
    keeps_queries: bool = True
    keeps_keys: bool = True
    keeps_values: bool = True
    strided: bool = True


def kernel_memory(model: ModelConfig, sizes: Sizes, keys: int, comm_type: str) -> KernelMemory:
    """Of the kernel that the run will have. keys: how many a query of this rank meets at once.

    Fused kernels keep one number a query and head, not the matrix of probabilities (Dao et al., arXiv 2205.14135). torch's
    for the CPU knows no dropout; then, as in the reference, the matrix is kept: of the softmax, and with dropout of its
    factors and of the product. Both of those work on copies of keys (and values) for every query head.
    """
    lse = sizes.tokens * sizes.heads * FP32
    if sizes.cp > 1 and comm_type != "a2a":  # keys and values are kept as one tensor
        fp32 = FP32 // sizes.e
        forward = fp32 * 2 * sizes.queries
        backward = forward + fp32 * 4 * sizes.keys
        if model.attention_dropout:
            largest, in_backward = _dropped_at_once(sizes, comm_type)
            forward, backward = forward + 3 * FP32 * largest, backward + 5 * FP32 * in_backward
        return KernelMemory(lse + 2 * sizes.keys, forward, backward, True, False, False, strided=False)
    matrix = sizes.b * sizes.heads * sizes.s * keys  # elements
    dropout = model.attention_dropout > 0
    if model.attention_backend == UNFUSED:
        rounded = sizes.e if sizes.e < FP32 else 0
        kept = matrix * (FP32 + rounded + (2 * sizes.e if dropout else 0)) + 2 * sizes.queries + sizes.s * keys * MASK
        return KernelMemory(kept, FP32 * matrix, 2 * FP32 * matrix, True, False, False, strided=False)
    width = FP32 if sizes.target.wide else sizes.e
    wide = width // sizes.e
    if dropout and sizes.target.cpu:
        repeated = sizes.queries * wide if sizes.groups < sizes.heads else 0
        kept = 3 * matrix * width + 2 * sizes.queries * wide + (repeated or (wide > 1) * sizes.keys * wide)
        whole = not repeated and wide == 1
        return KernelMemory(kept, matrix * width, 2 * matrix * width, False, False, whole, strided=False)
    if wide > 1:  # fp32 copies of queries, keys, values and output
        return KernelMemory(lse + wide * 2 * (sizes.queries + sizes.keys), wide * sizes.queries, 0, False, False, False)
    return KernelMemory(lse)


class AttentionMemory:
    """From the layer's first norm to the output of the projection."""

    def __init__(
        self, model: ModelConfig, sizes: Sizes, comm_type: str, modules: frozenset[str], *, split: bool
    ) -> None:
        self._sizes, self._rope = sizes, sizes.rotary > 0
        self._qk_norm, self._rms = model.qk_layernorm, model.normalization == "RMSNorm"
        fusion = model.gradient_accumulation_fusion
        heads, groups, d = sizes.heads, sizes.groups, sizes.d
        qkv_features = (heads + 2 * groups) * d
        self.qkv = LinearMemory(
            sizes, (NORMS, ATTENTION), sizes.h, qkv_features, True, fusion, model.qkv_bias, put_off=split
        )
        keys = sizes.s * (sizes.cp if comm_type in ("all_gather", "a2a") else 1)
        first = kernel_memory(model, sizes, keys, comm_type)
        # Computed again in backward, all that is left of it until then are its arguments.
        self._kernel = dataclasses.replace(KernelMemory(0, first.forward + first.kept), strided=first.strided)
        self._again: KernelMemory | None = first
        if CORE_ATTN not in modules:
            self._kernel, self._again = first, None
        strided = first.strided and not sizes.target.wide
        self._proj = LinearMemory(
            sizes, (ATTENTION, WORK), heads * d, sizes.h, False, fusion, model.add_bias_linear, strided, put_off=split
        )
        self._exchanged = _exchanged(sizes, comm_type)
        # Gathered beside the backward of the layer's MLP (core/context_parallel/all_gather.py).
        self.early = self._exchanged if comm_type == "all_gather" else 0
        # A view of the fused product where queries lie together: with one group, or one query a group.
        self._copied = sizes.queries if 1 < groups < heads else 0
        self._changed = self._rope or self._qk_norm  # what the kernel gets are tensors of their own
        self._copies_values = self._rope and not self._qk_norm

    def project(self, tally: Tally) -> None:
        """The fused product of queries, keys and values."""
        self.qkv.forward(tally)

    def forward(self, tally: Tally) -> None:
        """The rest. Leaves the output as work space."""
        sizes, kernel = self._sizes, self._kernel
        self._turn(tally, sizes.keys)
        tally.take(ATTENTION, self._given_values)
        tally.take(ATTENTION, self._copied)
        self._turn(tally, sizes.queries)
        if self._rope and not self._qk_norm:
            tally.free(ATTENTION, self._copied)
        tally.take(COMMUNICATION, self._exchanged)
        tally.take(ATTENTION, kernel.kept + sizes.queries)
        tally.brief(WORK, kernel.forward)
        tally.free(COMMUNICATION, self._exchanged)
        self._proj.forward(tally)
        if not kernel.keeps_queries:
            tally.free(ATTENTION, self._given_queries)
        if not self._keeps_fused and self._copies_values:
            tally.free(ATTENTION, self.qkv.out)

    def end_layer(self, tally: Tally) -> None:
        """Keys and values as they went into the kernel live as long as the layer's function."""
        if not self._kernel.keeps_keys:
            tally.free(ATTENTION, self._given_keys)
        if not self._kernel.keeps_values:
            tally.free(ATTENTION, self._given_values)
        if not self._keeps_fused and not self._copies_values:
            tally.free(ATTENTION, self.qkv.out)

    def backward(self, tally: Tally, grad: int) -> None:
        """As LinearMemory's, from the output to the fused product of queries, keys and values."""
        sizes, kernel = self._sizes, self._kernel
        self._proj.backward(tally, grad)  # frees the attended, as the projection's input
        if self._again is not None:
            tally.take(ATTENTION, self._again.kept + self._made_again)
            tally.brief(WORK, self._again.forward)
        gradients = sizes.queries + 2 * sizes.keys
        wide = FP32 // sizes.e if sizes.target.wide else 1
        widened = wide * sizes.queries if wide > 1 else 0
        tally.take(BACKWARD, widened)
        tally.take(COMMUNICATION, self._exchanged - self.early)
        tally.brief(WORK, (self._again or kernel).backward)
        tally.take(BACKWARD, wide * gradients)
        tally.free(COMMUNICATION, self._exchanged)
        tally.free(BACKWARD, widened + sizes.queries)
        tally.free(ATTENTION, kernel.kept)
        if self._again is not None:
            tally.free(ATTENTION, self._again.kept + self._made_again)
        tally.free(ATTENTION, self._given_queries if kernel.keeps_queries else 0)
        tally.free(ATTENTION, self._given_keys if kernel.keeps_keys else 0)
        tally.free(ATTENTION, self._given_values if kernel.keeps_values else 0)
        if self._keeps_fused and not self._qk_norm:
            tally.free(ATTENTION, self.qkv.out)
        if wide > 1:
            tally.take(BACKWARD, gradients)
            tally.free(BACKWARD, wide * gradients)
        self._gather_gradients(tally)
        if self._qk_norm:
            tally.free(ATTENTION, self._copied + self.qkv.out)

    def _gather_gradients(self, tally: Tally) -> None:
        """From the gradients of queries, keys and values to that of the fused product: one of its size for each, added."""
        sizes, fused = self._sizes, self.qkv.out
        self._turn_back(tally, sizes.queries)
        tally.take(BACKWARD, fused)
        tally.free(BACKWARD, sizes.queries)
        self._turn_back(tally, sizes.keys)
        for _ in range(2):
            tally.brief(BACKWARD, fused)
            tally.free(BACKWARD, sizes.keys)

    def _turn(self, tally: Tally, size: int) -> None:
        """Norm and rotation of queries or keys of this size. Leaves what comes of it."""
        if self._qk_norm:
            tally.take(ATTENTION, self._statistics(size) + size)
        if self._rope:
            tally.take(ATTENTION, size)
            tally.brief(WORK, self._half(size))
            if self._qk_norm:
                tally.free(ATTENTION, size)

    def _turn_back(self, tally: Tally, size: int) -> None:
        if self._rope:
            tally.take(BACKWARD, size)
            tally.brief(WORK, self._half(size))
            tally.free(BACKWARD, size)
        if self._qk_norm:
            tally.brief(WORK, (4 if self._sizes.e < FP32 else 3) * FP32 * (size // self._sizes.e))
            tally.free(ATTENTION, self._statistics(size))

    def _half(self, size: int) -> int:
        """Bytes of one product of the rotation."""
        return size * (self._sizes.rotary // 2) // self._sizes.d

    def _statistics(self, size: int) -> int:
        """Bytes that the norm of queries or keys keeps, with its input where that is no view of the fused product."""
        rows = size // self._sizes.e // self._sizes.d
        return rows * FP32 * (1 if self._rms else 2)

    @property
    def _made_again(self) -> int:
        """Bytes of the output that a second run makes: a fused kernel keeps it, plain products end before it."""
        return self._sizes.queries if self._again is not None and self._again.strided else 0

    @property
    def _given_queries(self) -> int:
        """Bytes of the queries that the kernel gets, when they are no view of the fused product."""
        return self._sizes.queries if self._changed else self._copied

    @property
    def _given_keys(self) -> int:
        return self._sizes.keys if self._changed else 0

    @property
    def _given_values(self) -> int:
        return self._sizes.keys if self._copies_values else 0

    @property
    def _keeps_fused(self) -> bool:
        """Whether something that is kept is a view of the fused product: the norms' inputs, values, or all."""
        views = not self._changed and self._kernel.keeps_queries
        return self._qk_norm or (self._kernel.keeps_values and not self._copies_values) or views


def _dropped_at_once(sizes: Sizes, comm_type: str) -> tuple[int, int]:
    """Probabilities of the largest block, in forward and in backward, where plain torch drops them."""
    own = sizes.b * sizes.heads * sizes.s**2
    if comm_type == "all_gather":
        largest = min(max(own, own * (sizes.cp - 1) // 2), ATTENTION_MATRIX)
        return largest, largest
    if comm_type == "a2a+p2p":  # at most: longer blocks of fewer heads
        own *= sizes.cp
    return min(own, ATTENTION_MATRIX), min(own // 2, ATTENTION_MATRIX)  # a ring's backward has its own block in parts


def _exchanged(sizes: Sizes, comm_type: str) -> int:
    """Keys and values of other ranks that are here at once: those of a ring's step and of the next, or all of them."""
    if sizes.cp == 1:
        return 0
    if comm_type == "p2p":
        return 4 * sizes.keys
    if comm_type == "all_gather":
        return 2 * sizes.cp * sizes.keys
    return 2 * (sizes.queries + sizes.keys)  # of the heads that are exchanged: queries, keys, values, output
