"""The assignments of a rank, sorted by expert and by row: the interface of ops/assignments.py's Assign.

A stable counting sort: programs count the experts of their tokens, the counts become offsets, and programs put their
tokens there. So a place depends on the indices alone, nothing is sorted by comparison, and the order by row comes with
it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.kernels.ops.assignments import Assigned, RowOrder

ELEMENTS, WARPS = 8192, 8  # pairs of a slot and an expert in a program's registers
NONE = tl.constexpr(2**31 - 1)


@triton.jit
def _experts(indices_ptr, block, first, experts, tokens, K: tl.constexpr, TOKENS: tl.constexpr, SLOTS: tl.constexpr):
    """The tokens of a block [TOKENS x SLOTS], their slots, and the experts there; `experts` stands for none of this
    rank."""
    place = tl.arange(0, TOKENS * SLOTS)
    token, slot = block * TOKENS + place // SLOTS, place % SLOTS
    inside = (token < tokens) & (slot < K)
    expert = tl.load(indices_ptr + token.to(tl.int64) * K + slot, mask=inside, other=-1) - first
    expert = tl.where(inside & (expert >= 0) & (expert < experts), expert, experts).to(tl.int32)
    return token, slot, expert


@triton.jit
def _count(
    indices_ptr, counts_ptr, first, experts, tokens,
    K: tl.constexpr, TOKENS: tl.constexpr, SLOTS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    block, column = tl.program_id(0), tl.arange(0, EXPERTS)
    _, _, expert = _experts(indices_ptr, block, first, experts, tokens, K, TOKENS, SLOTS)
    counts = tl.sum((expert[:, None] == column[None, :]).to(tl.int32), 0)
    tl.store(counts_ptr + block * experts + column, counts, mask=column < experts)


@triton.jit
def _offset(counts_ptr, totals_ptr, experts, blocks, BLOCKS: tl.constexpr):
    """Replaces the counts of an expert by those of all blocks before."""
    expert, block = tl.program_id(0), tl.arange(0, BLOCKS)
    place = counts_ptr + block * experts + expert
    counts = tl.load(place, mask=block < blocks, other=0)
    tl.store(place, tl.cumsum(counts, 0) - counts, mask=block < blocks)
    tl.store(totals_ptr + expert, tl.sum(counts, 0))


@triton.jit
def _place(
    indices_ptr, offsets_ptr, totals_ptr, ends_ptr, positions_ptr, rows_ptr, order_ptr, starts_ptr, first, experts,
    tokens, K: tl.constexpr, TOKENS: tl.constexpr, SLOTS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    block, column = tl.program_id(0), tl.arange(0, EXPERTS)
    token, slot, expert = _experts(indices_ptr, block, first, experts, tokens, K, TOKENS, SLOTS)
    totals = tl.load(totals_ptr + column, mask=column < experts, other=0)
    ends = tl.cumsum(totals, 0)
    if block == 0:
        tl.store(ends_ptr + column, ends, mask=column < experts)
    offsets = tl.load(offsets_ptr + block * experts + column, mask=column < experts, other=0)
    matches = (expert[:, None] == column[None, :]).to(tl.int32)
    before = (ends - totals + offsets)[None, :] + tl.cumsum(matches, 0) - 1
    place = tl.sum(matches * before, 1)
    is_assigned = expert < experts
    tl.store(positions_ptr + place, token.to(tl.int64) * K + slot, mask=is_assigned)
    tl.store(rows_ptr + place, token.to(tl.int64), mask=is_assigned)
    # By token: its places in ascending order, which is that of the experts.
    by_token = tl.sort(tl.reshape(tl.where(is_assigned, place, NONE), (TOKENS, SLOTS)), 1)
    sizes = tl.sum((by_token != NONE).to(tl.int32), 1)
    starts = tl.sum(offsets, 0) + tl.cumsum(sizes, 0) - sizes
    row, column = block * TOKENS + tl.arange(0, TOKENS), tl.arange(0, SLOTS)
    tl.store(starts_ptr + row, starts.to(tl.int64), mask=row < tokens)
    tl.store(order_ptr + starts[:, None] + column[None, :], by_token.to(tl.int64), mask=by_token != NONE)


def assign(indices: Tensor, first: int, experts: int) -> Assigned:
    """Groups the assignments of tokens to this rank's experts by expert. See Assign."""
    tokens, k = indices.shape
    indices = indices.contiguous()
    slots, wide = triton.next_power_of_2(k), triton.next_power_of_2(experts)
    of_program = max(1, ELEMENTS // (slots * wide))
    blocks = triton.cdiv(tokens, of_program)

    def numbers(count: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(count, dtype=dtype, device=indices.device)

    counts, totals, ends = (numbers(count, torch.int32) for count in (blocks * experts, experts, experts))
    positions, rows, order = (numbers(tokens * k, torch.int64) for _ in range(3))
    starts = numbers(tokens, torch.int64)
    tile = k, of_program, slots, wide
    if not tokens:
        return Assigned(positions, rows, totals.zero_(), ends.zero_(), RowOrder(order, starts))
    _count[(blocks,)](indices, counts, first, experts, tokens, *tile, num_warps=WARPS)
    _offset[(experts,)](counts, totals, experts, blocks, triton.next_power_of_2(blocks), num_warps=4)
    _place[(blocks,)](
        indices, counts, totals, ends, positions, rows, order, starts, first, experts, tokens, *tile, num_warps=WARPS
    )
    return Assigned(positions, rows, totals, ends, RowOrder(order, starts))
