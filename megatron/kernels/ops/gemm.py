"""GEMMs of linear layers in the activation dtype.

CPUs without bf16 (or fp16) instructions multiply such matrices many times slower than fp32 ones: on an AVX2 machine a
[1024, 1408] x [1408, 512] GEMM took 1824 ms in bf16 and 58 ms in fp32, including conversions. On such CPUs the GEMM
runs in fp32 and is rounded once, like a native half-precision GEMM with fp32 accumulation.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., in], weight [out, in], bias [out] -> [..., out]."""
    if not slow_half(x.device, x.dtype):
        return F.linear(x, weight, bias)
    return F.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)


def input_grad(grad: Tensor, weight: Tensor) -> Tensor:
    """grad [..., out], weight [out, in] -> gradient of the input [..., in]."""
    if not slow_half(grad.device, grad.dtype):
        return grad @ weight
    return (grad.float() @ weight.float()).to(grad.dtype)


class RowGemm:
    """x [rows, in] -> x @ matrix + bias, for several blocks of rows; a necessary conversion of the matrix happens
    once."""

    def __init__(self, matrix: Tensor, bias: Tensor | None = None) -> None:
        """matrix [in, out] with any strides; bias [out]."""
        self._wide = slow_half(matrix.device, matrix.dtype)
        self.matrix = matrix.float() if self._wide else matrix
        self._bias = bias.float() if self._wide and bias is not None else bias

    @property
    def columns(self) -> int:
        """Number of columns of the result."""
        return self.matrix.shape[1]

    def __call__(self, x: Tensor, out: Tensor) -> None:
        """Writes the result into `out` [rows, out]. Not differentiable."""
        if self._wide:
            x = x.float()
            wide = x @ self.matrix if self._bias is None else torch.addmm(self._bias, x, self.matrix)
            out.copy_(wide)
        elif self._bias is None:
            torch.mm(x, self.matrix, out=out)
        else:
            torch.addmm(self._bias, x, self.matrix, out=out)


def slow_half(device: torch.device, dtype: torch.dtype) -> bool:
    """Returns whether GEMMs of this dtype should run in fp32, because the CPU has no instructions for the dtype."""
    return device.type == "cpu" and dtype in _SLOW_ON_CPU


def _without_instructions() -> set[torch.dtype]:
    # torch without oneDNN, as on Apple's CPUs, has plain loops for half precision
    if not torch.backends.mkldnn.is_available():
        return {torch.bfloat16, torch.float16}
    supported = {
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported(),
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported(),
    }
    return {dtype for dtype, fast in supported.items() if not fast}


_SLOW_ON_CPU = _without_instructions()  # instructions do not change while a process runs
