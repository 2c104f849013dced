"""FlashAttention through torch's SDPA interface: FlashAttention-3 if its package is installed, else torch's own
version.

Dao, arXiv 2307.08691; Shah et al., arXiv 2407.08608.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.attention as torch_attention
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron.base.errors import first_line
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


class Flash(NamedTuple):
    """The result of `find`. `name` is None without FlashAttention; `why` is the reason, or why it is no newer version."""

    name: str | None
    why: str


def find(device: torch.device, dtype: torch.dtype, dropout: float, trial: Callable[[], None]) -> Flash:
    """Returns the newest FlashAttention that can run the model here, and makes it the one that torch calls.

    `trial` calls it as the model will, forward and backward, and raises RuntimeError if it fails: which head sizes,
    windows and rates of dropout a build supports on a GPU is known for certain only then.
    """
    reason = missing(device, dtype)
    if reason is not None:
        return Flash(None, reason)
    not_newer = _activate_3(torch.cuda.get_device_capability(device), dropout)
    if not_newer is None:
        failure = _failure(trial)
        if failure is None:
            return Flash("FlashAttention-3 in torch SDPA", "")
        _deactivate_3()
        not_newer = f"FlashAttention-3 failed: {failure}"
    failure = _failure(trial)
    if failure is None:
        return Flash("FlashAttention-2 in torch SDPA", not_newer)
    return Flash(None, f"FlashAttention-2 failed: {failure}")


def _activate_3(capability: tuple[int, int], dropout: float) -> str | None:
    """Activates FlashAttention-3 in torch's SDPA. Returns None, or the reason why it is not active; "" where nobody
    expects it.
    """
    _deactivate_3()
    if capability != (9, 0) or not _has("activate") or not importlib.util.find_spec("flash_attn_interface"):
        return ""
    if dropout > 0.0:
        return "FlashAttention-3 has no dropout"
    try:
        torch_attention.activate_flash_attention_impl("FA3")
    except Exception as error:  # the package is built for another torch or another CUDA, or is something else
        return f"FlashAttention-3 cannot be loaded: {first_line(error)}"
    return None


def _deactivate_3() -> None:
    if _has("restore"):
        torch_attention.restore_flash_attention_impl(_raise_warn=False)


def _has(verb: str) -> bool:
    return hasattr(torch_attention, f"{verb}_flash_attention_impl")  # torch >= 2.11


def _failure(trial: Callable[[], None]) -> str | None:
    try:
        trial()
    except RuntimeError as error:
        return first_line(error)
    return None


def attention(otherwise: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Returns the flash kernel, which calls `otherwise` for the cases it does not support.

    These are masks (segments), queries that continue a cache, and a window together with dropout (which
    FlashAttention-3 lacks) or with an unusual head size.
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
