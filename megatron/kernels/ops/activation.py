"""MLP activations. A gated activation saves only its input, and computes the activation of its gate again in backward.

An activation is called like a function. `compute` and `gradient` are its forward and backward without autograd, for a
GEMM that consumes its output and recomputes it in backward (core/tensor_parallel/gemm_last.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.spec.mlp import PLAIN_GATE, GateForm

QUICK = 1.702  # of the approximation of GELU by a sigmoid


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

    def gradient(self, grad: Tensor, saved: None, x: Tensor) -> tuple[Tensor, ...]:
        """See Prologue."""
        return (self.gradient_of_input(grad, x),)


class Gated(Activation):
    """[..., 2 f] (gate then up) -> inner(gate) * up of shape [..., f] (Shazeer, arXiv 2002.05202).

    form: of gate and up, which apply before.
    """

    def __init__(self, inner: Activation, form: GateForm = PLAIN_GATE) -> None:
        self.inner, self.form = inner, form

    def __call__(self, x: Tensor) -> Tensor:
        """See Activation."""
        if not torch.is_grad_enabled():
            return self.product(x)
        result: Tensor = _Gated.apply(x, self)
        return result

    def product(self, x: Tensor) -> Tensor:
        """Returns the activation of x, where no gradient is recorded."""
        gate, up = self._operands(x)
        return self.inner(gate).mul_(up)  # the inner activation rounds first, as in Hugging Face's MLP

    def gradient_of_input(self, grad: Tensor, x: Tensor) -> Tensor:
        """See Activation."""
        gate, up = self._operands(x)
        grad_x = torch.empty_like(x)
        grad_gate, grad_up = grad_x.chunk(2, dim=-1)
        torch.mul(grad, self.inner(gate), out=grad_up)
        through = grad * up
        del up
        grad_gate.copy_(self.inner.gradient_of_input(through, gate))
        del through, gate
        if self.form.limit is not None:
            raw_gate, raw_up = x.chunk(2, dim=-1)
            grad_gate.masked_fill_(raw_gate > self.form.limit, 0.0)
            grad_up.masked_fill_(raw_up.abs() > self.form.limit, 0.0)
        return grad_x

    def _operands(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the gate and the other factor, [..., f] each: views of x where it is plain."""
        (gate, up), limit, offset = x.chunk(2, dim=-1), self.form.limit, self.form.offset
        if limit is not None:
            return gate.clamp(max=limit), up.clamp(-limit, limit).add_(offset)
        return gate, up if offset == 0.0 else up + offset


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, activation: Gated) -> Tensor:
        ctx.save_for_backward(x)
        ctx.activation = activation
        return activation.product(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        gradient: Tensor = ctx.activation.gradient_of_input(grad, x)
        return gradient, None


class SiLU(Activation):
    """x * sigmoid(x) (Elfwing et al., arXiv 1702.03118)."""

    def __call__(self, x: Tensor) -> Tensor:
        """See Activation."""
        return F.silu(x)

    def gradient_of_input(self, grad: Tensor, x: Tensor) -> Tensor:
        """See Activation."""
        result: Tensor = torch.ops.aten.silu_backward(grad, x)
        return result


class QuickGELU(Activation):
    """x * sigmoid(1.702 x), an approximation of GELU (Hendrycks and Gimpel, arXiv 1606.08415)."""

    def __call__(self, x: Tensor) -> Tensor:
        """See Activation."""
        return (QUICK * x).sigmoid_() * x

    def gradient_of_input(self, grad: Tensor, x: Tensor) -> Tensor:
        """See Activation."""
        share = (QUICK * x).sigmoid_()
        slope = (1.0 - share).mul_(x).mul_(QUICK).add_(1.0).mul_(share)
        return slope.mul_(grad)


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


gelu, gelu_tanh, squared_relu = GELU("none"), GELU("tanh"), SquaredReLU()
swiglu, geglu, geglu_tanh, quick_geglu = Gated(SiLU()), Gated(gelu), Gated(gelu_tanh), Gated(QuickGELU())
