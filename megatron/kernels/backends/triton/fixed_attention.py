"""Attention over keys in fixed blocks that are counted from a document's own first key: the forward of
ops/batch_invariant/attention.py, for GPUs.

A program has ROWS queries: those of one key head, for some tokens that follow each other. It goes through the documents
of its tokens in order, and for each through its blocks of KEYS keys. A block that is hidden from a query, because it
belongs to another document or lies behind the query, changes none of its numbers. So a query's result is the same in any
program, and alone against a cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.kernels.backends.triton.fixed_product import precision
from megatron.kernels.ops.attention_scores import Scores

ROWS, KEYS, WARPS = 64, 64, 4
WIDE_ROWS, WIDE_KEYS, WIDE_WARPS = 16, 32, 8  # of elements of four bytes, which fill the registers
NEVER = tl.constexpr(1 << 30)  # a position behind every token


@triton.jit(do_not_specialize=["s", "t", "batch"])
def _forward(
    q_ptr, k_ptr, v_ptr, starts_ptr, out_ptr, lse_ptr, s, t, batch, groups, heads, d, channels, scale, cap, window,
    q_s, q_b, q_n, k_s, k_b, k_g, v_s, v_b, v_g, out_s, out_b, out_n,
    DOCUMENTS: tl.constexpr, CAPPED: tl.constexpr, WINDOWED: tl.constexpr, PRECISION: tl.constexpr,
    HEADS: tl.constexpr, TOKENS: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """heads: queries of a key head, of which HEADS is the next power of two. starts [b, t]: of each token's document."""
    sample, group = (tl.program_id(1) // groups).to(tl.int64), tl.program_id(1) % groups
    row = tl.arange(0, TOKENS * HEADS)
    token, head = tl.program_id(0) * TOKENS + row // HEADS, row % HEADS
    present = (token < s) & (head < heads)
    position = t - s + token
    start = tl.zeros_like(token)
    if DOCUMENTS:
        start = tl.load(starts_ptr + sample * t + position, mask=present, other=0).to(tl.int32)
    start = tl.where(present, start, NEVER)
    channel, value = tl.arange(0, D), tl.arange(0, CHANNELS)
    of_query = (group * heads + head).to(tl.int64)
    q_at = q_ptr + token.to(tl.int64)[:, None] * q_s + sample * q_b + of_query[:, None] * q_n + channel[None, :]
    q = tl.load(q_at, mask=present[:, None] & (channel < d)[None, :], other=0.0)
    k_ptr += sample * k_b + group * k_g
    v_ptr += sample * v_b + group * v_g
    largest = tl.full((TOKENS * HEADS,), float("-inf"), tl.float32)
    total = tl.zeros((TOKENS * HEADS,), tl.float32)
    out = tl.zeros((TOKENS * HEADS, CHANNELS), tl.float32)
    document = tl.min(start, 0)
    while document < NEVER:
        inside = start == document
        stop = tl.max(tl.where(inside, position, -1), 0) + 1
        first = document
        if WINDOWED:  # blocks that are hidden from all queries are left out
            seen = tl.min(tl.where(inside, position, NEVER), 0) - window + 1 - document
            first += tl.maximum(seen, 0) // KEYS * KEYS
        for begin in range(first, stop, KEYS):
            key = begin + tl.arange(0, KEYS)
            exists = key < stop
            k_at = k_ptr + key.to(tl.int64)[None, :] * k_s + channel[:, None]
            k = tl.load(k_at, mask=exists[None, :] & (channel < d)[:, None], other=0.0)
            scores = tl.dot(q, k, input_precision=PRECISION) * scale
            if CAPPED:  # cap * tanh(scores / cap)
                scores = cap * (2.0 / (1.0 + tl.exp(-2.0 * (scores / cap))) - 1.0)
            visible = inside[:, None] & (key[None, :] <= position[:, None])
            if WINDOWED:
                visible &= key[None, :] > position[:, None] - window
            scores = tl.where(visible, scores, float("-inf"))
            highest = tl.maximum(largest, tl.max(scores, 1))
            base = tl.where(highest == float("-inf"), 0.0, highest)
            weights, share = tl.exp(scores - base[:, None]), tl.exp(largest - base)
            total = tl.where(inside, total * share + tl.sum(weights, 1), total)
            v_at = v_ptr + key.to(tl.int64)[:, None] * v_s + value[None, :]
            v = tl.load(v_at, mask=exists[:, None] & (value < channels)[None, :], other=0.0)
            added = out * share[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
            out = tl.where(inside[:, None], added, out)  # a weight of 0 makes NaN of a value that is not finite
            largest = highest
        document = tl.min(tl.where(start > document, start, NEVER), 0)
    out_at = out_ptr + token.to(tl.int64)[:, None] * out_s + sample * out_b + of_query[:, None] * out_n
    written = present[:, None] & (value < channels)[None, :]
    tl.store(out_at + value[None, :], (out / total[:, None]).to(out_ptr.dtype.element_ty), mask=written)
    lse_at = lse_ptr + (sample * groups * heads + of_query) * s + token
    tl.store(lse_at, largest + tl.log(total), mask=present)


def forward(
    q: Tensor, k: Tensor, v: Tensor, scores: Scores, ids: Tensor | None, window: int | None
) -> tuple[Tensor, Tensor]:
    """q [s, b, n, d], k [t, b, g, d], v [t, b, g, v] -> the output [s, b, n, v] in q's dtype, and log-sum-exps
    [b, n, s] in fp32. ids [b, t]: of documents; None: a sample is one."""
    q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k, v))
    (s, b, n, d), (t, _, groups, channels) = q.shape, v.shape
    heads = n // groups
    padded = triton.next_power_of_2(heads)
    wide = q.dtype == torch.float32
    tokens = max(1, (WIDE_ROWS if wide else ROWS) // padded)
    out = q.new_empty(s, b, n, channels)
    lse = q.new_empty(b, n, s, dtype=torch.float32)
    starts = q if ids is None else _starts(ids)
    _forward[(triton.cdiv(s, tokens), b * groups)](
        q, k, v, starts, out, lse, s, t, b, groups, heads, d, channels,
        scores.scale, 0.0 if scores.softcap is None else scores.softcap, 0 if window is None else window,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3],
        ids is not None, scores.softcap is not None, window is not None, precision(q.dtype),
        padded, tokens, WIDE_KEYS if wide else KEYS,
        max(16, triton.next_power_of_2(d)), max(16, triton.next_power_of_2(channels)),
        num_warps=WIDE_WARPS if wide else WARPS, num_stages=1 if wide else 2,
    )  # fmt: skip
    return out, lse


def _starts(ids: Tensor) -> Tensor:
    """ids [b, t] -> the position of the first token of each token's document, [b, t] int32."""
    positions = torch.arange(ids.shape[1], device=ids.device, dtype=torch.int32).expand_as(ids)
    begins = torch.ones_like(ids, dtype=torch.bool)
    begins[:, 1:] = ids[:, 1:] != ids[:, :-1]
    return positions.where(begins, 0).cummax(1).values
