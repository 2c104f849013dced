"""torch's functions that look at a tensor's device below Python, where a traced tensor is one of "meta".

torch needs a driver to name a CUDA device there: to set it around an operation, and to find the queue of a backward.
Python code sees the device that is traced. So the functions of this program that decide by the device are answered
here.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode

_HALVES = (torch.bfloat16, torch.float16)


class SimulatedTorch(TorchFunctionMode):
    """Runs functions of torch as on a CUDA device. Active as a context manager."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs a function of torch."""
        if func is torch.autograd.grad:
            return self._grad(*args, **(kwargs or {}))
        replaced = _FUNCTIONS.get(func, func)
        return replaced(*args, **(kwargs or {}))

    def _grad(self, outputs: Any, inputs: Any, **options: Any) -> Any:
        """torch.autograd.grad. Of tensors it would be a function that torch runs without this mode, and so would be all
        operations of its nodes."""
        ends, starts = ([get_gradient_edge(tensor) for tensor in tensors] for tensors in (outputs, inputs))
        with self:
            return torch.autograd.grad(ends, starts, **options)


def _is_cuda(tensor: Tensor) -> bool:
    return tensor.device.type == "cuda"


def _to(tensor: Tensor, *args: Any, copy: bool = False, **kwargs: Any) -> Tensor:
    """Tensor.to. The tensor itself if it has the device and the dtype, and no copy is wanted."""
    if args and isinstance(args[0], Tensor):
        device, dtype, non_blocking = args[0].device, args[0].dtype, False
    else:
        device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
    device, dtype = device or tensor.device, dtype or tensor.dtype
    if device == tensor.device and dtype == tensor.dtype and not copy:
        return tensor
    moved: Tensor = torch.ops.aten._to_copy.default(tensor, dtype=dtype, device=device, non_blocking=non_blocking)
    return moved


def _contiguous(tensor: Tensor) -> Tensor:
    """Tensor.contiguous. The tensor itself if it is."""
    return tensor if tensor.is_contiguous() else tensor.clone(memory_format=torch.contiguous_format)


def _dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """CUDA's dropout keeps a mask of one byte per element."""
    assert not inplace
    return torch.native_dropout(x, p, training)[0] if training and p > 0.0 else x


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    """q [b, n, s, d]; k [b, g, t, d]; v [b, g, t, v] -> [b, n, s, v].

    FlashAttention takes no mask, halves only, and values as wide as queries; where they are not, cuDNN's kernel was
    chosen, which takes both. The memory-efficient kernel takes masks, but a key head per query
    head; plain operations take the rest, as in torch (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp).
    """
    out: Tensor
    if attn_mask is None and q.dtype in _HALVES and v.shape[-1] != q.shape[-1]:
        out, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, dropout_p, is_causal, scale=scale
        )
        return out
    if attn_mask is None and q.dtype in _HALVES:
        out, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, scale=scale)
        return out
    if not enable_gqa:
        bias = None
        if attn_mask is not None:
            bias = torch.zeros_like(attn_mask, dtype=q.dtype).masked_fill_(~attn_mask, float("-inf"))
            bias = bias.expand(*q.shape[:3], k.shape[2])
        out, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
            q, k, v, bias, True, dropout_p, is_causal, scale=scale
        )
        return out
    return F.scaled_dot_product_attention(q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)


def _scaled_mm(a: Tensor, b: Tensor, *args: Any, out: Tensor, **options: Any) -> Tensor:
    """A product in FP8 takes no memory but that of its result."""
    assert out.shape == (a.shape[0], b.shape[1])
    return out


def _silu_backward(grad: Tensor, x: Tensor) -> Tensor:
    """One kernel on CUDA. torch builds without CUDA compute it from others."""
    return torch.empty_like(grad)


_FUNCTIONS: dict[Any, Any] = {
    torch.Tensor.is_cuda.__get__: _is_cuda,  # type: ignore[attr-defined]
    torch.Tensor.to: _to,
    torch.Tensor.contiguous: _contiguous,
    torch.Tensor.copy_: torch.ops.aten.copy_.default,
    torch._scaled_mm: _scaled_mm,
    torch._scaled_mm_v2: _scaled_mm,
    F.dropout: _dropout,
    torch.ops.aten.silu_backward: _silu_backward,
    torch.ops.aten.silu_backward.default: _silu_backward,
    F.scaled_dot_product_attention: _attention,
}
