"""Attention inside the documents of a sample without a mask: no memory and no work for pairs of different documents."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron.kernels.backends import flash
from megatron.kernels.ops.attention_scores import Scores
from megatron.kernels.ops.attention_segments import Segments, in_order

_BATCH = 4  # documents of a length, on average, that are worth a copy


def packed(kernel: Callable[..., Tensor], *, by_flash: bool, grouped: bool = False) -> Callable[..., Tensor]:
    """Returns an AttentionKernel that passes packed documents to one of those below, and all else to `kernel`.

    by_flash: FlashAttention can run here; else `kernel` attends to one document after the other. grouped: see
    `by_document`. New queries to a cache of keys are all else: their documents are known by their ids alone.
    """
    by_documents = by_document(kernel, grouped=grouped)

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
        if segments is None or segments.starts is None or len(q) != len(k):
            return kernel(q, k, v, scores=scores, segments=segments, window=window, dropout=dropout)
        if by_flash and flash.by_operator(q.shape[-1]):
            return variable_length(q, k, v, scores=scores, segments=segments, window=window, dropout=dropout)
        return by_documents(q, k, v, scores=scores, segments=segments, window=window, dropout=dropout)

    return attention


def variable_length(
    q: Tensor, k: Tensor, v: Tensor, *, scores: Scores, segments: Segments, window: int | None, dropout: float
) -> Tensor:
    """FlashAttention over documents of different lengths in one call, for any number of documents.

    q [s, b, n, d]; k, v [s, b, g, d] -> [s, b, n * d]. The operator takes tokens in the order of `segments.starts`, so
    it reads a single sample where it is, and several from copies. See `flash.windowed` for its window.
    """
    s, b, n, d = q.shape
    assert segments.starts is not None
    longest = max(*segments.lengths, 2)  # with 1, the operator would take its path for decoding
    around = {} if window is None or window >= longest else {"window_size_left": window - 1, "window_size_right": 0}
    causal, debug = not around, False
    out, *_ = torch.ops.aten._flash_attention_forward(
        *in_order(q, k, v), segments.starts, segments.starts, longest, longest, dropout, causal, debug,
        scale=scores.uncapped_scale, **around,
    )  # fmt: skip
    return out.view(b, s, n * d).transpose(0, 1)


def by_document(kernel: Callable[..., Tensor], *, grouped: bool = False) -> Callable[..., Tensor]:
    """Returns an AttentionKernel that calls `kernel` for each document as if it were alone: the meaning of segments.
    Many documents of few lengths are a batch of each length.

    grouped: `kernel` is efficient with fewer heads of keys than of queries. Else it gets as many of them, because the
    memory-efficient kernel in torch's SDPA has no grouped heads, and the plain kernel that remains without it computes
    all scores of a document at once.
    """

    def attention(
        q: Tensor, k: Tensor, v: Tensor, *, scores: Scores, segments: Segments, window: int | None, dropout: float
    ) -> Tensor:
        s, b, n, _ = q.shape
        k, v = (x if grouped or x.shape[2] == n else x.repeat_interleave(n // x.shape[2], dim=2) for x in (k, v))
        tokens = in_order(q, k, v)
        batches = _equal_lengths(segments.lengths) if dropout == 0.0 else []
        if not batches:
            documents = zip(*(x.unsqueeze(1).split(list(segments.lengths)) for x in tokens), strict=True)
            out = [
                kernel(*document, scores=scores, segments=None, window=window, dropout=dropout)
                for document in documents
            ]
            return torch.cat(out).view(b, s, -1).transpose(0, 1)
        out, order = [], []
        for places in batches:
            index = torch.from_numpy(places).to(q.device)  # [length, documents]
            part = (x.index_select(0, index.flatten()).unflatten(0, index.shape) for x in tokens)
            out.append(kernel(*part, scores=scores, segments=None, window=window, dropout=dropout).flatten(0, 1))
            order.append(index.flatten())
        return torch.cat(out).index_select(0, torch.cat(order).argsort()).view(b, s, -1).transpose(0, 1)

    return attention


def _equal_lengths(lengths: Sequence[int]) -> list[npt.NDArray[np.int64]]:
    """Returns the places [length, documents] of the tokens of documents that have the same length, for each length; none
    if there are too few documents of a length for the copies to pay off."""
    counts = np.asarray(lengths, dtype=np.int64)
    distinct = np.unique(counts)
    if len(counts) < _BATCH * len(distinct):
        return []
    starts = counts.cumsum() - counts
    return [starts[counts == length] + np.arange(length)[:, None] for length in distinct]
