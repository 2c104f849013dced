"""Gated activations, each way in one pass: the interface and the rounding of ops/activation.py's Gated.

Activations without a gate are single kernels of torch already, which move the same bytes.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.kernels.backends.triton.rows import as_rows
from megatron.kernels.ops.activation import Activation, Gated, SiLU, gelu, gelu_tanh

BLOCK, WARPS = 1024, 4  # channels and warps of a program: 8 channels for each thread
SLOPE = tl.constexpr(2.0 * math.sqrt(2.0 / math.pi))  # of GELU's tanh form, which is x sigmoid(SLOPE (x + CUBIC x^3))
CUBIC = tl.constexpr(0.044715)
ROOT_HALF = tl.constexpr(math.sqrt(0.5))
DENSITY = tl.constexpr(1.0 / math.sqrt(2.0 * math.pi))


@triton.jit
def _inner(x, KIND: tl.constexpr):
    """Returns the activation of a gate in fp32, and its derivative."""
    if KIND == "silu":
        share = 1.0 / (1.0 + tl.exp(-x))
        slope = share * (1.0 + x * (1.0 - share))
    elif KIND == "gelu":
        share = 0.5 * (1.0 + tl.erf(x * ROOT_HALF))
        slope = share + x * DENSITY * tl.exp(-0.5 * x * x)
    else:
        # Constants stand on the right: the interpreter cannot multiply a constant by a tensor.
        share = 1.0 / (1.0 + tl.exp((x + x * x * x * CUBIC) * (-SLOPE)))
        slope = share + x * share * (1.0 - share) * (1.0 + x * x * (3.0 * CUBIC)) * SLOPE
    return x * share, slope


@triton.jit
def _forward(x_ptr, out_ptr, f, x_stride, KIND: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < f
    gate = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0)
    up = tl.load(x_ptr + row * x_stride + f + columns, mask=inside, other=0.0)
    activated, _ = _inner(gate.to(tl.float32), KIND)
    out = activated.to(gate.dtype).to(tl.float32) * up.to(tl.float32)  # rounded first, as in the reference
    tl.store(out_ptr + row * f + columns, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    grad_ptr,
    x_ptr,
    grad_x_ptr,
    f,
    grad_stride,
    x_stride,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < f
    gate = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0)
    up = tl.load(x_ptr + row * x_stride + f + columns, mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(grad_ptr + row * grad_stride + columns, mask=inside, other=0.0).to(tl.float32)
    activated, slope = _inner(gate.to(tl.float32), KIND)
    into_gate = (grad * up).to(gate.dtype).to(tl.float32) * slope
    into_up = grad * activated.to(gate.dtype).to(tl.float32)
    place = grad_x_ptr + row * 2 * f + columns
    tl.store(place, into_gate.to(grad_x_ptr.dtype.element_ty), mask=inside)
    tl.store(place + f, into_up.to(grad_x_ptr.dtype.element_ty), mask=inside)


class OnePassGated(Gated):
    """As Gated. It reads gate and up once in forward, and them and the gradient once in backward."""

    def __init__(self, inner: Activation, kind: str) -> None:
        """`kind` is the kernels' name of the activation `inner`."""
        super().__init__(inner)
        self._kind = kind

    def product(self, x: Tensor) -> Tensor:
        """See Gated."""
        f = x.shape[-1] // 2
        rows = as_rows(x, 2 * f)
        out = torch.empty(*x.shape[:-1], f, dtype=x.dtype, device=x.device)
        if out.numel():
            grid = len(rows), triton.cdiv(f, BLOCK)
            _forward[grid](rows, out, f, rows.stride(0), self._kind, BLOCK, num_warps=WARPS)
        return out

    def gradient_of_input(self, grad: Tensor, x: Tensor) -> Tensor:
        """See Activation."""
        f = x.shape[-1] // 2
        rows, upstream = as_rows(x, 2 * f), as_rows(grad, f)
        grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if grad_x.numel():
            grid, strides = (len(rows), triton.cdiv(f, BLOCK)), (upstream.stride(0), rows.stride(0))
            _backward[grid](upstream, rows, grad_x, f, *strides, self._kind, BLOCK, num_warps=WARPS)
        return grad_x


swiglu, geglu, geglu_tanh = (
    OnePassGated(SiLU(), "silu"),
    OnePassGated(gelu, "gelu"),
    OnePassGated(gelu_tanh, "gelu_tanh"),
)
