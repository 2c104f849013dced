"""The rule of a block of attention: how keys are scored, which of them queries may see, and which are dropped."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.kernels.ops.attention_scores import Scores
from megatron.kernels.ops.hash32 import hash32_, wrapped


class Drop(NamedTuple):
    """Dropout of probabilities that depends only on a seed, the sample, the head, and the positions of query and key.

    So every rank that computes a query-key pair, in any block, drops the same. `seed` is int32 [1]. `queries` [s] and
    `keys` [t] are int32 positions in the sequence. `first` is the number of the first sample.
    """

    rate: float
    seed: Tensor
    queries: Tensor
    keys: Tensor
    first: int = 0

    def factors(self, b: int, n: int) -> Tensor:
        """Returns factors [b, n, s, t] in fp32 for b samples and n heads: 0 with probability `rate`, else 1 / (1 -
        rate).
        """
        heads = torch.arange(self.first * n, (self.first + b) * n, dtype=torch.int32, device=self.seed.device)
        heads = hash32_(heads ^ self.seed)
        queries, keys = (hash32_(places.clone()) for places in (self.queries, self.keys))
        rows = hash32_(heads[:, None] ^ queries)
        survivors = hash32_(rows[..., None] ^ keys) >= wrapped(round(self.rate * 2**32) + 2**31)
        return survivors.view(b, n, len(queries), len(keys)).float().div_(1.0 - self.rate)


def draw_seed(dropout: float, device: torch.device) -> Tensor | None:
    """The seed of a forward's dropout, int32 [1], from the device's current generator; None without dropout."""
    if dropout == 0.0:
        return None
    return torch.randint(1 << 31, (1,), device=device).to(torch.int32)


class Rule(NamedTuple):
    """Query i of s sees key j of t if 0 <= i + offset - j < window and both are in one segment.

    `scores` are computed for the visible keys. `offset` is the position of the first query minus that of the first key,
    at least 0; None makes every key visible. `window` requires an offset; None is no limit. `segments` are the ids of
    the queries [b, s] and of the keys [b, t], or None. `drop` applies to the visible keys.
    """

    scores: Scores
    offset: int | None = None
    window: int | None = None
    segments: tuple[Tensor, Tensor] | None = None
    drop: Drop | None = None

    def cut(self, queries: slice, keys: slice, first: int = 0) -> Rule:
        """Returns the rule for a part of the tokens, of samples from `first` on, without `offset` and `window`."""
        segments, drop = self.segments, self.drop
        if segments is not None:
            segments = segments[0][:, queries], segments[1][:, keys]
        if drop is not None:
            drop = drop._replace(queries=drop.queries[queries], keys=drop.keys[keys], first=drop.first + first)
        return Rule(self.scores, segments=segments, drop=drop)

    def square(self, s: int, t: int) -> bool:
        """Returns whether this is plain causal attention of s queries to keys at the same positions."""
        return self.offset == 0 and s == t and self.window is None and self.segments is None

    def prefix(self, s: int, t: int) -> int:
        """Returns the number of keys before all queries, if this is causal attention to those and to the queries' own
        keys.
        """
        plain = self.offset == t - s and self.window is None and self.segments is None
        return max(0, t - s) if plain else 0

    def reach(self, s: int, t: int) -> tuple[int | None, int]:
        """Returns the keys visible to the left and right of a query's own, counting from the ends of queries and keys,
        as FlashAttention does. None is no limit. The rule has an offset.
        """
        assert self.offset is not None
        right = self.offset - (t - s)
        return (None if self.window is None else self.window - 1 - right), right

    def in_reach(self, s: int, t: int) -> bool:
        """Returns whether FlashAttention can be told which of t keys s queries see."""
        if self.offset is None:
            return True
        left, right = self.reach(s, t)
        # It treats a reach of t keys or more as unlimited, so then all keys on that side have to be visible.
        all_left = left is None or self.window is None or self.offset + s - 1 < self.window
        all_right = self.offset >= t - 1
        return (all_left or (left is not None and 0 <= left < t)) and (0 <= right < t or (right >= t and all_right))

    def mask(self, s: int, t: int, device: torch.device) -> Tensor | None:
        """Returns True where visible, [s, t], or [b, 1, s, t] with segments; None if everything is visible."""
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
    """Gives queries that see no key of a block output 0 and log-sum-exp -inf, the weight 0 in a merge. Kernels differ
    here.

    out [s, b, n, d], lse [b, n, s], mask as `Rule.mask` returns it. Without segments every query of a block sees a key,
    because a block without one would not exist: so only masks of four dims are checked.
    """
    if mask is None or mask.dim() == 2:
        return out, lse
    blind = ~mask.any(dim=-1)  # [b, 1, s]
    return out.masked_fill(blind.permute(2, 0, 1).unsqueeze(-1), 0.0), lse.masked_fill(blind, float("-inf"))


def padded(x: Tensor, channels: int) -> Tensor:
    """Returns [.., channels]: x with zeros behind its own channels, or x itself."""
    return x if x.shape[-1] == channels else F.pad(x, (0, channels - x.shape[-1]))
