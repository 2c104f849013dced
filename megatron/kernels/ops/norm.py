"""RMSNorm and LayerNorm over the last dim.

The reference rounds where Hugging Face's modules do: statistics and normalisation in fp32, cast to the activation
dtype, then multiplied by the weight. Backward is in fp32 and saves only the input and one number per row.

`compute_*` and `gradient_*` are forward and backward without autograd, for callers that recompute a norm in backward.

[Note: a norm of sharded channels] Where ranks hold equal parts of a row, `average` takes a number per row to its mean
over the ranks. RMSNorm needs the mean of x^2 over all channels in forward, and the mean of gradient times output in
backward: both are the mean over the ranks of each rank's own mean. This also holds where each channel is on several
ranks, equally many for all channels, and each of these ranks has a part of the gradient: in forward a mean does not
change when every channel is counted as often; in backward the dot product adds up the parts, and each rank gets its
part of the gradient of x.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

Average = Callable[[Tensor], Tensor]


class ResidualNorm(NamedTuple):
    """The norm of a sum without autograd: functions with the contracts of those of this file."""

    compute_add_norm: Callable[
        [Tensor, Tensor, Tensor, Tensor | None, float], tuple[Tensor, Tensor, tuple[Tensor, Tensor]]
    ]
    gradient_add_norm: Callable[
        [Tensor, Tensor | None, Tensor, Tensor, Tensor | None, tuple[Tensor, Tensor]],
        tuple[Tensor, Tensor, Tensor | None],
    ]


class NormKernel(NamedTuple):
    """The norms without autograd. Each field is a function of this file, or another one with its contract.

    residual: the norm of a sum, where it is one operation; None where the sum and its norm are computed one after the
    other.
    """

    compute_rms_norm: Callable[[Tensor, Tensor, float, Average], tuple[Tensor, Tensor]]
    gradient_rms_norm: Callable[[Tensor, Tensor, Tensor, Tensor, Average], tuple[Tensor, Tensor]]
    compute_layer_norm: Callable[[Tensor, Tensor, Tensor | None, float], tuple[Tensor, tuple[Tensor, Tensor]]]
    gradient_layer_norm: Callable[
        [Tensor, Tensor, Tensor, Tensor | None, tuple[Tensor, Tensor]], tuple[Tensor, Tensor, Tensor | None]
    ]
    residual: ResidualNorm | None = None


def own(numbers: Tensor) -> Tensor:
    """The average where each rank holds whole rows."""
    return numbers


def compute_rms_norm(x: Tensor, weight: Tensor, epsilon: float, average: Average = own) -> tuple[Tensor, Tensor]:
    """Returns (x, normalized over the dims that the weight has, in its dtype; 1 / root mean square [..., 1] in fp32).

    average: see the note.
    """
    x32, dims = x.float(), tuple(range(-weight.dim(), 0))
    # Sum as Hugging Face does: vector_norm would avoid the tensor of squares, but its last bit may differ.
    rstd = average(x32.square().mean(dims, keepdim=True)).add_(epsilon).rsqrt_()
    normalized = (x32 * rstd).to(weight.dtype)
    return normalized.mul_(weight), rstd


def gradient_rms_norm(
    grad: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, average: Average = own
) -> tuple[Tensor, Tensor]:
    """Returns the gradients of x and of the weight."""
    h = weight.numel()
    # Use reshape, not view: without rotary embedding, attention returns the gradient of q and k with its own strides.
    grad = grad.reshape(-1, h).float()
    rstd = rstd.reshape(-1, 1)
    normalized = x.reshape(-1, h).float() * rstd
    product = grad * normalized
    grad_weight = product.sum(0).view_as(weight)
    w = weight.float().flatten()
    # dx = rstd * (g - n * mean(g * n)) with g = grad * w and n the normalised input; g * n = product * w.
    projection = average(product.mv(w).div_(h)).unsqueeze(-1)
    grad_x = (grad * w).addcmul_(normalized, projection, value=-1).mul_(rstd)
    return grad_x.view_as(x).to(x.dtype), grad_weight.to(weight.dtype)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float, average: Average, kernel: NormKernel) -> Tensor:
        out, rstd = kernel.compute_rms_norm(x, weight, epsilon, average)
        ctx.save_for_backward(x, weight, rstd)
        ctx.average, ctx.kernel = average, kernel
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        x, weight, rstd = ctx.saved_tensors
        return *ctx.kernel.gradient_rms_norm(grad, x, weight, rstd, ctx.average), None, None, None


def rms_norm(
    x: Tensor, weight: Tensor, epsilon: float, average: Average = own, kernel: NormKernel | None = None
) -> Tensor:
    """x / sqrt(mean(x^2) + epsilon) * weight, in the weight's dtype (Zhang and Sennrich, arXiv 1910.07467).

    The mean is over the dims that the weight has. average: see the note. kernel: default `separate`.
    """
    result: Tensor = _RMSNorm.apply(x, weight, epsilon, average, kernel or separate)
    return result


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float, kernel: NormKernel) -> Tensor:
        out, statistics = kernel.compute_layer_norm(x, weight, bias, epsilon)
        ctx.save_for_backward(x, weight, bias, *statistics)
        ctx.kernel = kernel
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None, None]:
        x, weight, bias, *statistics = ctx.saved_tensors
        return *ctx.kernel.gradient_layer_norm(grad, x, weight, bias, tuple(statistics)), None, None


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float, kernel: NormKernel | None = None
) -> Tensor:
    """(x - mean) / sqrt(var + epsilon) * weight + bias, in the weight's dtype (Ba et al., arXiv 1607.06450).

    kernel: default torch's operator.
    """
    x = x.to(weight.dtype)
    if kernel is None or kernel is separate:
        return F.layer_norm(x, x.shape[-1:], weight, bias, epsilon)
    result: Tensor = _LayerNorm.apply(x, weight, bias, epsilon, kernel)
    return result


def compute_layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Returns (`layer_norm` of x in the weight's dtype, (mean, 1 / standard deviation)) by the underlying operator."""
    out, mean, rstd = torch.ops.aten.native_layer_norm(x, x.shape[-1:], weight, bias, epsilon)
    return out, (mean, rstd)


