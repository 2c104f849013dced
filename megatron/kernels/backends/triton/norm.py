"""RMSNorm and LayerNorm, each way in one pass over memory. The interface and the rounding are those of ops/norm.py.

A program holds whole rows in registers. In backward a fixed number of programs go through the rows; each sums its own
part of the weight's gradient, and a second, small reduction adds up these parts.

The norm of a residual stream also takes part in the additions around it: `compute_add_norm` adds the output of the
attention or MLP before, and `gradient_add_norm` adds the gradient that reaches the sum beside the norm.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.kernels.backends.triton.rows import as_rows
from megatron.kernels.ops import norm as reference
from megatron.kernels.ops.norm import Average, own

LARGEST = 16384  # channels; longer rows do not fit into the registers of a program
LARGEST_CENTERED = 8192  # the longest row of LayerNorm, which also sums the gradient of a bias
WARPS = 2112  # warps that sum gradients of a weight: 16 for each processor of an H100, a constant for equal bits


@triton.jit
def _forward(
    x_ptr, branch_ptr, weight_ptr, bias_ptr, sum_ptr, out_ptr, mean_ptr, rstd_ptr, n, h, x_stride, branch_stride,
    epsilon, ADDS: tl.constexpr, CENTERED: tl.constexpr, BIASED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    inside = (rows < n)[:, None] & (columns < h)[None, :]
    place = rows[:, None] * h + columns[None, :]
    x = tl.load(x_ptr + rows[:, None] * x_stride + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        x += tl.load(branch_ptr + rows[:, None] * branch_stride + columns[None, :], mask=inside, other=0.0).to(
            tl.float32
        )
        total = x.to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + place, total, mask=inside)
        x = total.to(tl.float32)  # rounded, as the norm of the stored sum would read it
    if CENTERED:
        mean = tl.sum(x, 1) / h
        tl.store(mean_ptr + rows, mean, mask=rows < n)
        x = tl.where(inside, x - mean[:, None], 0.0)
    rstd = 1.0 / tl.sqrt_rn(tl.sum(x * x, 1) / h + epsilon)
    tl.store(rstd_ptr + rows, rstd, mask=rows < n)
    weight = tl.load(weight_ptr + columns, mask=columns < h, other=0.0)
    out = x * rstd[:, None]
    if CENTERED:
        out = out * weight.to(tl.float32)[None, :]
        if BIASED:
            out += tl.load(bias_ptr + columns, mask=columns < h, other=0.0).to(tl.float32)[None, :]
    else:
        out = out.to(weight.dtype).to(tl.float32) * weight.to(tl.float32)[None, :]
    tl.store(out_ptr + place, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    grad_ptr, residual_ptr, x_ptr, weight_ptr, mean_ptr, rstd_ptr, grad_x_ptr, grad_weight_ptr, grad_bias_ptr,
    n, h, grad_stride, residual_stride, x_stride,
    ADDS: tl.constexpr, CENTERED: tl.constexpr, BIASED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    weight = tl.load(weight_ptr + columns, mask=columns < h, other=0.0).to(tl.float32)[None, :]
    sum_weight = tl.zeros((ROWS, BLOCK), tl.float32)
    sum_bias = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(program * ROWS, n, tl.num_programs(0) * ROWS):
        rows = start + tl.arange(0, ROWS).to(tl.int64)
        inside = (rows < n)[:, None] & (columns < h)[None, :]
        x = tl.load(x_ptr + rows[:, None] * x_stride + columns[None, :], mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + rows[:, None] * grad_stride + columns[None, :], mask=inside, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + rows, mask=rows < n, other=0.0)[:, None]
        if CENTERED:
            x -= tl.load(mean_ptr + rows, mask=rows < n, other=0.0)[:, None]
        normalized = tl.where(inside, x * rstd, 0.0)
        sum_weight += grad * normalized
        if BIASED:
            sum_bias += grad
        grad *= weight
        grad_x = grad - normalized * (tl.sum(grad * normalized, 1) / h)[:, None]
        if CENTERED:
            grad_x -= (tl.sum(grad, 1) / h)[:, None]
        grad_x *= rstd
        if ADDS:
            # The norm's own part is rounded first, as autograd's addition of two gradients would find it.
            grad_x = grad_x.to(grad_x_ptr.dtype.element_ty).to(tl.float32)
            place = residual_ptr + rows[:, None] * residual_stride + columns[None, :]
            grad_x += tl.load(place, mask=inside, other=0.0).to(tl.float32)
        place = grad_x_ptr + rows[:, None] * h + columns[None, :]
        tl.store(place, grad_x.to(grad_x_ptr.dtype.element_ty), mask=inside)
    tl.store(grad_weight_ptr + program * h + columns, tl.sum(sum_weight, 0), mask=columns < h)
    if BIASED:
        tl.store(grad_bias_ptr + program * h + columns, tl.sum(sum_bias, 0), mask=columns < h)


def compute_rms_norm(x: Tensor, weight: Tensor, epsilon: float, average: Average = own) -> tuple[Tensor, Tensor]:
    """Computes RMSNorm over the last dim in one pass: (output, reciprocal root mean square). See NormKernel.

    Plain torch computes it where ranks hold parts of a row, and where a row is longer than LARGEST.
    """
    if average is not own or not _fits(weight, centered=False):
        return reference.compute_rms_norm(x, weight, epsilon, average)
    _, out, (_, rstd) = _norm(x, None, weight, None, epsilon, centered=False)
    return out, rstd


def compute_layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Computes LayerNorm over the last dim: (output, (mean, reciprocal deviation)). See NormKernel."""
    if not _fits(weight, centered=True):
        return reference.compute_layer_norm(x, weight, bias, epsilon)
    _, out, statistics = _norm(x, None, weight, bias, epsilon, centered=True)
    return out, statistics


