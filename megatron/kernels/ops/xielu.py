"""xIELU (Huang and Schlag, arXiv 2411.13010), an activation whose curvatures on both sides of zero are trained.

    p x^2 + b x                   where x is positive, with p = softplus(alpha_p)
    n (exp(x) - 1 - x) + b x      elsewhere, with n = b + softplus(alpha_n)

transformers bounds the exponential's argument by -1e-6 and not by 0, which changes results by less than 1e-6, and the
gradient only between -1e-6 and 0, where it would no longer be the slope of the function.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.spec.mlp import XIELU_BETA


def compute_xielu(x: Tensor, alpha_p: Tensor, alpha_n: Tensor) -> Tensor:
    """[...], [1], [1] -> [...]. Work space: one tensor as large as the result."""
    positive, negative = _curvatures(alpha_p, alpha_n)
    part = x.clamp(max=0.0)
    out = part.expm1().sub_(part).mul_(negative)
    torch.clamp(x, min=0.0, out=part)
    return out.add_(part.square_().mul_(positive)).add_(x, alpha=XIELU_BETA)


def gradient_xielu(grad: Tensor, x: Tensor, alpha_p: Tensor, alpha_n: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of x and of both numbers, from that of the result. Work space: one tensor as large as the
    result."""
    positive, negative = _curvatures(alpha_p, alpha_n)
    part = x.clamp(max=0.0)
    slope = part.expm1()
    of_negative = part.neg_().add_(slope).mul_(grad).sum()
    torch.clamp(x, min=0.0, out=part)
    slope.mul_(negative).add_(part.mul_(2.0 * positive)).add_(XIELU_BETA).mul_(grad)
    torch.clamp(x, min=0.0, out=part)
    of_positive = part.square_().mul_(grad).sum()
    # The derivative of softplus is the sigmoid. The sums are made in fp32 and rounded, as gradients of parameters are.
    return slope, alpha_p.sigmoid() * of_positive, alpha_n.sigmoid() * of_negative


def _curvatures(alpha_p: Tensor, alpha_n: Tensor) -> tuple[Tensor, Tensor]:
    """p and n in fp32 or wider. They have no dims, so that a product with them has the dtype of its other operand."""
    dtype = torch.promote_types(alpha_p.dtype, torch.float32)
    positive, negative = (F.softplus(alpha.to(dtype)).squeeze() for alpha in (alpha_p, alpha_n))
    return positive, negative + XIELU_BETA
