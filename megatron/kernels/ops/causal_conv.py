"""A causal depthwise convolution over the tokens, and SiLU: each channel mixes the last few tokens by weights of its
own, before the delta rule (`delta_rule.py`)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def causal_conv(x: Tensor, weight: Tensor, *, window: Tensor | None = None, starts: Tensor | None = None) -> Tensor:
    """Returns silu(sum over j of weight[:, 0, j] * x at j - (k - 1) tokens further), [s, b, c] in the dtype of x.

    x [s, b, c]. weight [c, 1, k], as that of torch's Conv1d; its last number belongs to the token itself. window
    [k - 1, b, c]: the inputs before x, see `last_inputs`; zeros if None. starts [b, s], bool: True at the first token
    of a document, which sees no input before it. Sums are computed in fp32 and rounded once. Kept for the backward are
    the arguments as they are.
    """
    result: Tensor = _CausalConv.apply(x, weight, window, starts)
    return result


def last_inputs(x: Tensor, width: int, *, window: Tensor | None = None, starts: Tensor | None = None) -> Tensor:
    """Returns the `window` [width - 1, b, c] of the tokens behind x, with zeros for inputs of documents that have ended.

    The arguments are those of `causal_conv`, with a weight of `width` numbers for each channel.
    """
    tail = _behind_window(x[max(len(x) - (width - 1), 0) :], width, window)[-(width - 1) :]
    if starts is None:
        return tail
    first = F.pad(starts.int(), (width - 1, 0))[:, -(width - 1) :]
    later = first.flip(1).cumsum(1).flip(1) - first  # documents that begin behind an input
    return tail.masked_fill((later > 0).t().unsqueeze(-1), 0)


class _CausalConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, window: Tensor | None, starts: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight, window, starts)
        total = _sums(x, weight, window, starts)
        return total.mul_(total.sigmoid()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:
        x, weight, window, starts = ctx.saved_tensors
        width = weight.shape[2]
        total = _sums(x, weight, window, starts)
        gate = total.sigmoid()
        # The derivative of silu: gate * (1 + total * (1 - gate)).
        grad_total = total.mul_(1 - gate).add_(1).mul_(gate).mul_(grad)
        inputs = _behind_window(x, width, window)
        grad_inputs = torch.zeros(inputs.shape, dtype=torch.float32, device=x.device)
        grad_weight = torch.empty(weight.shape, dtype=torch.float32, device=x.device)
        for tap, seen in enumerate(_visible(starts, width)):
            visible = grad_total if seen is None else grad_total * seen
            grad_weight[:, 0, tap] = torch.einsum("sbc,sbc->c", visible, inputs[tap : tap + len(x)].float())
            grad_inputs[tap : tap + len(x)].addcmul_(visible, weight[:, 0, tap].float())
        grad_window = None if window is None else grad_inputs[: width - 1].to(window.dtype)
        return grad_inputs[width - 1 :].to(x.dtype), grad_weight.to(weight.dtype), grad_window, None


def _sums(x: Tensor, weight: Tensor, window: Tensor | None, starts: Tensor | None) -> Tensor:
    """Returns the convolution [s, b, c] in fp32."""
    width = weight.shape[2]
    inputs = _behind_window(x, width, window)
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for tap, seen in enumerate(_visible(starts, width)):
        part = inputs[tap : tap + len(x)]
        total.addcmul_(part if seen is None else part * seen, weight[:, 0, tap])
    return total


def _behind_window(x: Tensor, width: int, window: Tensor | None) -> Tensor:
    """[s, b, c] -> [width - 1 + s, b, c]."""
    if window is None:
        window = x.new_zeros(width - 1, *x.shape[1:])
    return torch.cat([window.to(x.dtype), x])


def _visible(starts: Tensor | None, width: int) -> list[Tensor | None]:
    """Returns for each tap [s, b, 1], 1 where the input that a token sees through it belongs to its document and 0
    elsewhere, or None where all do."""
    if starts is None:
        return [None] * width
    taps: list[Tensor | None] = [None]
    crossed = torch.zeros_like(starts)
    for distance in range(1, width):
        # The input `distance` tokens back is invisible if a document starts at one of the tokens since.
        crossed = crossed.clone()
        crossed[:, distance - 1 :] |= starts[:, : max(starts.shape[1] - (distance - 1), 0)]
        taps.insert(0, ~crossed.t().unsqueeze(-1))
    return taps
