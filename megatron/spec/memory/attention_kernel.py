"""The memory of the attention kernels of whole sequences (kernels/ops/attention.py), in bytes."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from megatron.spec.attention import CoreSpec
from megatron.spec.buckets import round_up
from megatron.spec.sizes import FP32, INT32, MASK, Sizes
from megatron.spec.work_space import ATTENTION_MATRIX

_FLASH_CHANNELS = 32  # FlashAttention pads heads to a multiple of it


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
    """Bytes of a rank's queries, keys, values and output. number: of query heads."""

    number: int
    queries: int
    keys: int
    values: int
    output: int

    @property
    def pairs(self) -> int:
        """Bytes of keys and values."""
        return self.keys + self.values

    @property
    def repeated_pairs(self) -> int:
        """Bytes of keys and values with a head per query head."""
        return self.queries + self.output


def heads_of(core: CoreSpec, sizes: Sizes) -> Heads:
    """Heads of one of `sizes.tp` ranks."""
    number, groups, element = core.heads // sizes.tp, core.local_groups(sizes.tp), sizes.tokens * sizes.e
    queries, output = number * core.qk_dim * element, number * core.v_dim * element
    return Heads(number, queries, groups * core.qk_dim * element, groups * core.v_dim * element, output)


def kernel_memory(core: CoreSpec, sizes: Sizes, heads: Heads) -> KernelMemory:
    """The memory of the kernel of whole sequences that a run of these sizes has.

    Fused kernels keep one number a query and head, not the matrix of probabilities (Dao et al., arXiv 2205.14135).
    torch's for the CPU knows no dropout; then, as in the reference, the matrix is kept: of the softmax, and with
    dropout of its factors and of the product. Both of those work on copies of keys (and values) for every query head.
    No fused kernel caps scores: plain torch computes some queries at a time, and the reference keeps the hyperbolic
    tangents, too. Documents are a mask where the matrix is kept, and else see `_packed_memory`.
    """
    dropout, capped = core.dropout > 0, core.softcap is not None
    if needs_padding(core, sizes):
        return _padded_memory(core, sizes, heads)
    lse = sizes.tokens * heads.number * FP32
    keys = sizes.s * (sizes.cp if sizes.comm_type == "a2a" else 1)  # of the sequence
    matrix = sizes.b * heads.number * sizes.s * keys  # elements
    masked = keys * keys * (sizes.b if sizes.documents else 1)  # elements of the mask
    if sizes.unfused_attention:
        rounded = sizes.e if sizes.e < FP32 else 0
        kept = (
            matrix * (FP32 + rounded + (2 * sizes.e if dropout else 0) + (FP32 if capped else 0))
            + heads.repeated_pairs
            + masked * MASK
        )
        return KernelMemory(kept, FP32 * matrix, 2 * FP32 * matrix, True, False, False, strided=False)
    if capped or (core.has_sinks and dropout):
        return _rows_memory(heads, sizes, matrix, lse, dropout=dropout)
    if core.has_sinks:
        return _block_memory(core, sizes, heads, lse)
    wide = FP32 // sizes.e if sizes.target.wide or (dropout and sizes.target.cpu) else 1
    if dropout and sizes.target.cpu:
        width = FP32  # torch takes copies of halves, too
        repeated = heads.output * wide if heads.keys < heads.queries else 0
        kept = 3 * matrix * width + 2 * heads.queries * wide + (repeated or (wide > 1) * heads.values * wide)
        whole = not repeated and wide == 1
        return KernelMemory(kept, matrix * width, matrix * width, False, False, whole, strided=False)
    if wide > 1:  # fp32 copies of queries, keys, values and output; the output of documents is put together
        copies = wide * (heads.queries + heads.pairs + heads.output)
        return KernelMemory(lse + copies, wide * heads.output, 0, False, False, False)
    if sizes.documents:
        return _packed_memory(core, heads, sizes, lse)
    if heads.keys < heads.queries and sizes.e == FP32 and not sizes.target.cpu:
        # The memory-efficient kernel, which gets keys and values of every query head.
        return KernelMemory(lse + heads.repeated_pairs, keeps_keys=False, keeps_values=False, keeps_output=True)
    backward = flash_backward(core, sizes, heads, heads.queries, heads.output, heads.repeated_pairs)
    return KernelMemory(lse, backward=backward, keeps_output=True)


def needs_padding(core: CoreSpec, sizes: Sizes) -> bool:
    """Whether the kernel takes heads of one size alone, and gets narrower ones padded with zeros: torch's for the
    CPU."""
    plain = core.dropout > 0 or core.softcap is not None or sizes.unfused_attention
    return sizes.target.cpu and core.qk_dim != core.v_dim and not plain


