"""Activations of operations that give an element the same result at every place of a tensor: see [Note: fixed shapes]
in the package. Each is computed in fp32 and rounded once."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from megatron.kernels.ops import activation
from megatron.kernels.ops.activation import Activation, Gated
from megatron.spec.mlp import GEGLU, GEGLU_TANH, GELU, GELU_TANH, SQUARED_RELU, SWIGLU

_CUBIC = 0.044715  # of GELU's approximation (Hendrycks and Gimpel, arXiv 1606.08415)


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)), in the dtype of x; differentiable."""
    return (1.0 / (1.0 + (-x.to(_wide(x))).exp())).to(x.dtype)


def _silu(x: Tensor) -> Tensor:
    return x / (-x).exp_().add_(1.0)


def _gelu(x: Tensor) -> Tensor:
    return (x * math.sqrt(0.5)).erf_().add_(1.0).mul_(x).mul_(0.5)


def _gelu_tanh(x: Tensor) -> Tensor:
    cube = (x * x).mul_(x).mul_(_CUBIC)
    return cube.add_(x).mul_(math.sqrt(2.0 / math.pi)).tanh_().add_(1.0).mul_(x).mul_(0.5)


class Composed(Activation):
    """An activation with another forward and the gradient of `plain`."""

    def __init__(self, function: Callable[[Tensor], Tensor], plain: Activation) -> None:
        """function: of a tensor in fp32 or wider, which it does not change."""
        self.function, self._plain = function, plain

    def __call__(self, x: Tensor) -> Tensor:
        """See Activation."""
        result: Tensor = _Composed.apply(x, self)
        return result

    def gradient_of_input(self, grad: Tensor, x: Tensor) -> Tensor:
        """See Activation."""
        return self._plain.gradient_of_input(grad, x)


class _Composed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, composed: Composed) -> Tensor:
        ctx.save_for_backward(x)
        ctx.composed = composed
        return composed.function(x.to(_wide(x))).to(x.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return ctx.composed.gradient_of_input(grad, x), None


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


_GELU = Composed(_gelu, activation.gelu)
_GELU_TANH = Composed(_gelu_tanh, activation.gelu_tanh)
ACTIVATIONS = MappingProxyType(
    {
        SWIGLU: Gated(Composed(_silu, activation.SiLU())),
        GEGLU: Gated(_GELU),
        GEGLU_TANH: Gated(_GELU_TANH),
        SQUARED_RELU: activation.squared_relu,  # products and a maximum alone
        GELU: _GELU,
        GELU_TANH: _GELU_TANH,
    }
)
