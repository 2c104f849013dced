"""FlashAttention through torch's SDPA interface: FlashAttention-3 where its package is installed, else torch's own.

Dao, arXiv 2307.08691; Shah et al., arXiv 2407.08608.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable

import torch
import torch.nn.attention as torch_attention
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel


def missing(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why FlashAttention cannot run here, or None when it can."""
    if device.type != "cuda":
        return f"the device is {device.type}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"the dtype is {str(dtype).removeprefix('torch.')}, it needs bf16 or fp16"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "the GPU is older than Ampere"
    return None


@functools.cache
def version() -> str:
    """Which FlashAttention runs. Activates FlashAttention-3 in torch's SDPA when its package and the hook exist."""
    activate = getattr(torch_attention, "activate_flash_attention_impl", None)  # torch >= 2.11
    hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
    if activate and hopper and importlib.util.find_spec("flash_attn_interface"):
        activate("FA3")
        return "FlashAttention-3 in torch SDPA"
    return "FlashAttention-2 in torch SDPA"


def attention(otherwise: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The flash kernel; `otherwise` takes what it cannot do: masks (segments) and queries that continue a cache."""
    version()

    def flash(q: Tensor, k: Tensor, v: Tensor, *, segments: Tensor | None, dropout: float) -> Tensor:
        if segments is not None or q.shape[0] != k.shape[0]:
            return otherwise(q, k, v, segments=segments, dropout=dropout)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return otherwise(q, k, v, segments=None, dropout=dropout)

    return flash
