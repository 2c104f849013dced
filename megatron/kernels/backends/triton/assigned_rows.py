"""The rows of assignments, and the sums of each row's assignments: the interface of ops/assignments.py's RowKernels."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.kernels.backends.triton.rows import as_rows
from megatron.kernels.ops.assignments import RowOrder

CHANNELS = 2048  # of a program; a warp takes 16 bytes of half precision for each of its threads at a time


@triton.jit
def _gather(rows_ptr, of_ptr, out_ptr, width, row_stride, CHANNELS: tl.constexpr):
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(of_ptr + place)
    column = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside = column < width
    tl.store(out_ptr + place * width + column, tl.load(rows_ptr + row * row_stride + column, mask=inside), mask=inside)


@triton.jit
def _sum(values_ptr, order_ptr, starts_ptr, out_ptr, count, width, CHANNELS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside = column < width
    start = tl.load(starts_ptr + row)
    stop = tl.load(starts_ptr + row + 1, mask=row + 1 < tl.num_programs(0), other=count)
    total = tl.zeros((CHANNELS,), tl.float32)
    for place in range(start, stop):
        value = tl.load(order_ptr + place)
        total += tl.load(values_ptr + value * width + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * width + column, total.to(out_ptr.dtype.element_ty), mask=inside)


def gather(rows: Tensor, of: Tensor) -> Tensor:
    """rows [M, h], of [A] int64 -> the rows of these numbers, [A, h]."""
    width = rows.shape[1]
    rows, out = as_rows(rows, width), rows.new_empty(len(of), width)
    if out.numel():
        channels = _channels(width)
        grid = len(of), triton.cdiv(width, channels)
        _gather[grid](rows, of, out, width, rows.stride(0), channels, num_warps=_warps(channels))
    return out


def add_up(values: Tensor, by_row: RowOrder) -> Tensor:
    """values [A, h] of assignments -> their sum for each row, [M, h]: in ascending order of the experts, in fp32, and
    rounded once."""
    width = values.shape[1]
    out = torch.empty(len(by_row.starts), width, dtype=values.dtype, device=values.device)
    if out.numel():
        channels = _channels(width)
        _sum[(len(out), triton.cdiv(width, channels))](
            values.contiguous(), by_row.order, by_row.starts, out, len(by_row.order), width, channels,
            num_warps=_warps(channels),
        )  # fmt: skip
    return out


def _channels(width: int) -> int:
    return min(CHANNELS, triton.next_power_of_2(width))


def _warps(channels: int) -> int:
    return max(1, channels // 256)
