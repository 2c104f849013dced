"""Weight gradients of linear layers, accumulated into an fp32 buffer.

If fused, the GEMM itself accumulates, so the gradient never exists in the activation dtype and is never read back.
Torch supports this for fp32 on every device and, with an fp32 output of bf16/fp16 operands, on CUDA. A CPU whose
half-precision GEMMs are slow (see gemm.py) runs them in fp32 anyway, so fusing is possible there, too. Otherwise a GEMM
is followed by an addition.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megatron.base.errors import first_line
from megatron.kernels.ops.gemm import slow_half

_TRIAL_SIZE = 16

# (main_grad [out, in] fp32, grad of the output [n, out], input [n, in], overwrite instead of accumulate)
WeightGrad = Callable[[Tensor, Tensor, Tensor, bool], None]


def separate(main_grad: Tensor, grad: Tensor, x: Tensor, overwrite: bool) -> None:
    """The reference: the gradient in the activation dtype, then copied or added."""
    weight_grad = grad.t() @ x
    if overwrite:
        main_grad.copy_(weight_grad)
    else:
        main_grad.add_(weight_grad)


def fused(main_grad: Tensor, grad: Tensor, x: Tensor, overwrite: bool) -> None:
    """For fp32 operands: the GEMM writes or accumulates in place."""
    if overwrite:
        torch.mm(grad.t(), x, out=main_grad)
    else:
        main_grad.addmm_(grad.t(), x)


def fused_upcast(main_grad: Tensor, grad: Tensor, x: Tensor, overwrite: bool) -> None:
    """For half-precision operands, converted to fp32: the GEMM writes or accumulates in place."""
    fused(main_grad, grad.float(), x.float(), overwrite)


def fused_mixed(main_grad: Tensor, grad: Tensor, x: Tensor, overwrite: bool) -> None:
    """For bf16 or fp16 operands with fp32 accumulation and output, on CUDA only."""
    if overwrite:
        torch.mm(grad.t(), x, out_dtype=torch.float32, out=main_grad)
    else:
        torch.addmm(main_grad, grad.t(), x, out_dtype=torch.float32, out=main_grad)


def failure_of_mixed(device: torch.device, dtype: torch.dtype) -> str | None:
    """Returns the reason why `fused_mixed` cannot run here, or None if it can: it is tried on a small matrix."""
    ones = torch.ones(_TRIAL_SIZE, _TRIAL_SIZE, dtype=dtype, device=device)
    main_grad = torch.zeros(_TRIAL_SIZE, _TRIAL_SIZE, device=device)
    try:
        for overwrite in (True, False):
            fused_mixed(main_grad, ones, ones, overwrite)
    except (RuntimeError, TypeError) as error:
        return f"torch {torch.__version__} cannot add a product to an fp32 gradient here: {first_line(error)}"
    if main_grad.ne(2 * _TRIAL_SIZE).any():
        return f"torch {torch.__version__} adds a product to an fp32 gradient wrongly here"
    return None


def choose(fusion: bool, device: torch.device, dtype: torch.dtype) -> tuple[WeightGrad, str | None]:
    """Returns the kernel, and the reason why accumulation is not fused (None if it is)."""
    if not fusion:
        return separate, "turned off by --no-gradient-accumulation-fusion"
    if dtype == torch.float32:
        return fused, None
    if device.type == "cuda":
        failure = failure_of_mixed(device, dtype)
        return (fused_mixed, None) if failure is None else (separate, failure)
    if slow_half(device, dtype):
        return fused_upcast, None
    return separate, f"torch has no {str(dtype).removeprefix('torch.')} GEMM with fp32 output on {device.type}"