def gradient_layer_norm(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, statistics: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns the gradients of x, of the weight and of the bias, if there is one."""
    wanted = [True, True, bias is not None]
    grad_x, grad_weight, grad_bias = torch.ops.aten.native_layer_norm_backward(
        grad, x, x.shape[-1:], *statistics, weight, bias, wanted
    )
    return grad_x, grad_weight, grad_bias


def compute_add_norm(
    x: Tensor, branch: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Returns (x + branch, the norm of this sum, (mean, 1 / standard deviation)).

    The norm is LayerNorm with bias, else RMSNorm, which has no mean and returns its one statistic twice.
    """
    total = x + branch
    if bias is None:
        out, rstd = compute_rms_norm(total, weight, epsilon)
        return total, out, (rstd, rstd)
    return total, *compute_layer_norm(total, weight, bias, epsilon)


def gradient_add_norm(
    grad: Tensor,
    grad_total: Tensor | None,
    total: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    statistics: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns the gradients of the sum, of the weight and of the bias, if there is one.

    grad: the gradient of the norm. grad_total: the gradient of the sum from its other readers; None if it has none.
    """
    grad_bias = None
    if bias is None:
        grad_x, grad_weight = gradient_rms_norm(grad, total, weight, statistics[1])
    else:
        grad_x, grad_weight, grad_bias = gradient_layer_norm(grad, total, weight, bias, statistics)
    return grad_x if grad_total is None else grad_x + grad_total, grad_weight, grad_bias


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, branch: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float, kernel: ResidualNorm
    ) -> tuple[Tensor, Tensor]:
        total, out, statistics = kernel.compute_add_norm(x, branch, weight, bias, epsilon)
        ctx.save_for_backward(total, weight, bias, *dict.fromkeys(statistics))
        ctx.kernel, ctx.branch_dtype = kernel, branch.dtype
        ctx.set_materialize_grads(False)
        return total, out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        (grad_total, grad), (total, weight, bias, *statistics) = grads, ctx.saved_tensors
        assert grad is not None
        both = statistics[0], statistics[-1]
        grad_x, *of_parameters = ctx.kernel.gradient_add_norm(grad, grad_total, total, weight, bias, both)
        return grad_x, grad_x.to(ctx.branch_dtype), *of_parameters, None, None


def add_norm(
    x: Tensor, branch: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float, kernel: NormKernel
) -> tuple[Tensor, Tensor]:
    """Returns (x + branch, its norm in the weight's dtype): of RMSNorm without bias, else of LayerNorm.

    x and branch have one shape; the sum has the wider of their dtypes. The kernel computes both in one operation if it
    can.
    """
    total_dtype = torch.promote_types(x.dtype, branch.dtype)
    # LayerNorm rounds its input to the weight's dtype first.
    fits = x.dtype == total_dtype and (bias is None or total_dtype == weight.dtype)
    if kernel.residual is not None and fits:
        result: tuple[Tensor, Tensor] = _AddNorm.apply(x, branch, weight, bias, epsilon, kernel.residual)
        return result
    total = x + branch
    if bias is None:
        return total, rms_norm(total, weight, epsilon, own, kernel)
    return total, layer_norm(total, weight, bias, epsilon, kernel)


separate = NormKernel(compute_rms_norm, gradient_rms_norm, compute_layer_norm, gradient_layer_norm)
