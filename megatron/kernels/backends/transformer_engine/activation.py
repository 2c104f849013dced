"""Transformer Engine's activations, each way in one kernel. They compute in fp32 and round once.

Its gated activations apply the inner one to the first half of the channels, as those of ops/activation.py do. Its GELU
is the tanh approximation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformer_engine.pytorch import cpp_extensions as engine

from megatron.kernels.ops import activation as own
from megatron.kernels.ops.activation import Activation


class EngineActivation(Activation):
    """An activation with or without a gate. It saves only its input."""

    def __init__(self, plain: Activation, forward: Callable[..., Tensor], backward: Callable[..., Tensor]) -> None:
        """plain: the same in torch, for empty tensors. forward(x, quantizer), backward(gradient, x, quantizer): without
        quantizers they return plain tensors."""
        self._plain = plain
        self._forward = forward
        self._backward = backward

    def __call__(self, x: Tensor) -> Tensor:
        """See Activation."""
        if not x.numel():
            return self._plain(x)  # an expert without tokens
        if not torch.is_grad_enabled():
            return self._forward(x, None)
        result: Tensor = _Apply.apply(x, self)
        return result

    def gradient_of_input(self, grad: Tensor, x: Tensor) -> Tensor:
        """See Activation."""
        if not x.numel():
            return self._plain.gradient_of_input(grad, x)
        return self._backward(grad.to(x.dtype), x, None)


class _Apply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, activation: EngineActivation) -> Tensor:
        ctx.save_for_backward(x)
        ctx.activation = activation
        return activation(x)  # without gradients

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        gradient: Tensor = ctx.activation.gradient_of_input(grad, x)
        return gradient, None


swiglu = EngineActivation(own.swiglu, engine.swiglu, engine.dswiglu)
geglu_tanh = EngineActivation(own.geglu_tanh, engine.geglu, engine.dgeglu)
gelu_tanh = EngineActivation(own.gelu_tanh, engine.gelu, engine.dgelu)
squared_relu = EngineActivation(own.squared_relu, engine.srelu, engine.dsrelu)
