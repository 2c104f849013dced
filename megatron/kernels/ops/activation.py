"""MLP activations. The gated one keeps only its input and recomputes silu in backward."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)  # silu(gate) rounds first, as in Hugging Face's MLP

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor]:
        (x,) = ctx.saved_tensors
        gate, up = x.chunk(2, dim=-1)
        grad_x = torch.empty_like(x)
        grad_gate, grad_up = grad_x.chunk(2, dim=-1)
        torch.mul(grad, F.silu(gate), out=grad_up)
        grad_gate.copy_(torch.ops.aten.silu_backward(grad * up, gate))
        return (grad_x,)


def swiglu(x: Tensor) -> Tensor:
    """[..., 2 f] (gate then up) -> silu(gate) * up of shape [..., f] (Shazeer, arXiv 2002.05202)."""
    result: Tensor = _SwiGLU.apply(x)
    return result


def gelu(x: Tensor) -> Tensor:
    """Exact GELU."""
    return F.gelu(x)


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU's tanh approximation, as GPT-2 has it."""
    return F.gelu(x, approximate="tanh")


def squared_relu(x: Tensor) -> Tensor:
    """relu(x)^2 (So et al., arXiv 2109.08668)."""
    return F.relu(x).square()
