"""FlashAttention through torch's SDPA interface: FlashAttention-3 if its package is installed, else torch's own
version.

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

from megatron.kernels.ops.attention_scores import Scores

LARGEST_HEAD = 192  # wider heads have a gradient on some GPUs only


def missing(device: torch.device, dtype: torch.dtype) -> str | None:
    """Returns the reason why FlashAttention cannot run here, or None if it can."""
    if device.type != "cuda":
        return f"the device is {device.type}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"the dtype is {str(dtype).removeprefix('torch.')}, it needs bf16 or fp16"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "the GPU is older than Ampere"
    return None


@functools.cache
def version() -> str:
    """Returns the name of the FlashAttention version, after activating version 3 in torch's SDPA if it is available."""
    activate = getattr(torch_attention, "activate_flash_attention_impl", None)  # torch >= 2.11
    hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
    if activate and hopper and importlib.util.find_spec("flash_attn_interface"):
        activate("FA3")
        return "FlashAttention-3 in torch SDPA"
    return "FlashAttention-2 in torch SDPA"


def attention(otherwise: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Returns the flash kernel, which calls `otherwise` for the cases it does not support.

    These are masks (segments), queries that continue a cache, and a window together with dropout (which
    FlashAttention-3 lacks) or with an unusual head size.
    """
    version()

    def flash(
        q: Tensor, k: Tensor, v: Tensor, *, scores: Scores, segments: Tensor | None, window: int | None, dropout: float
    ) -> Tensor:
        if segments is not None or q.shape[0] != k.shape[0]:
            return otherwise(q, k, v, scores=scores, segments=segments, window=window, dropout=dropout)
        if window is None or window >= k.shape[0]:
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                return otherwise(q, k, v, scores=scores, segments=None, window=None, dropout=dropout)
        if dropout > 0.0 or q.shape[-1] % 8 or q.shape[-1] > LARGEST_HEAD:
            return otherwise(q, k, v, scores=scores, segments=None, window=window, dropout=dropout)
        return windowed(q, k, v, scores.uncapped_scale, window)

    return flash


def windowed(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int) -> Tensor:
    """Causal attention of each query to the `window` keys that end with its own. q [s, b, n, d]; k, v [s, b, g, d].

    SDPA has no argument for a window, but the underlying operator and its gradient have one. FlashAttention-3, if
    active, implements this operator, too. It takes [b, s, heads, d] with any strides, and counts the keys on both sides
    of the query's own: zero keys on the right side make it causal.
    """
    s, b, n, d = q.shape
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    no_packing, no_dropout, causal_without_window, debug = (None, None), 0.0, False, False
    out, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, *no_packing, s, s, no_dropout, causal_without_window, debug,
        scale=scale, window_size_left=window - 1, window_size_right=0,
    )  # fmt: skip
    return out.transpose(0, 1).reshape(s, b, n * d)
