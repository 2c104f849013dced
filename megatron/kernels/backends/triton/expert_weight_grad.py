"""Weight gradients of all experts in one launch: the interface of ops/expert_weight_grad.py.

A program computes one tile of one expert's gradient over all of its rows, in fp32, and writes or adds it where it
belongs. So no gradient exists in half precision, and none is read back unless it is added to. The tiles of an expert
follow each other: its rows come from the cache after the first tiles. Rows that are picked are read where they lie.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from megatron.kernels.ops.assignments import Assignments, Picked

# Output channels, input channels and rows of a tile. Three stages of both operands take 96 KiB: two programs share a
# multiprocessor of sm_90, so that one multiplies while the other one writes.
OUT, IN, ROWS, STAGES, WARPS = 128, 128, 64, 5, 8


@triton.jit
def _weight_grad(
    main_ptr, grads_ptr, grad_rows_ptr, values_ptr, value_rows_ptr, ends_ptr, outputs, inputs,
    PICK_GRADS: tl.constexpr, PICK_VALUES: tl.constexpr, OVERWRITE: tl.constexpr, WHOLE: tl.constexpr,
    OUT: tl.constexpr, IN: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(inputs, IN)
    tiles = tl.cdiv(outputs, OUT) * across
    expert, tile = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles
    stop = tl.load(ends_ptr + expert)
    start = tl.load(ends_ptr + expert - 1, mask=expert > 0, other=0)
    if OVERWRITE or start < stop:
        out, column = tile // across * OUT + tl.arange(0, OUT), tile % across * IN + tl.arange(0, IN)
        is_out, is_in = out < outputs, column < inputs
        total = tl.zeros((OUT, IN), tl.float32)
        for first in range(start, stop, ROWS):
            row = first + tl.arange(0, ROWS)
            inside = row < stop
            of_grad, of_value = row.to(tl.int64), row.to(tl.int64)
            if PICK_GRADS:
                of_grad = tl.load(grad_rows_ptr + row, mask=inside, other=0)
            if PICK_VALUES:
                of_value = tl.load(value_rows_ptr + row, mask=inside, other=0)
            grads_at = grads_ptr + of_grad[:, None] * outputs + out[None, :]
            values_at = values_ptr + of_value[:, None] * inputs + column[None, :]
            if WHOLE:
                grads = tl.load(grads_at, mask=inside[:, None], other=0.0)
                values = tl.load(values_at, mask=inside[:, None], other=0.0)
            else:
                grads = tl.load(grads_at, mask=inside[:, None] & is_out[None, :], other=0.0)
                values = tl.load(values_at, mask=inside[:, None] & is_in[None, :], other=0.0)
            total = tl.dot(tl.trans(grads), values, total, input_precision="ieee")
        # By halves: registers hold one half of what is there already, next to the whole product.
        left, right = tl.split(tl.permute(tl.reshape(total, (OUT, 2, IN // 2)), (0, 2, 1)))
        column = tile % across * IN + tl.arange(0, IN // 2)
        main_ptr += expert * outputs * inputs
        _write(main_ptr, left, out, column, outputs, inputs, OVERWRITE)
        _write(main_ptr, right, out, column + IN // 2, outputs, inputs, OVERWRITE)


@triton.jit
def _write(main_ptr, total, out, column, outputs, inputs, OVERWRITE: tl.constexpr):
    place = main_ptr + out[:, None] * inputs + column[None, :]
    within = (out < outputs)[:, None] & (column < inputs)[None, :]
    if not OVERWRITE:
        total += tl.load(place, mask=within, other=0.0)
    tl.store(place, total, mask=within)


def write_weight_grads(
    main_grad: Tensor, grads: Picked, values: Picked, assignments: Assignments, overwrite: bool
) -> None:
    """Writes or adds the weight gradient of each expert to main_grad [E, out, in] fp32. See ExpertWeightGrad."""
    experts, outputs, inputs = main_grad.shape
    assert main_grad.is_contiguous() and outputs == grads.source.shape[1] and inputs == values.source.shape[1]
    sources = grads.source.contiguous(), values.source.contiguous()
    none = assignments.ends  # stands for rows that are not picked
    whole = outputs % OUT == 0 and inputs % IN == 0
    _weight_grad[(experts * triton.cdiv(outputs, OUT) * triton.cdiv(inputs, IN),)](
        main_grad,
        sources[0], none if grads.rows is None else grads.rows,
        sources[1], none if values.rows is None else values.rows,
        assignments.ends, outputs, inputs,
        grads.rows is not None, values.rows is not None, overwrite, whole,
        OUT, IN, ROWS, num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
