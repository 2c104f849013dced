"""The rotation of ops/rope.py in one pass, with its rounding: alone, or with the split of queries, keys and values."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

HEADS = 2048  # channels of a program: of as many heads as fit


@triton.jit
def _rotate(
    x_ptr, cos_ptr, sin_ptr, out_ptr, batch, heads, half, d,
    x_stride_s, x_stride_b, x_stride_head, table_stride_s, table_stride_b,
    INTERLEAVED: tl.constexpr, PARTIAL: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, PASSED: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    s, b = token // batch, token % batch
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    x_ptr += s * x_stride_s + b * x_stride_b
    out_ptr += token * heads * d
    pair = tl.arange(0, HALF)[None, :]
    table = s * table_stride_s + b * table_stride_b + pair
    cos = tl.load(cos_ptr + table, mask=pair < half, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + table, mask=pair < half, other=0.0).to(tl.float32)
    if INTERLEAVED:
        first_at, second_at = 2 * pair, 2 * pair + 1
    else:
        first_at, second_at = pair, pair + half
    inside = (head < heads) & (pair < half)
    first = tl.load(x_ptr + head * x_stride_head + first_at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x_ptr + head * x_stride_head + second_at, mask=inside, other=0.0).to(tl.float32)
    kind = out_ptr.dtype.element_ty
    # Each product is rounded, as in the reference.
    new_first = (first * cos).to(kind).to(tl.float32) - (second * sin).to(kind).to(tl.float32)
    new_second = (second * cos).to(kind).to(tl.float32) + (first * sin).to(kind).to(tl.float32)
    tl.store(out_ptr + head * d + first_at, new_first.to(kind), mask=inside)
    tl.store(out_ptr + head * d + second_at, new_second.to(kind), mask=inside)
    if PARTIAL:
        column = 2 * half + tl.arange(0, PASSED)[None, :]
        inside = (head < heads) & (column < d)
        passed = tl.load(x_ptr + head * x_stride_head + column, mask=inside, other=0.0)
        tl.store(out_ptr + head * d + column, passed, mask=inside)


def rotate_once(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotates the first 2 * half channels of x [s, b, heads, d] of any strides; cos and sin [s, b or 1, 1, half]."""
    s, b, heads, d = x.shape
    half = cos.shape[-1]
    x = x if x.stride(-1) == 1 else x.contiguous()
    cos, sin = cos.contiguous(), sin.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    per_program = min(triton.next_power_of_2(heads), max(1, HEADS // triton.next_power_of_2(d)))
    if out.numel():
        _rotate[(s * b, triton.cdiv(heads, per_program))](
            x, cos, sin, out, b, heads, half, d,
            *x.stride()[:3], cos.stride(0), 0 if cos.shape[1] == 1 else cos.stride(1),
            interleaved, 2 * half < d, per_program, triton.next_power_of_2(half),
            triton.next_power_of_2(d - 2 * half + 1), num_warps=4,
        )  # fmt: skip
    return out


@triton.jit
def _split_or_join(
    qkv_ptr, q_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, batch, rows, queries, half, d,
    q_s, q_b, q_head, k_s, k_b, k_head, v_s, v_b, v_head, table_stride_s, table_stride_b,
    JOIN: tl.constexpr, INTERLEAVED: tl.constexpr, PARTIAL: tl.constexpr,
    HEADS: tl.constexpr, HALF: tl.constexpr, PASSED: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    s, b = token // batch, token % batch
    row = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]  # of a token: a head of q, k or v
    group, place = row // (queries + 2), row % (queries + 2)
    is_q, is_k, is_v = place < queries, place == queries, place == queries + 1
    qkv_ptr += token * rows * d + row * d
    q_ptr += s * q_s + b * q_b + (group * queries + place) * q_head
    k_ptr += s * k_s + b * k_b + group * k_head
    v_ptr += s * v_s + b * v_b + group * v_head
    pair = tl.arange(0, HALF)[None, :]
    table = s * table_stride_s + b * table_stride_b + pair
    cos = tl.load(cos_ptr + table, mask=pair < half, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + table, mask=pair < half, other=0.0).to(tl.float32)
    if JOIN:
        sin = -sin  # the transpose of a rotation is the inverse rotation
    if INTERLEAVED:
        first_at, second_at = 2 * pair, 2 * pair + 1
    else:
        first_at, second_at = pair, pair + half
    inside = (row < rows) & (pair < half)
    if JOIN:
        first = _from_three(q_ptr, k_ptr, v_ptr, first_at, inside & is_q, inside & is_k, inside & is_v)
        second = _from_three(q_ptr, k_ptr, v_ptr, second_at, inside & is_q, inside & is_k, inside & is_v)
    else:
        first = tl.load(qkv_ptr + first_at, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(qkv_ptr + second_at, mask=inside, other=0.0).to(tl.float32)
    kind = qkv_ptr.dtype.element_ty
    # Each product is rounded, as in the reference. Values are not rotated.
    new_first = (first * cos).to(kind).to(tl.float32) - (second * sin).to(kind).to(tl.float32)
    new_second = (second * cos).to(kind).to(tl.float32) + (first * sin).to(kind).to(tl.float32)
    new_first = tl.where(is_v, first, new_first).to(kind)
    new_second = tl.where(is_v, second, new_second).to(kind)
    if JOIN:
        tl.store(qkv_ptr + first_at, new_first, mask=inside)
        tl.store(qkv_ptr + second_at, new_second, mask=inside)
    else:
        _to_three(q_ptr, k_ptr, v_ptr, first_at, new_first, inside & is_q, inside & is_k, inside & is_v)
        _to_three(q_ptr, k_ptr, v_ptr, second_at, new_second, inside & is_q, inside & is_k, inside & is_v)
    if PARTIAL:
        column = 2 * half + tl.arange(0, PASSED)[None, :]
        inside = (row < rows) & (column < d)
        if JOIN:
            passed = _from_three(q_ptr, k_ptr, v_ptr, column, inside & is_q, inside & is_k, inside & is_v)
            tl.store(qkv_ptr + column, passed.to(kind), mask=inside)
        else:
            passed = tl.load(qkv_ptr + column, mask=inside, other=0.0)
            _to_three(q_ptr, k_ptr, v_ptr, column, passed, inside & is_q, inside & is_k, inside & is_v)


@triton.jit
def _from_three(q_ptr, k_ptr, v_ptr, column, of_q, of_k, of_v):
    """Each element is in one of the tensors, and 0 stands for it in the others."""
    total = tl.load(q_ptr + column, mask=of_q, other=0.0).to(tl.float32)
    total += tl.load(k_ptr + column, mask=of_k, other=0.0).to(tl.float32)
    return total + tl.load(v_ptr + column, mask=of_v, other=0.0).to(tl.float32)


@triton.jit
def _to_three(q_ptr, k_ptr, v_ptr, column, value, of_q, of_k, of_v):
    tl.store(q_ptr + column, value, mask=of_q)
    tl.store(k_ptr + column, value, mask=of_k)
    tl.store(v_ptr + column, value, mask=of_v)


def split(qkv: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Splits qkv [s, b, groups, heads per group + 2, d] into rotated queries and keys, and values, in one pass."""
    s, b, groups, heads_per_group, d = qkv.shape
    q, k, v = (qkv.new_empty(s, b, heads, d) for heads in (groups * (heads_per_group - 2), groups, groups))
    _launch(qkv.contiguous(), (q, k, v), cos, sin, interleaved, join=False)
    return q, k, v


def join(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Joins queries, keys and values to qkv, and rotates queries and keys, in one pass: the inverse of `split`.

    The channels of a head must be contiguous; other strides are free.
    """
    s, b, groups, d = k.shape
    qkv = q.new_empty(s, b, groups, q.shape[2] // groups + 2, d)
    three = [tensor if tensor.stride(3) == 1 else tensor.contiguous() for tensor in (q, k, v)]
    _launch(qkv, (three[0], three[1], three[2]), cos, sin, interleaved, join=True)
    return qkv


def _launch(
    qkv: Tensor, three: tuple[Tensor, Tensor, Tensor], cos: Tensor, sin: Tensor, interleaved: bool, *, join: bool
) -> None:
    s, b, groups, heads_per_group, d = qkv.shape
    rows, half = groups * heads_per_group, cos.shape[-1]
    cos, sin = cos.contiguous(), sin.contiguous()
    per_program = min(triton.next_power_of_2(rows), max(1, HEADS // triton.next_power_of_2(d)))
    strides = [stride for tensor in three for stride in tensor.stride()[:3]]
    if qkv.numel():
        _split_or_join[(s * b, triton.cdiv(rows, per_program))](
            qkv, *three, cos, sin, b, rows, heads_per_group - 2, half, d,
            *strides, cos.stride(0), 0 if cos.shape[1] == 1 else cos.stride(1),
            join, interleaved, 2 * half < d,
            per_program, triton.next_power_of_2(half), triton.next_power_of_2(d - 2 * half + 1), num_warps=4,
        )  # fmt: skip
