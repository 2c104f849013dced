"""Multi-head latent attention as data (DeepSeek-V2, arXiv 2405.04434)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from megatron.base.box import Box
from megatron.spec.attention import CoreSpec, RotarySpec
from megatron.spec.linear import COLUMN, REPLICATED, LinearSpec, Projection
from megatron.spec.norm import NormSpec
from megatron.spec.parameter import Init


@dataclass(frozen=True)
class LatentAttentionSpec:
    """The projections around the core. r channels per token are projected up to keys and values of n heads.

    q_down, q_norm: h -> the channels from which queries are projected up; None: `q_up` reads the hidden states.
    q_up: -> [n, qk_dim]. kv_down: h -> r + the rotated channels of the key, which all heads share. kv_up: r -> [n,
    qk_dim - rotated + v_dim]. Norms are those of latents, None for none. rotary: rotates the last channels of queries
    and keys; None: they are not rotated. rotated: the number of these channels. longest: an indexer that is not
    computed chooses so many keys for each query, and no sequence is longer; None for attention without an indexer.
    """

    q_down: LinearSpec | None
    q_norm: NormSpec | None
    q_up: LinearSpec
    kv_down: LinearSpec
    kv_norm: NormSpec | None
    kv_up: LinearSpec
    linear_proj: LinearSpec
    rotary: RotarySpec | None
    rotated: int
    core: CoreSpec
    longest: int | None

    def parts(self) -> Iterator[tuple[str, LinearSpec | NormSpec]]:
        """(path, spec) of the modules with parameters, in the order in which they are made."""
        if self.q_down is None:
            yield "linear_q_proj", self.q_up
        else:
            yield "linear_q_down_proj", self.q_down
            if self.q_norm is not None:
                yield "q_layernorm", self.q_norm
            yield "linear_q_up_proj", self.q_up
        yield "linear_kv_down_proj", self.kv_down
        if self.kv_norm is not None:
            yield "kv_layernorm", self.kv_norm
        yield "linear_kv_up_proj", self.kv_up
        yield "linear_proj", self.linear_proj

    @property
    def cached(self) -> CoreSpec:
        """What generation keeps of a token, as keys of one head: the latent and the rotated channels."""
        return dataclasses.replace(self.core, groups=1, qk_dim=self.latent + self.rotated, v_dim=0)

    @property
    def latent(self) -> int:
        """Channels from which keys and values are projected up."""
        return self.kv_up.in_features


def down_linear(name: str, hidden: int, channels: int, init: Init) -> LinearSpec:
    """The projection of hidden states to a latent, which every rank of tp computes for its part of the sequence."""
    return LinearSpec(hidden, (channels,), REPLICATED, (Projection(name, Box((0,), (channels,))),), init=init)


def up_linear(name: str, inputs: int, heads: int, channels: int, init: Init) -> LinearSpec:
    """The projection to `channels` of every head; `out_shape` is (heads, channels)."""
    whole = Box((0, 0), (heads, channels))
    return LinearSpec(inputs, (heads, channels), COLUMN, (Projection(name, whole),), init=init)
