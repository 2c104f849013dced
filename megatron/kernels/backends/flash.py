"""FlashAttention-2, which comes with torch, through its SDPA interface.

Dao, arXiv 2307.08691.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron.kernels.ops.attention_scores import Scores
from megatron.kernels.ops.attention_segments import Segments

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


def by_operator(head: int) -> bool:
    """Whether the operator below SDPA, which has windows and documents, takes heads of this many channels."""
    return head % 8 == 0 and head <= LARGEST_HEAD


def attention(otherwise: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Returns the flash kernel, which calls `otherwise` for the cases it does not support.

    These are masks (segments), and queries that continue a cache.
    """

    def flash(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scores: Scores,
        segments: Segments | None,
        window: int | None,
        dropout: float,
    ) -> Tensor:
        if segments is not None or q.shape[0] != k.shape[0]:
            return otherwise(q, k, v, scores=scores, segments=segments, window=window, dropout=dropout)
        if window is None or window >= k.shape[0]:
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                return otherwise(q, k, v, scores=scores, segments=None, window=None, dropout=dropout)
        return windowed(q, k, v, scores.uncapped_scale, window, dropout)

    return flash


def windowed(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int, dropout: float) -> Tensor:
    """Causal attention of each query to the `window` keys that end with its own. q [s, b, n, d]; k, v [s, b, g, d].

    SDPA has no argument for a window, but the underlying operator and its gradient have one. It takes [b, s, heads, d]
    with any strides, and counts the keys on both sides of the query's own: zero keys on the right side make it causal.
    """
    s, b, n, d = q.shape
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    no_packing, causal_without_window, debug = (None, None), False, False
    out, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, *no_packing, s, s, dropout, causal_without_window, debug,
        scale=scale, window_size_left=window - 1, window_size_right=0,
    )  # fmt: skip
    return out.transpose(0, 1).reshape(s, b, n * d)
