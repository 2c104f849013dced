"""The states of the gated delta rule from chunk to chunk, each way in one kernel (`StatePass` of ops/delta_rule.py).

A program has some value channels of one head, whose columns of the state do not depend on other columns. It goes
through all chunks with them in registers, and through a chunk some tokens at a time. A product is the sum of three in
TF32, which is as exact as one in fp32.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

VALUES, WARPS = 16, 4  # value channels of a program, and its warps
ELEMENTS = 4096  # of a block of keys, so that three products in TF32 fit into the registers


@triton.jit
def _forward(
    corrections_ptr, states_ptr, weights_ptr, write_ptr, whole_ptr, chunks, heads, size, d_k, d_v,
    whole_chunk, whole_head, whole_k, ROWS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)
    value = tl.program_id(1) * VALUES + tl.arange(0, VALUES)
    row, key = tl.arange(0, ROWS), tl.arange(0, KEYS)
    of_keys = (key < d_k)[:, None] & (value < d_v)[None, :]
    in_rows, in_values = row[:, None] * d_k + key[None, :], row[:, None] * d_v + value[None, :]
    in_state = key[:, None] * d_v + value[None, :]
    state = tl.load(states_ptr + head * d_k * d_v + in_state, mask=of_keys, other=0.0)
    for chunk in range(chunks):
        place = chunk * heads + head
        whole_at = whole_ptr + place // heads * whole_chunk + head * whole_head + key * whole_k
        after = tl.load(whole_at, mask=key < d_k, other=0.0)[:, None] * state
        for start in range(0, size, ROWS):
            inside, token = (row < size - start)[:, None], place * size + start
            of_rows, of_values = inside & (key < d_k)[None, :], inside & (value < d_v)[None, :]
            weights = tl.load(weights_ptr + token * d_k + in_rows, mask=of_rows, other=0.0)
            at = corrections_ptr + token * d_v + in_values
            corrections = tl.load(at, mask=of_values, other=0.0)
            corrections -= tl.dot(weights, state, input_precision="tf32x3")
            tl.store(at, corrections, mask=of_values)
            write = tl.load(write_ptr + token * d_k + in_rows, mask=of_rows, other=0.0)
            after += tl.dot(tl.trans(write), corrections, input_precision="tf32x3")
        state = after
        tl.store(states_ptr + (place + heads) * d_k * d_v + in_state, state, mask=of_keys)


@triton.jit
def _backward(
    grad_u_ptr, grad_after_ptr, grad_states_ptr, first_ptr, weights_ptr, write_ptr, whole_ptr,
    chunks, heads, size, d_k, d_v,
    whole_chunk, whole_head, whole_k, ROWS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)
    value = tl.program_id(1) * VALUES + tl.arange(0, VALUES)
    row, key = tl.arange(0, ROWS), tl.arange(0, KEYS)
    of_keys = (key < d_k)[:, None] & (value < d_v)[None, :]
    in_rows, in_values = row[:, None] * d_k + key[None, :], row[:, None] * d_v + value[None, :]
    in_state = key[:, None] * d_v + value[None, :]
    last = (chunks - 1) * heads + head
    grad = tl.load(grad_after_ptr + last * d_k * d_v + in_state, mask=of_keys, other=0.0)
    for number in range(chunks):
        chunk = chunks - 1 - number
        place = chunk * heads + head
        whole_at = whole_ptr + place // heads * whole_chunk + head * whole_head + key * whole_k
        before = tl.load(grad_states_ptr + place * d_k * d_v + in_state, mask=of_keys, other=0.0)
        before += tl.load(whole_at, mask=key < d_k, other=0.0)[:, None] * grad
        for start in range(0, size, ROWS):
            inside, token = (row < size - start)[:, None], place * size + start
            of_rows, of_values = inside & (key < d_k)[None, :], inside & (value < d_v)[None, :]
            write = tl.load(write_ptr + token * d_k + in_rows, mask=of_rows, other=0.0)
            at = grad_u_ptr + token * d_v + in_values
            grad_u = tl.load(at, mask=of_values, other=0.0)
            grad_u += tl.dot(write, grad, input_precision="tf32x3")
            tl.store(at, grad_u, mask=of_values)
            weights = tl.load(weights_ptr + token * d_k + in_rows, mask=of_rows, other=0.0)
            before -= tl.dot(tl.trans(weights), grad_u, input_precision="tf32x3")
        grad = before
        if chunk > 0:
            tl.store(grad_after_ptr + (place - heads) * d_k * d_v + in_state, grad, mask=of_keys)
    tl.store(first_ptr + head * d_k * d_v + in_state, grad, mask=of_keys)


def forward_(corrections: Tensor, states: Tensor, weights: Tensor, write: Tensor, whole: Tensor) -> None:
    """See `StatePass`. All but `whole` is contiguous."""
    (chunks, heads, size, d_k), d_v = weights.shape, corrections.shape[3]
    assert all(x.is_contiguous() for x in (corrections, states, weights, write))
    rows, keys = _tile(size, d_k)
    _forward[(heads, triton.cdiv(d_v, VALUES))](
        corrections, states, weights, write, whole, chunks, heads, size, d_k, d_v, *_strides(whole),
        rows, keys, VALUES, num_warps=WARPS, num_stages=1,
    )  # fmt: skip


def backward_(
    grad_u: Tensor, grad_after: Tensor, grad_states: Tensor, weights: Tensor, write: Tensor, whole: Tensor
) -> Tensor:
    """See `StatePass`. All but `whole` is contiguous."""
    (chunks, heads, size, d_k), d_v = weights.shape, grad_u.shape[3]
    assert all(x.is_contiguous() for x in (grad_u, grad_after, grad_states, weights, write))
    first = grad_after.new_empty(grad_after.shape[1:])
    rows, keys = _tile(size, d_k)
    _backward[(heads, triton.cdiv(d_v, VALUES))](
        grad_u, grad_after, grad_states, first, weights, write, whole, chunks, heads, size, d_k, d_v,
        *_strides(whole), rows, keys, VALUES, num_warps=WARPS, num_stages=1,
    )  # fmt: skip
    return first


def _strides(whole: Tensor) -> tuple[int, int, int]:
    """whole [chunks, heads, 1 or d_k, 1]."""
    return whole.stride(0), whole.stride(1), whole.stride(2) if whole.shape[2] > 1 else 0


def _tile(size: int, d_k: int) -> tuple[int, int]:
    """Returns (tokens that are multiplied at a time, key channels); a product takes 16 or more."""
    keys = max(16, triton.next_power_of_2(d_k))
    return max(16, min(size, ELEMENTS // keys)), keys