def padded_heads(core: CoreSpec, heads: Heads) -> tuple[CoreSpec, Heads]:
    """Returns the core with as many channels in queries, keys and values, and its heads."""
    width = max(core.qk_dim, core.v_dim)
    queries, keys = (nbytes * width // core.qk_dim for nbytes in (heads.queries, heads.keys))
    return dataclasses.replace(core, qk_dim=width, v_dim=width), Heads(heads.number, queries, keys, keys, queries)


def _padded_memory(core: CoreSpec, sizes: Sizes, heads: Heads) -> KernelMemory:
    """The memory of a kernel that gets padded heads: copies of the narrow ones, and a wide output beside the result."""
    equal, wide = padded_heads(core, heads)
    kernel = kernel_memory(equal, sizes, wide)
    narrow_keys, narrow_values = core.qk_dim < equal.qk_dim, core.v_dim < equal.v_dim
    kept = kernel.kept
    kept += narrow_keys * (kernel.keeps_queries * wide.queries + kernel.keeps_keys * wide.keys)
    kept += narrow_values * (kernel.keeps_values * wide.values + kernel.keeps_output * wide.output)
    width = FP32 // sizes.e if sizes.target.wide else 1
    gradients = width * (wide.queries + wide.pairs + narrow_values * wide.output)  # before they are cut
    return KernelMemory(
        kept,
        kernel.forward + narrow_values * (not kernel.keeps_output) * wide.output,
        kernel.backward + gradients,
        keeps_queries=kernel.keeps_queries and not narrow_keys,
        keeps_keys=kernel.keeps_keys and not narrow_keys,
        keeps_values=kernel.keeps_values and not narrow_values,
        keeps_output=kernel.keeps_output and not narrow_values,
        strided=kernel.strided and not narrow_values,
    )


def flash_backward(core: CoreSpec, sizes: Sizes, heads: Heads, queries: int, output: int, repeated: int) -> int:
    """Bytes of work space of a fused kernel's backward, besides the gradients.

    queries, output: bytes of the queries and of their results. repeated: bytes of the keys and values that they see,
    with one head per query head.

    torch's flash attention for CPUs copies the output's gradient into the order of samples. On CUDA FlashAttention-2
    adds up the gradient of the queries in fp32, with a number per query and head, and of grouped heads makes the
    gradients of keys and values for every query head (Dao, arXiv 2307.08691; mha_bwd of its CUDA interface).
    """
    if sizes.target.cpu:
        return output if sizes.b > 1 else 0
    if sizes.e == FP32:
        return 0
    elements = queries // sizes.e
    channels = round_up(core.qk_dim, _FLASH_CHANNELS)
    numbers = elements // core.qk_dim * (channels + 1)
    return FP32 * numbers + (repeated if heads.keys < heads.queries else 0)


def _packed_memory(core: CoreSpec, heads: Heads, sizes: Sizes, lse: int) -> KernelMemory:
    """The memory of documents without a mask (kernels/ops/attention_packed.py).

    Several samples are copied into one row. FlashAttention on CUDA takes halves, and all documents at once. Other
    kernels take one document after the other and keep the output of each, which are put together afterwards; that for
    fp32 on CUDA gets keys and values of every query head.
    """
    one = sizes.b == 1
    copied = 0 if one else heads.queries
    if not sizes.target.cpu and sizes.e < FP32 and not core.has_sinks:
        kept = lse + copied + (0 if one else heads.pairs)
        backward = flash_backward(core, sizes, heads, heads.queries, heads.output, heads.repeated_pairs)
        return KernelMemory(kept, 0, backward, one, one, one, keeps_output=True)
    repeated = heads.keys < heads.queries and not sizes.target.cpu and not core.has_sinks
    pairs = heads.repeated_pairs if repeated else 0 if one else heads.pairs
    as_given = one and not repeated
    return KernelMemory(lse + heads.output + copied + pairs, 0, 0, one, as_given, as_given)


def _block_memory(core: CoreSpec, sizes: Sizes, heads: Heads, lse: int) -> KernelMemory:
    """The memory of a kernel of blocks that is given a whole sequence, because of sinks. The output is in fp32 while
    they are added, and so is its product with its gradient."""
    fp32 = FP32 // sizes.e
    copies = fp32 * (heads.queries + heads.pairs) if sizes.target.wide else 0
    wide_output = fp32 * heads.output if fp32 > 1 else 0
    if sizes.documents:
        packed = _packed_memory(core, heads, sizes, lse)
        return dataclasses.replace(packed, forward=packed.forward + copies)
    backward = flash_backward(core, sizes, heads, heads.queries, heads.output, heads.repeated_pairs)
    of_sinks = fp32 * heads.output + wide_output
    return KernelMemory(
        lse,
        wide_output + copies,
        max(of_sinks - heads.queries - heads.pairs, backward + copies + (wide_output if copies else 0)),
        keeps_output=True,
    )


def _rows_memory(heads: Heads, sizes: Sizes, matrix: int, lse: int, *, dropout: bool) -> KernelMemory:
    """The memory of plain torch, some queries at a time (kernels/ops/attention_rows.py). matrix: probabilities in all.

    Backward holds weights, slopes and a gradient of some rows, with dropout also its factors; of halves fp32 copies of
    keys, values and those rows.
    """
    once, fp32 = min(matrix, ATTENTION_MATRIX), FP32 // sizes.e
    rows = heads.queries + 2 * heads.output  # of queries, of the output and of its gradient
    copies = heads.pairs + rows * once // matrix if fp32 > 1 else 0
    forward = fp32 * (2 * heads.output + copies) + 3 * FP32 * once
    backward = fp32 * (2 * heads.queries + 2 * heads.pairs + copies) + (4 if dropout else 3) * FP32 * once
    return KernelMemory(lse + (INT32 if dropout else 0), forward, backward, keeps_output=True, strided=False)
