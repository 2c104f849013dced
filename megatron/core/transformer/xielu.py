"""The trained activation of an MLP, as a module and as an operation that the linear layer behind it repeats."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.transformer.context import Build
from megatron.kernels.ops.xielu import compute_xielu, gradient_xielu
from megatron.spec.mlp import XieluSpec


class Xielu(nn.Module):
    """The two numbers of xIELU. Every rank of tp has the part of their gradients that comes from its inner channels
    (`ParamSpec.input_sharding`)."""

    def __init__(self, build: Build, spec: XieluSpec) -> None:
        super().__init__()
        parameters = {name: build.parameter(parameter) for name, parameter in spec.parameters()}
        self.alpha_p, self.alpha_n = parameters["alpha_p"], parameters["alpha_n"]


class XieluPrologue:
    """xIELU as a Prologue of core/tensor_parallel/gemm_last.py. It saves its input."""

    def __init__(self, numbers: Xielu) -> None:
        self._numbers = numbers

    def __call__(self, x: Tensor) -> Tensor:
        """See Prologue."""
        result: Tensor = _Apply.apply(*self.operands(x))
        return result

    def operands(self, x: Tensor) -> tuple[Tensor, ...]:
        """See Prologue."""
        return x, self._numbers.alpha_p, self._numbers.alpha_n

    def compute(self, *operands: Tensor) -> tuple[Tensor, Any]:
        """See Prologue."""
        return compute_xielu(*operands), None

    def gradient(self, grad: Tensor, saved: Any, *operands: Tensor) -> tuple[Tensor | None, ...]:
        """See Prologue."""
        return gradient_xielu(grad, *operands)


class _Apply(torch.autograd.Function):
    """(x, alpha_p, alpha_n) -> xIELU."""

    @staticmethod
    def forward(ctx: Any, *operands: Tensor) -> Tensor:
        ctx.save_for_backward(*operands)
        return compute_xielu(*operands)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return gradient_xielu(grad, *ctx.saved_tensors)
