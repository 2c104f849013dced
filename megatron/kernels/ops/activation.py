"""MLP activations. The gated activation saves only its input and recomputes silu in backward.

An activation is called like a function. `compute` and `gradient` are its forward and backward without autograd, for a
GEMM that consumes its output and recomputes it in backward (core/tensor_parallel/gemm_last.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def _swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)  # silu(gate) rounds first, as in Hugging Face's MLP


def _swiglu_gradient(grad: Tensor, x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    grad_x = torch.empty_like(x)
    grad_gate, grad_up = grad_x.chunk(2, dim=-1)
    torch.mul(grad, F.silu(gate), out=grad_up)
    grad_gate.copy_(torch.ops.aten.silu_backward(grad * up, gate))
    return grad_x


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return _swiglu(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return _swiglu_gradient(grad, x)


class Activation(ABC):
    """[..., w] -> [..., f]. The base class of activations implements Prologue of core/tensor_parallel/gemm_last.py."""

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """Returns the activation of x; differentiable."""

    @abstractmethod
    def gradient_of_input(self, grad: Tensor, x: Tensor) -> Tensor:
        """Returns the gradient of x, given the gradient `grad` of the output; not differentiable."""

    def operands(self, x: Tensor) -> tuple[Tensor, ...]:
        """See Prologue."""
        return (x,)

    def compute(self, x: Tensor) -> tuple[Tensor, None]:
        """See Prologue."""
        return self(x), None

    def gradient(self, grad: Tensor, rest: None, x: Tensor) -> tuple[Tensor, ...]:
        """See Prologue."""
        return (self.gradient_of_input(grad, x),)


class SwiGLU(Activation):
    """[..., 2 f] (gate then up) -> silu(gate) * up of shape [..., f] (Shazeer, arXiv 2002.05202)."""

    def __call__(self, x: Tensor) -> Tensor:
        """See Activation."""
        result: Tensor = _SwiGLU.apply(x)
        return result

    def gradient_of_input(self, grad: Tensor, x: Tensor) -> Tensor:
        """See Activation."""
        return _swiglu_gradient(grad, x)


class GELU(Activation):
    """Exact GELU, or its tanh approximation as GPT-2 has it."""

    def __init__(self, approximate: str) -> None:
        """`approximate`: "none" or "tanh"."""
        self._approximate = approximate

    def __call__(self, x: Tensor) -> Tensor:
        """See Activation."""
        return F.gelu(x, approximate=self._approximate)

    def gradient_of_input(self, grad: Tensor, x: Tensor) -> Tensor:
        """See Activation."""
        result: Tensor = torch.ops.aten.gelu_backward(grad, x, approximate=self._approximate)
        return result


class SquaredReLU(Activation):
    """relu(x)^2 (So et al., arXiv 2109.08668)."""

    def __call__(self, x: Tensor) -> Tensor:
        """See Activation."""
        return F.relu(x).square()

    def gradient_of_input(self, grad: Tensor, x: Tensor) -> Tensor:
        """See Activation."""
        positive = F.relu(x)
        result: Tensor = torch.ops.aten.threshold_backward(grad * (2 * positive), positive, 0)
        return result


swiglu, gelu, gelu_tanh, squared_relu = SwiGLU(), GELU("none"), GELU("tanh"), SquaredReLU()