def compute_add_norm(
    x: Tensor, branch: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Adds a branch to the residual stream, and computes the norm of the sum, in one pass. See ResidualNorm."""
    centered = bias is not None
    if not _fits(weight, centered=centered):
        return reference.compute_add_norm(x, branch, weight, bias, epsilon)
    return _norm(x, branch, weight, bias, epsilon, centered=centered)


def gradient_rms_norm(
    grad: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, average: Average = own
) -> tuple[Tensor, Tensor]:
    """Returns the gradients of RMSNorm with respect to x and the weight. See NormKernel."""
    if average is not own or not _fits(weight, centered=False):
        return reference.gradient_rms_norm(grad, x, weight, rstd, average)
    grad_x, grad_weight, _ = _gradient(grad, None, x, weight, None, (rstd, rstd), centered=False)
    return grad_x, grad_weight


def gradient_layer_norm(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, statistics: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns the gradients of LayerNorm with respect to x, the weight and the bias. See NormKernel."""
    if not _fits(weight, centered=True):
        return reference.gradient_layer_norm(grad, x, weight, bias, statistics)
    return _gradient(grad, None, x, weight, bias, statistics, centered=True)


def gradient_add_norm(
    grad: Tensor,
    grad_total: Tensor | None,
    total: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    statistics: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns the gradients of `compute_add_norm`. See ResidualNorm."""
    centered = bias is not None
    if not _fits(weight, centered=centered):
        return reference.gradient_add_norm(grad, grad_total, total, weight, bias, statistics)
    return _gradient(grad, grad_total, total, weight, bias, statistics, centered=centered)


def _fits(weight: Tensor, *, centered: bool) -> bool:
    return weight.numel() <= (LARGEST_CENTERED if centered else LARGEST)


def _norm(
    x: Tensor, branch: Tensor | None, weight: Tensor, bias: Tensor | None, epsilon: float, *, centered: bool
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Returns (x, or its sum with the branch; the norm; (mean, 1 / standard deviation))."""
    h, device = weight.numel(), x.device
    flat = as_rows(x, h)
    other = flat if branch is None else as_rows(branch, h)
    out = torch.empty(x.shape, dtype=weight.dtype, device=device)
    total = (
        x if branch is None else torch.empty(x.shape, dtype=torch.promote_types(x.dtype, branch.dtype), device=device)
    )
    rstd = torch.empty(x.shape[: x.dim() - weight.dim()] + (1,) * weight.dim(), dtype=torch.float32, device=device)
    mean = torch.empty_like(rstd) if centered else rstd
    rows, block, warps = _tile(h)
    if rstd.numel():
        _forward[(triton.cdiv(rstd.numel(), rows),)](
            flat, other, weight, weight if bias is None else bias, total, out, mean, rstd,
            rstd.numel(), h, flat.stride(0), other.stride(0), epsilon,
            branch is not None, centered, bias is not None, rows, block, num_warps=warps,
        )  # fmt: skip
    return total, out, (mean, rstd)


def _gradient(
    grad: Tensor,
    residual: Tensor | None,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    statistics: tuple[Tensor, Tensor],
    *,
    centered: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    h, n, (mean, rstd) = weight.numel(), statistics[1].numel(), statistics
    grad, flat = as_rows(grad, h), as_rows(x, h)
    other = grad if residual is None else as_rows(residual, h)
    rows, block, warps = _tile(h)
    programs = min(triton.cdiv(n, rows), WARPS // warps)
    grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    parts = torch.empty(1 if bias is None else 2, programs, h, dtype=torch.float32, device=x.device)
    if programs:
        _backward[(programs,)](
            grad, other, flat, weight, mean, rstd, grad_x, parts[0], parts[-1],
            n, h, grad.stride(0), other.stride(0), flat.stride(0),
            residual is not None, centered, bias is not None, rows, block, num_warps=warps,
        )  # fmt: skip
    sums = parts.sum(1).to(weight.dtype)
    return grad_x, sums[0].view_as(weight), None if bias is None else sums[1].view_as(bias)


def _tile(h: int) -> tuple[int, int, int]:
    """Returns (rows that a program holds at a time, channels rounded up to a power of two, warps)."""
    block = max(16, triton.next_power_of_2(h))
    rows = max(1, 2048 // block)
    return rows, block, min(16, max(4, rows * block // 512))
