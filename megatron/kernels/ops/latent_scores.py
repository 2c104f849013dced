"""Attention of single queries to a cache of latents, without keys and values of heads (absorbed decoding; DeepSeek-V2,
arXiv 2405.04434, section 2.1.2)."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.kernels.ops.attention import causal_mask
from megatron.kernels.ops.attention_scores import Scores
from megatron.kernels.ops.attention_segments import Segments, ids_of


def attend_to_latents(
    q: Tensor,
    rotated: int,
    latents: Tensor,
    weight: Tensor,
    *,
    scores: Scores,
    segments: Segments | None,
    window: int | None,
) -> Tensor:
    """q [1, b, n, d + rotated]; latents [t, b, r + rotated], whose last channels are the rotated part of all keys;
    weight [n, d + v, r], which projects latents to the other channels of keys, and to values. Returns [1, b, n * v].

    The projection to keys is applied to the query, and that to values to the weighted latents. So a step reads the
    latents of t tokens, and not n keys and values of each. Arguments as of AttentionKernel. No communication.
    """
    plain, t = q.shape[-1] - rotated, len(latents)
    to_keys, to_values = weight.split((plain, weight.shape[1] - plain), dim=1)
    query = torch.cat((torch.einsum("sbnd,ndr->sbnr", q[..., :plain], to_keys), q[..., plain:]), dim=-1)
    weights = scores.capped((torch.einsum("sbnc,tbc->bnst", query, latents) / scores.divisor).float())
    if segments is not None or window is not None:
        allowed = causal_mask(len(q), t, ids_of(segments), window, q.device)
        weights = weights.masked_fill(~allowed, float("-inf"))
    probabilities = weights.softmax(dim=-1).to(q.dtype)
    attended = torch.einsum("bnst,tbr->sbnr", probabilities, latents[..., : weight.shape[2]])
    return torch.einsum("sbnr,nvr->sbnv", attended, to_values).flatten(2)
