"""Vectors of length one, over the last dim, times a factor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _L2Norm(torch.autograd.Function):
    """Saves the input and one number per vector."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float, epsilon: float) -> Tensor:
        x32 = x.float()
        inverse = x32.square().sum(-1, keepdim=True).add_(epsilon).rsqrt_()
        ctx.save_for_backward(x, inverse)
        ctx.factor = factor
        return (x32 * (inverse * factor)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        x, inverse = ctx.saved_tensors
        normalized = x.float() * inverse
        grad = grad.float()
        along = (grad * normalized).sum(-1, keepdim=True)
        return grad.addcmul(normalized, along, value=-1).mul_(inverse * ctx.factor).to(x.dtype), None, None


def l2_norm(x: Tensor, factor: float = 1.0, epsilon: float = 1e-6) -> Tensor:
    """Returns factor * x / sqrt(sum(x^2) + epsilon) in the dtype of x, computed in fp32."""
    result: Tensor = _L2Norm.apply(x, factor, epsilon)
    return result
