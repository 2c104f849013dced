"""AdamW on flat tensors in host memory (Loshchilov and Hutter, arXiv 1711.05101), at the memory's speed.

In fp32 throughout torch's fused kernel already runs at that speed. With a gradient or a copy of the parameters in half
precision it needs conversions before and after; backends/cpu_adam.cpp does all of it in one pass, with the same arithmetic.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from megatron.base.log import get_logger
from megatron.kernels.backends import cpu_adam

PIECE = 1 << 18  # elements converted at a time: 5 MB of all the tensors, which stay in cache between torch's passes
GRADIENTS = (torch.float32, torch.bfloat16)
OUTPUTS = (torch.float32, torch.bfloat16, torch.float16)


def adamw_step(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    divisor: float = 1.0,
    out: Tensor | None = None,
) -> None:
    """Update `param` and its moments in place; `out`, where given, receives the rounded parameters. No communication.

    All are contiguous, flat, of one size, on the CPU. param, exp_avg, exp_avg_sq: fp32; grad: fp32 or bf16; out: bf16,
    fp16 or fp32, and not `param`. Gradients are divided by `divisor` first. `step` counts from 1: the first update is 1.
    Do not read `grad` afterwards: torch's kernel leaves the divided gradient there, ours does not write it.
    """
    flat = (param, grad, exp_avg, exp_avg_sq) if out is None else (param, grad, exp_avg, exp_avg_sq, out)
    assert all(t.shape == param.shape for t in flat), [t.shape for t in flat]
    assert param.dtype == exp_avg.dtype == exp_avg_sq.dtype == torch.float32, [t.dtype for t in flat]
    assert grad.dtype in GRADIENTS and (out is None or out.dtype in OUTPUTS), [t.dtype for t in flat]
    assert step >= 1, step
    if (grad.dtype == torch.float32 and out is None) or without_one_pass():
        separate(
            param, grad, exp_avg, exp_avg_sq, step=step, lr=lr, beta1=beta1, beta2=beta2, eps=eps,
            weight_decay=weight_decay, divisor=divisor, out=out,
        )  # fmt: skip
        return
    # In double precision, as torch does; the kernel rounds each to fp32.
    coefficients = (
        divisor,
        1.0 - lr * weight_decay,
        1.0 - beta1,
        beta2,
        1.0 - beta2,
        math.sqrt(1.0 - beta2**step),
        eps,
        -lr / (1.0 - beta1**step),
    )
    cpu_adam.step(param, grad, exp_avg, exp_avg_sq, out, coefficients)


def separate(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    divisor: float = 1.0,
    out: Tensor | None = None,
) -> None:
    """The reference, and what runs without a compiler: convert, torch's fused kernel, round. In fp32 the kernel alone."""
    count = torch.tensor(float(step))
    scale = None if divisor == 1.0 else torch.tensor(divisor, dtype=torch.float32)
    converts = grad.dtype != torch.float32 or out is not None
    piece = PIECE if converts else max(1, param.numel())
    rounded = [None] * len(param.split(piece)) if out is None else out.split(piece)
    tensors = (t.split(piece) for t in (param, grad, exp_avg, exp_avg_sq))
    for p, g, m, v, o in zip(*tensors, rounded, strict=True):
        torch._fused_adamw_(
            [p], [g.float()], [m], [v], [], [count], lr=lr, beta1=beta1, beta2=beta2, weight_decay=weight_decay, eps=eps,
            amsgrad=False, maximize=False, grad_scale=scale,
        )  # fmt: skip
        if o is not None:
            o.copy_(p)


@functools.cache
def without_one_pass() -> str | None:
    """Why half-precision gradients and copies take torch's kernel and conversions; None when one pass does. Logged once."""
    why = cpu_adam.missing()
    if why:
        get_logger(__name__).warning("CPU Adam: torch's kernel with conversions, not one pass over memory: %s", why)
    return why
