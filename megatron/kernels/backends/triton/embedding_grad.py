"""The gradient of an embedding, added to the rows that were looked up: the interface of ops/embedding_grad.py.

See [Note: sum of equal rows] there. A bag is what one program adds, and begins where the place of a row among the equal
ones is a multiple of a bag's size. Only where an id has several bags do their sums lie in memory, until another program
adds them up. In as many consecutive places as a bag has rows, at most one first and one later bag of such ids begin.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.kernels.backends.triton.rows import as_rows
from megatron.kernels.ops.embedding_grad import BAG

BLOCK, WARPS = 1024, 4  # columns of a program


@triton.jit
def _add_bags(
    main_grad_ptr, sums_ptr, ids_ptr, order_ptr, starts_ptr, ends_ptr, grad_ptr, width, stride,
    BAG: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0)
    start = tl.load(starts_ptr + place).to(tl.int32)
    end = tl.load(ends_ptr + place).to(tl.int32)
    if (place - start) % BAG == 0:
        columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = columns < width
        total = tl.zeros((BLOCK,), tl.float32)
        at = place
        while at < tl.minimum(place + BAG, end):
            row = tl.load(order_ptr + at).to(tl.int64)
            total += tl.load(grad_ptr + row * stride + columns, mask=inside, other=0.0).to(tl.float32)
            at += 1
        if end - start <= BAG:
            into = main_grad_ptr + tl.load(ids_ptr + place).to(tl.int64) * width + columns
            tl.store(into, tl.load(into, mask=inside, other=0.0) + total, mask=inside)
        else:
            slot = 2 * (place // BAG) + (place == start).to(tl.int32)
            tl.store(sums_ptr + slot.to(tl.int64) * width + columns, total, mask=inside)


@triton.jit
def _add_sums(
    main_grad_ptr, sums_ptr, ids_ptr, starts_ptr, ends_ptr, width, BAG: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    place = tl.program_id(0)
    start = tl.load(starts_ptr + place).to(tl.int32)
    end = tl.load(ends_ptr + place).to(tl.int32)
    if (place == start) & (end - start > BAG):
        columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = columns < width
        slot = (2 * (place // BAG) + 1).to(tl.int64)
        total = tl.load(sums_ptr + slot * width + columns, mask=inside, other=0.0)
        bag = place + BAG
        while bag < end:
            slot = (2 * (bag // BAG)).to(tl.int64)
            total += tl.load(sums_ptr + slot * width + columns, mask=inside, other=0.0)
            bag += BAG
        into = main_grad_ptr + tl.load(ids_ptr + place).to(tl.int64) * width + columns
        tl.store(into, tl.load(into, mask=inside, other=0.0) + total, mask=inside)


def add_rows(main_grad: Tensor, ids: Tensor, grad: Tensor) -> None:
    """Adds grad [n, h] to the rows `ids` [n] of main_grad [V, h], in fp32 and in a fixed order of sums."""
    n, width = len(ids), main_grad.shape[1]
    if not n or not width:
        return
    assert main_grad.is_contiguous()
    ids, order = ids.int().sort(stable=True)
    starts, ends = (torch.searchsorted(ids, ids, right=right, out_int32=True) for right in (False, True))
    sums = torch.empty(2 * triton.cdiv(n, BAG), width, dtype=torch.float32, device=grad.device)
    rows = as_rows(grad, width)
    grid = (n, triton.cdiv(width, BLOCK))
    _add_bags[grid](main_grad, sums, ids, order, starts, ends, rows, width, rows.stride(0), BAG, BLOCK, num_warps=WARPS)
    _add_sums[grid](main_grad, sums, ids, starts, ends, width, BAG, BLOCK, num_warps=WARPS)
