"""Activations of operations that give an element the same result at every place of a tensor: see [Note: fixed shapes]
in the package. Each is computed in fp32 and rounded once."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from megatron.kernels.ops import activation
from megatron.kernels.ops.activation import QUICK, Activation, Gated
from megatron.spec.mlp import GEGLU, GEGLU_TANH, GELU, GELU_TANH, QUICK_GEGLU, SQUARED_RELU, SWIGLU

_CUBIC = 0.044715  # of GELU's approximation (Hendrycks and Gimpel, arXiv 1606.08415)


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)), in the dtype of x; differentiable."""
    return (1.0 / (1.0 + (-x.to(_wide(x))).exp())).to(x.dtype)


def _silu(x: Tensor) -> Tensor:
    return x / (-x).exp_().add_(1.0)


def _quick_gelu(x: Tensor) -> Tensor:
    return x / (x * -QUICK).exp_().add_(1.0)


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
_OF_GATES = {
    SWIGLU: Composed(_silu, activation.SiLU()),
    GEGLU: _GELU,
    GEGLU_TANH: _GELU_TANH,
    QUICK_GEGLU: Composed(_quick_gelu, activation.QuickGELU()),
}
_OTHERS = {SQUARED_RELU: activation.squared_relu, GELU: _GELU, GELU_TANH: _GELU_TANH}


def activations(plain: Mapping[str, Activation]) -> Mapping[str, Activation]:
    """Returns activations of the same formulas. The first of `_OTHERS` consists of products and a maximum alone."""
    gated = {name: plain[name] for name in _OF_GATES}
    return MappingProxyType(
        {**_OTHERS, **{name: Gated(_OF_GATES[name], of.form) for name, of in gated.items() if isinstance(of, Gated)}}
    )
