"""Gates of the outputs of attention and of delta nets: x times the sigmoid, or the SiLU, of a gate of its size."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class _OutputGate(torch.autograd.Function):
    """Saves both inputs as they are, and computes the function of the gate again in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, silu: bool) -> Tensor:
        ctx.save_for_backward(x, gate)
        ctx.silu = silu
        gate = gate.float()
        return ((F.silu if silu else torch.sigmoid)(gate) * x).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, gate = ctx.saved_tensors
        gate32 = gate.float()
        sigmoid = gate32.sigmoid()
        factor = gate32 * sigmoid if ctx.silu else sigmoid.clone()
        grad_x = (factor * grad).to(x.dtype)
        # The derivative of the sigmoid is s (1 - s), that of SiLU s + silu (1 - s).
        slope = factor.mul_(1 - sigmoid)
        if ctx.silu:
            slope.add_(sigmoid)
        return grad_x, slope.mul_(x).mul_(grad).to(gate.dtype), None


def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    """Returns x * sigmoid(gate) in the dtype of x, computed in fp32."""
    result: Tensor = _OutputGate.apply(x, gate, False)
    return result


def silu_gate(x: Tensor, gate: Tensor) -> Tensor:
    """Returns x * silu(gate) in the dtype of x, computed in fp32."""
    result: Tensor = _OutputGate.apply(x, gate, True)
    return result
