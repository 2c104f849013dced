"""AdamW on flat tensors (Loshchilov and Hutter, arXiv 1711.05101), at the bandwidth of the memory.

In host memory: with fp32 tensors only, torch's fused kernel already reaches that bandwidth. With half-precision
gradients or a half-precision copy of the parameters it needs conversions before and after; backends/cpu_adam.cpp does
everything in one pass, with the same arithmetic. On a GPU backends/triton/adam.py does.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from megatron.base.log import get_logger
from megatron.kernels.backends import cpu_adam
from megatron.kernels.ops.update_run import UpdateRun

PIECE = 1 << 18  # elements converted at a time: 5 MB of all the tensors, which stay in cache between torch's passes
GRADIENTS = (torch.float32, torch.bfloat16)
OUTPUTS = (torch.float32, torch.bfloat16, torch.float16)


class Coefficients(NamedTuple):
    """The scalars of one step. step: 1 for the first update. decoupled_lr: the learning rate of runs that are
    decoupled."""

    step: int
    lr: float
    decoupled_lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float


class DeviceAdamW(Protocol):
    """AdamW of flat tensors on a device, whose runs never change, in one pass."""

    def step(
        self,
        param: Tensor,
        grad: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        out: Tensor | None,
        gate: Tensor,
        numbers: Coefficients,
    ) -> None:
        """Updates `param` and its moments, all fp32, in place; `out`, if given, receives the rounded parameters.

        grad: fp32; it is divided by the first number of the gate, and not overwritten. gate: fp32 [3] on the device.
        Nothing changes if the second and the third number are both not 0, but `out` is written all the same.
        """
        ...


MakeAdamW = Callable[[Sequence[UpdateRun], torch.device], DeviceAdamW]


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
    """Updates `param` and its moments in place; `out`, if given, receives the rounded parameters. No communication.

    All tensors are contiguous, flat, of equal size and on the CPU. param, exp_avg and exp_avg_sq are fp32; grad is fp32
    or bf16; out is bf16, fp16 or fp32, and not `param`. Gradients are divided by `divisor` first. `step` counts from 1.
    Do not read `grad` afterwards: torch's kernel overwrites it with the divided gradient, the one-pass kernel does not.
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
    # Computed in double precision, as in torch; the kernel rounds each coefficient to fp32.
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
    """The reference, and the fallback without a compiler: convert, run torch's fused kernel, round. fp32 needs no
    copies.
    """
    count = torch.tensor(float(step))
    scale = None if divisor == 1.0 else torch.tensor(divisor, dtype=torch.float32)
    converts = grad.dtype != torch.float32 or out is not None
    piece = PIECE if converts else max(1, param.numel())
    rounded = [None] * len(param.split(piece)) if out is None else out.split(piece)
    tensors = (t.split(piece) for t in (param, grad, exp_avg, exp_avg_sq))
    for p, g, m, v, o in zip(*tensors, rounded, strict=True):
        torch._fused_adamw_(
            [p], [g.float()], [m], [v], [], [count], lr=lr, beta1=beta1, beta2=beta2, weight_decay=weight_decay,
            eps=eps, amsgrad=False, maximize=False, grad_scale=scale,
        )  # fmt: skip
        if o is not None:
            o.copy_(p)


@functools.cache
def without_one_pass() -> str | None:
    """Returns why half-precision tensors need torch's kernel with conversions, or None if one pass suffices. Logged
    once.
    """
    why = cpu_adam.missing()
    if why:
        get_logger(__name__).warning("CPU Adam: torch's kernel with conversions, not one pass over memory: %s", why)
    return why
