"""AdamW on flat tensors in one pass over device memory (Loshchilov and Hutter, arXiv 1711.05101).

One launch updates a tensor whose parts differ in learning rate and weight decay: a table says where these parts, its
runs, begin and end, and every program finds its own run there. The numbers that only the device knows, the divisor of
the gradients and whether there is an update at all, are read by each program.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.kernels.ops.adam import Coefficients
from megatron.kernels.ops.update_run import UpdateRun

BLOCK, WARPS = 1024, 4
FEWEST = 16  # columns of a table: fewer runs do not get kernels of their own
_NEVER = 2**62  # as the first program of a run that does not exist


@triton.jit
def _step(
    param_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, out_ptr, gate_ptr, table_ptr,
    decay, decoupled_decay, rate, decoupled_rate, lerp, beta2, weight_sq, correction, eps,
    ROUNDED: tl.constexpr, NEAR: tl.constexpr, ALIGNED: tl.constexpr, RUNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    run = tl.sum((tl.load(table_ptr + tl.arange(0, RUNS)) <= program).to(tl.int32), 0) - 1
    start = tl.load(table_ptr + RUNS + run) + (program - tl.load(table_ptr + run)) * BLOCK
    stop = tl.load(table_ptr + 2 * RUNS + run)
    kind = tl.load(table_ptr + 3 * RUNS + run)
    if ALIGNED:
        start, stop = tl.multiple_of(start, 16), tl.multiple_of(stop, 16)
    decay = tl.where(kind >= 2, decoupled_decay, decay)
    decay = tl.where(kind % 2 == 1, decay, 1.0)
    rate = tl.where(kind >= 2, decoupled_rate, rate)
    skipped = tl.load(gate_ptr + 1) * tl.load(gate_ptr + 2) != 0.0
    place = start + tl.arange(0, BLOCK)
    inside = place < stop
    used = place < tl.where(skipped, start, stop)
    grad = tl.load(grad_ptr + place, mask=used, other=0.0).to(tl.float32)
    grad = tl.div_rn(grad, tl.load(gate_ptr) + tl.zeros((BLOCK,), tl.float32))
    old = tl.load(exp_avg_ptr + place, mask=used, other=0.0)
    # The form of old + weight (grad - old) that is exact at both ends, as torch's lerp.
    exp_avg = (old if NEAR else grad) + lerp * (grad - old)
    exp_avg_sq = tl.load(exp_avg_sq_ptr + place, mask=used, other=0.0) * beta2 + weight_sq * grad * grad
    before = tl.load(param_ptr + place, mask=inside, other=0.0)
    param = before * decay + rate * exp_avg / (tl.sqrt_rn(exp_avg_sq) / correction + eps)
    tl.store(exp_avg_ptr + place, exp_avg, mask=used)
    tl.store(exp_avg_sq_ptr + place, exp_avg_sq, mask=used)
    tl.store(param_ptr + place, param, mask=used)
    if ROUNDED:  # also without an update: the memory may hold something else
        tl.store(out_ptr + place, tl.where(skipped, before, param).to(out_ptr.dtype.element_ty), mask=inside)


class OnePassAdamW:
    """As ops/adam.py's DeviceAdamW."""

    def __init__(self, runs: Sequence[UpdateRun], device: torch.device) -> None:
        """The table lies on the device: [first program, start, stop, kind] of each run, where bit 0 of a kind stands
        for weight decay and bit 1 for the decoupled learning rate."""
        self._columns = max(FEWEST, triton.next_power_of_2(len(runs)))
        rows: list[list[int]] = [[], [], [], []]
        self._programs = 0
        for run in runs:
            column = self._programs, run.start, run.stop, run.decay + 2 * run.decoupled
            for row, number in zip(rows, column, strict=True):
                row.append(number)
            self._programs += triton.cdiv(run.stop - run.start, BLOCK)
        empty = self._columns - len(runs)
        padded = [row + [filling] * empty for row, filling in zip(rows, (_NEVER, 0, 0, 0), strict=True)]
        self._table = torch.tensor(padded, dtype=torch.int64).to(device)
        self._aligned = all(number % 16 == 0 for run in runs for number in (run.start, run.stop))

    def step(
        self,
        param: Tensor,
        grad: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        out: Tensor | None,
        gate: Tensor,
        numbers: Coefficients,
    ) -> None:
        """See DeviceAdamW."""
        flat = (param, grad, exp_avg, exp_avg_sq) if out is None else (param, grad, exp_avg, exp_avg_sq, out)
        assert all(t.shape == param.shape and t.is_contiguous() for t in flat), [(t.shape, t.stride()) for t in flat]
        weight = 1.0 - numbers.beta1
        near = weight < 0.5
        correction = 1.0 - numbers.beta1**numbers.step
        if self._programs:
            _step[(self._programs,)](
                param, grad, exp_avg, exp_avg_sq, param if out is None else out, gate, self._table,
                1.0 - numbers.lr * numbers.weight_decay, 1.0 - numbers.decoupled_lr * numbers.weight_decay,
                -numbers.lr / correction, -numbers.decoupled_lr / correction,
                weight if near else weight - 1.0, numbers.beta2, 1.0 - numbers.beta2,
                math.sqrt(1.0 - numbers.beta2**numbers.step), numbers.eps,
                out is not None, near, self._aligned, self._columns, BLOCK, num_warps=WARPS,
            )  # fmt: skip
