"""Which keys the queries of a block of attention may see, and which of those are dropped."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megatron.kernels.ops.hash32 import hash32_, wrapped


class Drop(NamedTuple):
    """Dropout of probabilities that depends on a seed, on sample and head, and on the places of query and key alone.

    So whoever attends a query to a key again, in whatever block, drops the same. seed: int32 [1]. queries [s], keys [t]:
    int32 places in the sequence.
    """

    rate: float
    seed: Tensor
    queries: Tensor
    keys: Tensor

    def factors(self, b: int, n: int) -> Tensor:
        """[b, n, s, t] in fp32, of b samples and n heads: 0 with probability `rate`, else 1 / (1 - rate)."""
        heads = hash32_(torch.arange(b * n, dtype=torch.int32, device=self.seed.device) ^ self.seed)
        queries, keys = (hash32_(places.clone()) for places in (self.queries, self.keys))
        rows = hash32_(heads[:, None] ^ queries)
        kept = hash32_(rows[..., None] ^ keys) >= wrapped(round(self.rate * 2**32) + 2**31)
        return kept.view(b, n, len(queries), len(keys)).float().div_(1.0 - self.rate)


class Rule(NamedTuple):
    """Query i of s sees key j of t when 0 <= i + offset - j < window and both are of one segment.

    offset: position of the first query less that of the first key, 0 or more; None: every key is in reach. window: needs
    an offset; None is no limit. segments: ids of the queries [b, s] and of the keys [b, t], or None. drop: of what is seen.
    """

    offset: int | None = None
    window: int | None = None
    segments: tuple[Tensor, Tensor] | None = None
    drop: Drop | None = None

    def cut(self, queries: slice, keys: slice) -> Rule:
        """What it says of some of the tokens, wherever they are: `segments` and `drop`."""
        segments, drop = self.segments, self.drop
        if segments is not None:
            segments = segments[0][:, queries], segments[1][:, keys]
        if drop is not None:
            drop = drop._replace(queries=drop.queries[queries], keys=drop.keys[keys])
        return Rule(segments=segments, drop=drop)

    def square(self, s: int, t: int) -> bool:
        """Whether this is plain causal attention of s queries to keys at the same positions."""
        return self.offset == 0 and s == t and self.window is None and self.segments is None

    def prefix(self, s: int, t: int) -> int:
        """How many keys come before all of the queries, when this is causal attention to those and to the queries' own."""
        plain = self.offset == t - s and self.window is None and self.segments is None
        return max(0, t - s) if plain else 0

    def mask(self, s: int, t: int, device: torch.device) -> Tensor | None:
        """True where visible, [s, t], or [b, 1, s, t] with segments; None when everything is."""
        allowed = None
        if self.offset is not None:
            allowed = torch.ones(s, t, dtype=torch.bool, device=device).tril(self.offset)
            if self.window is not None:
                allowed = allowed.triu(self.offset - self.window + 1)
        if self.segments is not None:
            queries, keys = self.segments
            same = (queries[:, :, None] == keys[:, None, :]).unsqueeze(1)
            allowed = same if allowed is None else same & allowed
        return allowed


def forget_blind(out: Tensor, lse: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Queries that see no key of a block have weight 0 in a merge: output 0, log-sum-exp -inf. Kernels differ there.

    out [s, b, n, d], lse [b, n, s], mask as `Rule.mask` gives it. A band without segments leaves no query blind, or its
    block would have been cut: so only masks of four dims are looked at.
    """
    if mask is None or mask.dim() == 2:
        return out, lse
    blind = ~mask.any(dim=-1)  # [b, 1, s]
    return out.masked_fill(blind.permute(2, 0, 1).unsqueeze(-1), 0.0), lse.masked_fill(blind, float("-inf"))
