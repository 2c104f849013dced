"""Keys and values of the positions that a model has already read, so that a step computes only the new ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron.core.transformer.context import Build
from megatron.spec.attention import AttentionSpec


class LayerCache:
    """The keys and values of one layer, each [capacity, b, groups/tp, d], allocated once: a `KeyValueCache`."""

    def __init__(
        self, capacity: int, batch_size: int, heads: int, head_dim: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        """`heads`: the number of key/value heads on this rank."""
        self._keys = torch.empty((capacity, batch_size, heads, head_dim), dtype=dtype, device=device)
        self._values = torch.empty_like(self._keys)
        self._length = 0

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Copies k, v [s, b, groups/tp, d] to the cache; returns views of all t positions so far, [t, b, groups/tp, d]."""
        end = self._length + k.shape[0]
        assert end <= len(self._keys), f"{end} positions do not fit a cache of {len(self._keys)}"
        self._keys[self._length : end] = k
        self._values[self._length : end] = v
        self._length = end
        return self._keys[:end], self._values[:end]

    def clear(self) -> None:
        """Forgets all positions."""
        self._length = 0


def allocate_caches(
    build: Build, attentions: Sequence[AttentionSpec], batch_size: int, capacity: int
) -> list[LayerCache]:
    """Returns one empty cache per layer, given the attention of each: 2 x capacity x b x groups/tp x d elements."""
    tp = build.groups.tp.size
    return [
        LayerCache(capacity, batch_size, spec.local_groups(tp), spec.head_dim, dtype=build.dtype, device=build.device)
        for spec in attentions
    ]
