"""Products of rows with one matrix, or with the matrices of their experts, in tiles of one shape: the products of
--batch-invariant-mode (ops/batch_invariant/gemm.py).

Libraries choose tiles, and the number of programs that share a sum, by the number of rows. Here a row is always in a
tile of ROWS rows, and one program adds up its terms in ascending order, so its bits do not depend on the other rows or
on their number. Triton compiles a function again for numbers of rows that are 1 or multiples of 16; it is kept from
that.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.kernels.ops.assignments import Assignments

# Rows, columns and terms of a tile. The tensor cores of Hopper take 64 rows at a time; more would be in vain where a few
# tokens are decoded.
ROWS, COLUMNS, TERMS = 64, 128, 64
WIDE_COLUMNS, WIDE_TERMS = 64, 32  # of elements of four bytes
STAGES, WARPS = 3, 4


@triton.jit(do_not_specialize=["rows"])
def _product(
    a_ptr, b_ptr, bias_ptr, out_ptr, ends_ptr, rows, experts, n, k, a_row, b_expert, b_term, b_column, out_row,
    WITH_BIAS: tl.constexpr, EXPERTS: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TERMS: tl.constexpr,
):  # fmt: skip
    """EXPERTS: a power of two, at least `experts`; 0 for one matrix, whose rows are all."""
    tile, column_tile = tl.program_id(0), tl.program_id(1)
    start, stop, expert = tile * ROWS, rows, 0
    if EXPERTS > 0:
        number = tl.arange(0, EXPERTS)
        ends = tl.load(ends_ptr + number, mask=number < experts, other=0)
        starts = tl.load(ends_ptr + number - 1, mask=(number > 0) & (number < experts), other=0)
        tiles = tl.cdiv(ends - starts, ROWS)
        expert = tl.sum((tl.cumsum(tiles, 0) <= tile).to(tl.int32), 0)
        before = tl.sum(tl.where(number < expert, tiles, 0), 0)
        stop = tl.load(ends_ptr + expert, mask=expert < experts, other=0)
        first = tl.load(ends_ptr + expert - 1, mask=(expert > 0) & (expert < experts), other=0)
        start = first + (tile - before) * ROWS
    if start < stop:
        row, column = start + tl.arange(0, ROWS), column_tile * COLUMNS + tl.arange(0, COLUMNS)
        of_row, of_column = (row < stop)[:, None], (column < n)[None, :]
        term = tl.arange(0, TERMS)
        a_at = a_ptr + row.to(tl.int64)[:, None] * a_row + term[None, :]
        b_at = b_ptr + expert * b_expert + term.to(tl.int64)[:, None] * b_term + column.to(tl.int64)[None, :] * b_column
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for done in range(0, k, TERMS):
            inside = term < k - done
            a = tl.load(a_at, mask=of_row & inside[None, :], other=0.0)
            b = tl.load(b_at, mask=of_column & inside[:, None], other=0.0)
            total = tl.dot(a, b, total, input_precision=PRECISION)
            a_at += TERMS
            b_at += TERMS * b_term
        if WITH_BIAS:
            total += tl.load(bias_ptr + column, mask=column < n, other=0.0).to(tl.float32)[None, :]
        place = out_ptr + row.to(tl.int64)[:, None] * out_row + column[None, :]
        tl.store(place, total.to(out_ptr.dtype.element_ty), mask=of_row & of_column)


class TileProduct:
    """A RowProduct of tiles of one shape."""

    def __init__(self, matrix: Tensor, bias: Tensor | None = None) -> None:
        """matrix [in, out] with any strides; bias [out]."""
        self._matrix, self._bias = matrix, bias

    @property
    def columns(self) -> int:
        """Number of columns of the result."""
        return self._matrix.shape[1]

    def __call__(self, x: Tensor, out: Tensor) -> None:
        """Writes the product of x [n, in] into `out` [n, out]. Not differentiable."""
        _launch(x, self._matrix.unsqueeze(0), self._bias, out, None)


def grouped(values: Tensor, matrices: Tensor, assignments: Assignments) -> Tensor:
    """A GroupedGemm."""
    out = values.new_empty(values.shape[0], matrices.shape[-1])
    _launch(values, matrices, None, out, assignments.ends)
    return out


def _launch(x: Tensor, matrices: Tensor, bias: Tensor | None, out: Tensor, ends: Tensor | None) -> None:
    x = x if x.stride(1) == 1 else x.contiguous()
    assert out.stride(1) == 1, out.stride()
    (rows, n), (experts, k) = out.shape, matrices.shape[:2]
    if not out.numel():
        return
    # Each expert may have one tile that is not full.
    tiles = triton.cdiv(rows, ROWS) if ends is None else rows // ROWS + experts
    columns, terms = (WIDE_COLUMNS, WIDE_TERMS) if x.dtype == torch.float32 else (COLUMNS, TERMS)
    _product[(tiles, triton.cdiv(n, columns))](
        x, matrices, x if bias is None else bias, out, x if ends is None else ends,
        rows, experts, n, k, x.stride(0), *matrices.stride(), out.stride(0),
        bias is not None, 0 if ends is None else triton.next_power_of_2(experts), precision(x.dtype),
        ROWS, columns, terms, num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip


def precision(dtype: torch.dtype) -> str:
    """Returns how operands of this dtype are multiplied: not rounded to TF32."""
    return "ieee" if dtype == torch.float32 else "tf32"
