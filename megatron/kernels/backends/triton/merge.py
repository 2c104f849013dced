"""The merge of blocks of attention of ops/attention_lse.py in one pass."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

CHANNELS = 2048  # of a program: of as many heads as fit


@triton.jit
def _merge(
    out_ptr, lse_ptr, block_out_ptr, block_lse_ptr, batch, heads, d,
    out_s, out_b, out_head, block_s, block_b, block_head,
    lse_b, lse_head, lse_s, block_lse_b, block_lse_head, block_lse_s,
    HEADS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    s, b = token // batch, token % batch
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    place = lse_ptr + b * lse_b + head * lse_head + s * lse_s
    mine = tl.load(place, mask=head < heads, other=0.0)
    block = tl.load(
        block_lse_ptr + b * block_lse_b + head * block_lse_head + s * block_lse_s, mask=head < heads, other=0.0
    )
    largest = tl.maximum(mine, block)
    base = tl.where(largest == float("-inf"), 0.0, largest)  # -inf - -inf would be NaN
    total = base + tl.log(tl.exp(mine - base) + tl.exp(block - base))
    share = tl.exp(block - total)[:, None]
    channel = tl.arange(0, D)[None, :]
    inside = (head < heads)[:, None] & (channel < d)
    out_place = out_ptr + s * out_s + b * out_b + head[:, None] * out_head + channel
    block_place = block_out_ptr + s * block_s + b * block_b + head[:, None] * block_head + channel
    out = tl.load(out_place, mask=inside, other=0.0)
    addend = tl.load(block_place, mask=inside, other=0.0).to(tl.float32)
    # The form that is exact at both ends, as torch's lerp.
    merged = tl.where(share < 0.5, out + share * (addend - out), addend - (addend - out) * (1.0 - share))
    tl.store(out_place, merged, mask=inside)
    tl.store(place, total, mask=head < heads)


def merge_(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
    """Merges the attention of one more block of keys into `out` [s, b, heads, d] and `lse`, both fp32. See Merge.

    The channels of a head must be contiguous; other strides are free.
    """
    s, b, heads, d = out.shape
    assert out.stride(3) == 1 or d == 1, out.stride()
    block = block_out if block_out.stride(3) == 1 else block_out.contiguous()
    width = triton.next_power_of_2(d)
    per_program = min(triton.next_power_of_2(heads), max(1, CHANNELS // width))
    if out.numel():
        _merge[(s * b, triton.cdiv(heads, per_program))](
            out, lse, block, block_lse, b, heads, d,
            *out.stride()[:3], *block.stride()[:3], *lse.stride(), *block_lse.stride(), per_program, width, num_warps=4,
        )  # fmt: skip
