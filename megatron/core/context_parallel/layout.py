"""Which tokens of a sequence a rank holds, so that causal attention is the same work for all.

[Note: balanced layout] The sequence is split into 2 * size chunks of equal length, and rank r holds the r-th from the
front and the r-th from the back, in this order: 0 1 2 3 | 3 2 1 0. A query in chunk i sees the chunks before it, so the
two together see r + (2 * size - 1 - r) = 2 * size - 1 other chunks whatever r is (as in Llama 3, arXiv 2407.21783,
section 3.3.2).

"Natural order" is that of the sequence, "rank order" that of rank 0's chunks, rank 1's, and so on. Layouts nest: the
tokens that `inner` neighbouring ranks hold together, in natural order, are those of one of size / inner ranks.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def pad(x: Tensor, dim: int, size: int, value: float = 0) -> Tensor:
    """`x` with `dim` lengthened to the next multiple of 2 * size, by entries of `value`.

    They go behind the last token, where causal attention does not see them.
    """
    missing = -x.shape[dim] % (2 * size)
    behind = [0, 0] * (x.dim() - 1 - dim % x.dim()) + [0, missing]
    return F.pad(x, behind, value=value) if missing else x


def chunks_of(rank: int, size: int) -> tuple[int, int]:
    """Numbers of the chunks that `rank` holds, earlier first."""
    return rank, 2 * size - 1 - rank


def owners(size: int) -> list[tuple[int, int]]:
    """(rank, which of its two) of chunk 0, 1, 2 ..."""
    return [(rank, 0) for rank in range(size)] + [(rank, 1) for rank in reversed(range(size))]


def chunk_length(length: int, size: int) -> int:
    """Tokens of a chunk when the whole sequence has `length`, a multiple of 2 * size."""
    assert length % (2 * size) == 0, f"{length} tokens are not 2 x {size} equal chunks; pad them first"
    return length // (2 * size)


def take(x: Tensor, dim: int, rank: int, size: int) -> Tensor:
    """`rank`'s part of the whole sequence along `dim`: [.., s, ..] -> [.., s / size, ..]."""
    if size == 1:
        return x
    chunk = chunk_length(x.shape[dim], size)
    return torch.cat([x.narrow(dim, number * chunk, chunk) for number in chunks_of(rank, size)], dim)


def to_natural_order(x: Tensor, dim: int, size: int) -> Tensor:
    """All ranks' parts one after the other along `dim` -> the sequence."""
    return _reorder(x, dim, size, [2 * rank + half for rank, half in owners(size)])


def to_rank_order(x: Tensor, dim: int, size: int) -> Tensor:
    """The inverse of `to_natural_order`: the order that all-to-alls and reduce-scatters split into the ranks' parts."""
    return _reorder(x, dim, size, [number for rank in range(size) for number in chunks_of(rank, size)])


def _reorder(x: Tensor, dim: int, size: int, order: list[int]) -> Tensor:
    if size == 1:
        return x
    pieces = x.split(chunk_length(x.shape[dim], size), dim)
    return torch.cat([pieces[place] for place in order], dim)
