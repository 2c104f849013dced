"""The rotation of ops/rope.py in one pass, with its rounding."""

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
    INTERLEAVED: tl.constexpr, PARTIAL: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
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
        column = 2 * half + tl.arange(0, REST)[None, :]
        inside = (head < heads) & (column < d)
        rest = tl.load(x_ptr + head * x_stride_head + column, mask=inside, other=0.0)
        tl.store(out_ptr + head * d + column, rest, mask=inside)


def rotate_once(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """As the reference: x [s, b, heads, d] of any strides; cos and sin [s, b or 1, 1, half]."""
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
            interleaved, 2 * half < d, per_program, triton.next_power_of_2(half), triton.next_power_of_2(d - 2 * half + 1),
            num_warps=4,
        )  # fmt: skip
    return out
