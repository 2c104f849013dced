"""Softmax attention on [s, b, heads, channels] tensors with grouped key/value heads.

`unfused` is the reference: plain torch, softmax in fp32. `fused` is torch's SDPA, which itself chooses the flash,
cuDNN, memory-efficient or math kernel, unless `fused_by` names them. kernels/choose_attention.py says which kernel a
run takes: one of these, one of kernels/backends/, or `attention_rows`, which caps scores and has sinks.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron.kernels.ops import attention_rows
from megatron.kernels.ops.attention_rule import padded
from megatron.kernels.ops.attention_scores import Scores
from megatron.kernels.ops.attention_segments import Segments, ids_of


class AttentionKernel(Protocol):
    """q [s, b, n, d]; k [t, b, g, d]; v [t, b, g, v], where g divides n. Query i sees keys up to i + t - s in its own
    segment.

    `segments` are the documents of the t tokens, or None. `window` is the maximum number of keys that a query sees, the
    last of them its own; None is no limit. Returns [s, b, n * v]. No communication.
    """

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scores: Scores,
        segments: Segments | None,
        window: int | None,
        dropout: float,
    ) -> Tensor: ...


def unfused(
    q: Tensor, k: Tensor, v: Tensor, *, scores: Scores, segments: Segments | None, window: int | None, dropout: float
) -> Tensor:
    """The reference. It materializes the full [b, n, s, t] probabilities."""
    s, b, n, _ = q.shape
    t, group = k.shape[0], n // k.shape[2]
    k, v = (x.repeat_interleave(group, dim=2) for x in (k, v))
    weights = scores.capped((torch.einsum("sbnd,tbnd->bnst", q, k) / scores.divisor).float())
    weights = weights.masked_fill(~causal_mask(s, t, ids_of(segments), window, q.device), float("-inf"))
    if scores.sinks is not None:
        weights = torch.cat((weights, scores.sinks.float().view(-1, 1, 1).expand(b, n, s, 1)), dim=-1)
    probabilities = F.dropout(weights.softmax(dim=-1)[..., :t].to(q.dtype), dropout)
    return torch.einsum("bnst,tbnd->sbnd", probabilities, v).reshape(s, b, -1)


def fused(
    q: Tensor, k: Tensor, v: Tensor, *, scores: Scores, segments: Segments | None, window: int | None, dropout: float
) -> Tensor:
    """torch's scaled_dot_product_attention. The permuted views need no copy, because SDPA takes any strides."""
    s, b, n, _ = q.shape
    k, v, ids = attention_rows.within_window(s, k, v, ids_of(segments), window)
    t = k.shape[0]
    plain = ids is None and (window is None or window >= t)
    causal = plain and s == t
    # A single query sees every key, so it needs no mask.
    mask = None if causal or (plain and s == 1) else causal_mask(s, t, ids, window, q.device)
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    out = F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=causal,
        scale=scores.uncapped_scale,
        enable_gqa=k.shape[1] != n,
    )
    return out.permute(2, 0, 1, 3).reshape(s, b, -1)


def causal_mask(s: int, t: int, ids: Tensor | None, window: int | None, device: torch.device) -> Tensor:
    """Returns True where query i of the last s positions may see key j of t: [s, t], or [b, 1, s, t] with ids [b,
    t]."""
    allowed = torch.ones(s, t, dtype=torch.bool, device=device).tril(diagonal=t - s)
    if window is not None:
        allowed = allowed.triu(diagonal=t - s - window + 1)
    if ids is None:
        return allowed
    return (allowed & (ids[:, -s:, None] == ids[:, None, :])).unsqueeze(1)


def in_fp32(kernel: AttentionKernel) -> AttentionKernel:
    """Wraps `kernel` to run on fp32 copies of half-precision tensors; the result is rounded once."""

    def attention(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scores: Scores,
        segments: Segments | None,
        window: int | None,
        dropout: float,
    ) -> Tensor:
        q32, k32, v32 = q.float(), k.float(), v.float()
        return kernel(q32, k32, v32, scores=scores, segments=segments, window=window, dropout=dropout).to(q.dtype)

    return attention


def fused_by(*backends: SDPBackend) -> AttentionKernel:
    """Returns `fused` by the first of torch's kernels that takes a call."""

    def attention(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scores: Scores,
        segments: Segments | None,
        window: int | None,
        dropout: float,
    ) -> Tensor:
        with sdpa_kernel(list(backends), set_priority=True):
            return fused(q, k, v, scores=scores, segments=segments, window=window, dropout=dropout)

    return attention


def with_equal_heads(kernel: AttentionKernel) -> AttentionKernel:
    """Wraps `kernel` to get a copy of keys and values for every query head, because it has no grouped heads."""

    def attention(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scores: Scores,
        segments: Segments | None,
        window: int | None,
        dropout: float,
    ) -> Tensor:
        if k.shape[2] != q.shape[2]:
            k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
        return kernel(q, k, v, scores=scores, segments=segments, window=window, dropout=dropout)

    return attention


def with_equal_channels(kernel: AttentionKernel) -> AttentionKernel:
    """Wraps `kernel` to get heads of as many channels in queries, keys and values, because it takes no others.

    The narrower ones are padded with zeros: these change no score, and the channels that they add to the output are
    left out.
    """

    def attention(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scores: Scores,
        segments: Segments | None,
        window: int | None,
        dropout: float,
    ) -> Tensor:
        channels, width = v.shape[-1], max(q.shape[-1], v.shape[-1])
        if q.shape[-1] == channels:
            return kernel(q, k, v, scores=scores, segments=segments, window=window, dropout=dropout)
        q, k, v = (padded(x, width) for x in (q, k, v))
        out = kernel(q, k, v, scores=scores, segments=segments, window=window, dropout=dropout)
        return out.unflatten(2, (-1, width))[..., :channels].flatten(2)

    return attention
