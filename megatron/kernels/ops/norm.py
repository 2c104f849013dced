"""RMSNorm and LayerNorm over the last dim.

The reference rounds where Hugging Face's modules do: statistics and normalisation in fp32, cast to the activation
dtype, then multiplied by the weight. Backward is in fp32 and saves only the input and one number per row.

`compute_*` and `gradient_*` are forward and backward without autograd, for callers that recompute a norm in backward.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def compute_rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Returns (normalized x in the weight's dtype, 1 / root mean square [..., 1] in fp32)."""
    x32 = x.float()
    # Sum as Hugging Face does: vector_norm would avoid the tensor of squares, but its last bit may differ.
    rstd = x32.square().mean(-1, keepdim=True).add_(epsilon).rsqrt_()
    normalized = (x32 * rstd).to(weight.dtype)
    return normalized.mul_(weight), rstd


def gradient_rms_norm(grad: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the gradients of x and of the weight."""
    h = x.shape[-1]
    # Use reshape, not view: without rotary embedding, attention returns the gradient of q and k with its own strides.
    grad = grad.reshape(-1, h).float()
    rstd = rstd.reshape(-1, 1)
    normalized = x.reshape(-1, h).float() * rstd
    product = grad * normalized
    grad_weight = product.sum(0)
    w = weight.float()
    # dx = rstd * (g - n * mean(g * n)) with g = grad * w and n the normalised input; g * n = product * w.
    projection = product.mv(w).div_(h).unsqueeze(-1)
    grad_x = (grad * w).addcmul_(normalized, projection, value=-1).mul_(rstd)
    return grad_x.view_as(x).to(x.dtype), grad_weight.to(weight.dtype)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        out, rstd = compute_rms_norm(x, weight, epsilon)
        ctx.save_for_backward(x, weight, rstd)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        return *gradient_rms_norm(grad, *ctx.saved_tensors), None


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """x / sqrt(mean(x^2) + epsilon) * weight, in the weight's dtype (Zhang and Sennrich, arXiv 1910.07467)."""
    result: Tensor = _RMSNorm.apply(x, weight, epsilon)
    return result


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float) -> Tensor:
    """(x - mean) / sqrt(var + epsilon) * weight + bias, in the weight's dtype (Ba et al., arXiv 1607.06450)."""
    return F.layer_norm(x.to(weight.dtype), x.shape[-1:], weight, bias, epsilon)


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
