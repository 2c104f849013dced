"""Gated activations times the weights of assignments, each way in one pass: the interface of
ops/weighted_activation.py.

Nothing but their input is kept for backward, which computes the activation again while it reads that. The gradient of a
weight is a sum over the channels of its assignment, which one program goes through in ascending order.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.kernels.backends.triton.activation import _inner
from megatron.kernels.backends.triton.rows import as_rows

CHANNELS, WARPS = 1024, 4  # channels and warps of a program at a time


@triton.jit
def _product(inner_ptr, weights_ptr, out_ptr, f, inner_stride, KIND: tl.constexpr, CHANNELS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    weight = tl.load(weights_ptr + row).to(tl.float32)
    inner_ptr += row * inner_stride
    kind = out_ptr.dtype.element_ty
    for first in range(0, f, CHANNELS):
        column = first + tl.arange(0, CHANNELS)
        inside = column < f
        gate = tl.load(inner_ptr + column, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(inner_ptr + f + column, mask=inside, other=0.0).to(tl.float32)
        activated, _ = _inner(gate, KIND)
        activated = (activated.to(kind).to(tl.float32) * up).to(kind).to(tl.float32)  # rounded as in the reference
        tl.store(out_ptr + row * f + column, (activated * weight).to(kind), mask=inside)


@triton.jit
def _gradient(
    grad_ptr, inner_ptr, weights_ptr, grad_inner_ptr, product_ptr, grad_weights_ptr, f, grad_stride, inner_stride,
    KIND: tl.constexpr, WITH_INNER: tl.constexpr, WITH_PRODUCT: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    weight = tl.load(weights_ptr + row).to(tl.float32)
    inner_ptr += row * inner_stride
    grad_inner_ptr += row * 2 * f
    kind = inner_ptr.dtype.element_ty
    total = tl.zeros((CHANNELS,), tl.float32)
    for first in range(0, f, CHANNELS):
        column = first + tl.arange(0, CHANNELS)
        inside = column < f
        gate = tl.load(inner_ptr + column, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(inner_ptr + f + column, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + row * grad_stride + column, mask=inside, other=0.0).to(tl.float32)
        of_gate, slope = _inner(gate, KIND)
        of_gate = of_gate.to(kind).to(tl.float32)  # each product is rounded as in the reference
        activated = (of_gate * up).to(kind).to(tl.float32)
        total += grad * activated
        if WITH_PRODUCT:
            tl.store(product_ptr + row * f + column, (activated * weight).to(kind), mask=inside)
        if WITH_INNER:
            grad = (grad * weight).to(kind).to(tl.float32)
            into_gate = (grad * up).to(kind).to(tl.float32) * slope
            tl.store(grad_inner_ptr + column, into_gate.to(kind), mask=inside)
            tl.store(grad_inner_ptr + f + column, (grad * of_gate).to(kind), mask=inside)
    tl.store(grad_weights_ptr + row, tl.sum(total, 0))


class OnePassWeighted:
    """A WeightedActivation."""

    def __init__(self, kind: str) -> None:
        """`kind` is the kernels' name of the activation of the gate."""
        self._kind = kind

    def keep(self, inner: Tensor) -> Tensor | None:
        """See WeightedActivation: nothing."""
        return None

    def product(self, inner: Tensor, saved: Tensor | None, weights: Tensor) -> Tensor:
        """See WeightedActivation."""
        f = inner.shape[-1] // 2
        rows = as_rows(inner, 2 * f)
        out = torch.empty(len(rows), f, dtype=inner.dtype, device=inner.device)
        if out.numel():
            channels = min(CHANNELS, triton.next_power_of_2(f))
            _product[(len(rows),)](
                rows, weights.contiguous(), out, f, rows.stride(0), self._kind, channels, num_warps=WARPS
            )
        return out

    def gradient(
        self,
        grad: Tensor,
        inner: Tensor,
        saved: Tensor | None,
        weights: Tensor,
        *,
        take: Callable[[Tensor], None] | None,
        wants_inner: bool,
    ) -> tuple[Tensor | None, Tensor]:
        """See WeightedActivation."""
        f = inner.shape[-1] // 2
        rows, upstream = as_rows(inner, 2 * f), as_rows(grad, f)
        grad_inner = torch.empty_like(rows) if wants_inner else None
        product = torch.empty(len(rows), f, dtype=inner.dtype, device=inner.device) if take else None
        grad_weights = torch.empty(len(rows), dtype=torch.float32, device=inner.device)
        if rows.numel():
            _gradient[(len(rows),)](
                upstream, rows, weights.contiguous(),
                rows if grad_inner is None else grad_inner, rows if product is None else product, grad_weights,
                f, upstream.stride(0), rows.stride(0), self._kind, wants_inner, product is not None,
                min(CHANNELS, triton.next_power_of_2(f)), num_warps=WARPS,
            )  # fmt: skip
        if take is not None and product is not None:
            take(product)
        return grad_inner, grad_weights


swiglu, geglu, geglu_tanh = OnePassWeighted("silu"), OnePassWeighted("gelu"), OnePassWeighted("gelu_tanh")
