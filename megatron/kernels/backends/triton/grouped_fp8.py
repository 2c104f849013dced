"""Products of quantized rows with the quantized matrices of their experts, in one launch: the interface of
GroupedProduct in ops/fp8/grouped.py.

A program computes a tile of one expert's result. It finds its expert by the ends of the experts' rows, which lie on the
device: there are as many programs as any division of the rows into experts can need, and those without a tile return.
Every 128 terms of a sum are added up by the tensor cores, which keep about 14 bits of it on Hopper, and then added in
fp32, with the scales of their blocks (DeepSeek-V3, arXiv 2412.19437, section 3.3.2).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from megatron.kernels.ops.assignments import Assignments
from megatron.kernels.ops.fp8.grouped import ExpertStack
from megatron.kernels.ops.fp8.quantize import Quantized

# Rows, columns and terms of a tile; a tile lies within one block of scales of a matrix.
ROWS, COLUMNS, TERMS = 128, 128, 128
STAGES, WARPS = 4, 8


@triton.jit
def _product(
    a_ptr, picked_ptr, a_inverse_ptr, b_ptr, b_inverse_ptr, out_ptr, ends_ptr, experts, n, k, b_expert, b_row,
    a_inverse_row, a_inverse_block, b_inverse_expert, b_inverse_row,
    PICK: tl.constexpr, BLOCKS: tl.constexpr, WHOLE: tl.constexpr, EXPERTS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TERMS: tl.constexpr,
):  # fmt: skip
    """EXPERTS: a power of two, at least `experts`. BLOCKS: scales of blocks, else of whole tensors. WHOLE: k is a
    multiple of TERMS."""
    across = tl.cdiv(n, COLUMNS)
    tile, column_tile = tl.program_id(0) // across, tl.program_id(0) % across
    number = tl.arange(0, EXPERTS)
    ends = tl.load(ends_ptr + number, mask=number < experts, other=0)
    starts = tl.load(ends_ptr + number - 1, mask=(number > 0) & (number < experts), other=0)
    tiles = tl.cdiv(ends - starts, ROWS)
    expert = tl.sum((tl.cumsum(tiles, 0) <= tile).to(tl.int32), 0)
    if expert < experts:
        before = tl.sum(tl.where(number < expert, tiles, 0), 0)
        stop = tl.load(ends_ptr + expert)
        start = tl.load(ends_ptr + expert - 1, mask=expert > 0, other=0) + (tile - before) * ROWS
        row, column = start + tl.arange(0, ROWS), column_tile * COLUMNS + tl.arange(0, COLUMNS)
        # Rows and columns beyond the last one read that again, and are not written.
        of_a, of_b = tl.minimum(row, stop - 1).to(tl.int64), tl.minimum(column, n - 1).to(tl.int64)
        if PICK:
            of_a = tl.load(picked_ptr + of_a)
        term = tl.arange(0, TERMS)
        a_at = a_ptr + of_a[:, None] * k + term[None, :]
        b_at = b_ptr + expert.to(tl.int64) * b_expert + of_b[None, :] * b_row + term[:, None]
        a_inverse_at = a_inverse_ptr + of_a * a_inverse_row
        b_inverse_at = b_inverse_ptr + expert * b_inverse_expert + column_tile * b_inverse_row
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for first in range(0, k, TERMS):
            if WHOLE:
                a, b = tl.load(a_at), tl.load(b_at)
            else:
                inside = term < k - first
                a = tl.load(a_at, mask=inside[None, :], other=0.0)
                b = tl.load(b_at, mask=inside[:, None], other=0.0)
            part = tl.dot(a, b)
            if BLOCKS:
                scales = tl.load(a_inverse_at) * tl.load(b_inverse_at)
                total += part * scales[:, None]
                a_inverse_at += a_inverse_block
                b_inverse_at += 1
            else:
                total += part
            a_at += TERMS
            b_at += TERMS
        if not BLOCKS:
            total *= tl.load(a_inverse_ptr) * tl.load(b_inverse_ptr)
        place = out_ptr + row.to(tl.int64)[:, None] * n + column[None, :]
        tl.store(place, total.to(out_ptr.dtype.element_ty), mask=(row < stop)[:, None] & (column < n)[None, :])


def multiply(a: Quantized, picked: Tensor | None, b: ExpertStack, out: Tensor, assignments: Assignments) -> None:
    """Multiplies the rows of each expert by its matrix, in FP8. See GroupedProduct.

    With scales of blocks, rows and columns of the matrices must be multiples of 128.
    """
    (rows, n), k, blocks = out.shape, a.data.shape[1], a.block is not None
    matrices = b.by_expert(b.quantized.data)
    inverse, scales = a.inverse, b.quantized.inverse
    strides = (0, 0, 0, 0)
    if blocks:
        assert n % COLUMNS == k % TERMS == 0
        scales = b.by_expert(scales)
        # Of matrices that are side by side, the factors of one row of blocks lie next to each other, too.
        strides = (inverse.stride(0), inverse.stride(1), scales.stride(0), scales.stride(1))
    _product[((rows // ROWS + b.experts) * triton.cdiv(n, COLUMNS),)](
        a.data, assignments.ends if picked is None else picked, inverse, matrices, scales, out,
        assignments.ends, b.experts, n, k,
        matrices.stride(0), matrices.stride(1), *strides,
        picked is not None, blocks, k % TERMS == 0, triton.next_power_of_2(b.experts), ROWS, COLUMNS, TERMS,
        num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
