"""The sum of squares of a flat tensor in one pass over memory: the interface of ops/square_sum.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.spec.buckets import NORM_ROW

ROWS, TILES, WARPS = 64, 8, 4  # rows of a tile, tiles that a program goes through, and its warps


@triton.jit
def _square_sums(x_ptr, sums_ptr, n, ROW: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    total = tl.zeros((ROWS,), tl.float64)
    for tile in range(TILES):
        rows = (program * TILES + tile) * ROWS + tl.arange(0, ROWS)
        place = rows[:, None] * ROW + tl.arange(0, ROW)[None, :]
        x = tl.load(x_ptr + place, mask=place < n, other=0.0).to(tl.float32)
        total += tl.sum(x * x, 1).to(tl.float64)
    tl.store(sums_ptr + program, tl.sum(total, 0))


def square_sum(x: Tensor) -> Tensor:
    """Returns the sum of the squares of x as fp64 []; adds the elements of a row in another order than plain torch
    does.

    See SquareSum.
    """
    flat = x.contiguous().view(-1)
    sums = torch.empty(triton.cdiv(flat.numel(), NORM_ROW * ROWS * TILES), dtype=torch.float64, device=x.device)
    if len(sums):
        _square_sums[(len(sums),)](flat, sums, flat.numel(), NORM_ROW, ROWS, TILES, num_warps=WARPS)
    return sums.sum()
