"""A gated delta net as data (Yang, Kautz and Hatamizadeh, arXiv 2412.06464), as Qwen3-Next and Qwen3.5 have it, and in
the form of Kimi Linear (arXiv 2510.26692)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from megatron.base.box import Box
from megatron.spec.linear import COLUMN, REPLICATED, LinearSpec, Projection
from megatron.spec.norm import NormSpec
from megatron.spec.parameter import Init, ParamSpec, Shard
from megatron.spec.sizes import FP32

CHUNK = 64  # tokens of the delta rule that are computed at once
# Decay rates begin between 0.01 and this, as in the published models.
_HIGHEST_RATE = 16.0
# Where each channel has a decay, steps begin below this, as in Kimi Linear.
_LARGEST_STEP = 0.1


@dataclass(frozen=True)
class DeltaCoreSpec:
    """The state of a delta net, between the projections: per value head [qk_dim, v_dim], whatever the length.

    key_heads: heads of queries and keys. value_heads: each key head serves value_heads / key_heads of them in a row.
    taps: tokens, its own included, from which the convolution before it computes one. by_channel: each
    channel of a key has a decay, and not each head. dropout: there is none.
    """

    key_heads: int
    value_heads: int
    qk_dim: int
    v_dim: int
    taps: int
    by_channel: bool = False
    dropout: float = field(default=0.0, init=False, compare=False)

    @property
    def shared(self) -> int:
        """Value heads of a key head."""
        return self.value_heads // self.key_heads

    @property
    def convolved(self) -> int:
        """Channels of a key head that are convolved: a query, a key and its values."""
        return 2 * self.qk_dim + self.shared * self.v_dim

    @property
    def output_channels(self) -> int:
        """Channels of the output of all heads."""
        return self.value_heads * self.v_dim

    @property
    def decay_channels(self) -> int:
        """Decays of a value head."""
        return self.qk_dim if self.by_channel else 1

    def group_holders(self, tp: int) -> int:
        """No head is held by several ranks."""
        return 1

    def state_elements(self, tp: int) -> int:
        """Elements of the state of a sequence on one of `tp` ranks, in fp32."""
        return self.value_heads // tp * self.qk_dim * self.v_dim

    def window_elements(self, tp: int) -> int:
        """Elements of the inputs of the convolution that a next token of a sequence needs, on one of `tp` ranks."""
        return (self.taps - 1) * self.key_heads // tp * self.convolved

    def cache_bytes(self, tp: int, capacity: int, itemsize: int) -> int:
        """Bytes that generation keeps of a sequence on one of `tp` ranks, whatever its length."""
        return self.state_elements(tp) * FP32 + self.window_elements(tp) * itemsize

    def step_bytes(self, tp: int, columns: float, itemsize: int) -> float:
        """Bytes of it that a new token reads and writes."""
        return 2 * self.cache_bytes(tp, 0, itemsize)

    def multiply_adds(self, seq_length: int) -> float:
        """Per token: the state is read with the key, changed, and read with the query; and the convolution."""
        state = 3 * self.value_heads * self.qk_dim * self.v_dim
        return state + self.taps * self.key_heads * self.convolved


@dataclass(frozen=True)
class ConvolutionSpec:
    """A causal convolution of each channel by itself, whose channels are those of the key heads. The weight is [heads,
    channels of a head, 1, taps]."""

    heads: int
    channels: int
    taps: int

    def parameters(self) -> Iterator[tuple[str, ParamSpec]]:
        """(name, parameter), in the order of the module."""
        init = Init("uniform", 1.0 / math.sqrt(self.taps))
        yield "weight", ParamSpec((self.heads, self.channels, 1, self.taps), init, (Shard("tp", 0),))


@dataclass(frozen=True)
class DecaySpec:
    """The decay of the state of each head: exp(-exp(A_log) softplus(a + dt_bias)), with a projected from a token.

    channels: of a key, each of which has an `a` and a `dt_bias`; None where the head has one.
    """

    heads: int
    channels: int | None = None

    def parameters(self) -> Iterator[tuple[str, ParamSpec]]:
        """(name, parameter), in the order of the module."""
        shards = (Shard("tp", 0),)
        yield "A_log", ParamSpec((self.heads,), Init("log_uniform", _HIGHEST_RATE), shards, decay=False)
        if self.channels is None:
            yield "dt_bias", ParamSpec((self.heads,), Init("constant", 1.0), shards, decay=False)
        else:
            init = Init("softplus", _LARGEST_STEP)
            yield "dt_bias", ParamSpec((self.heads, self.channels), init, shards, decay=False)


@dataclass(frozen=True)
class DeltaLatentsSpec:
    """The projections of decays and gates, by way of latents of a token, as in Kimi Linear.

    down: h -> the latents of the decays, and those of the gates. decay: -> [value heads, qk_dim]. gate: -> [value
    heads, v_dim]. A latent has as many channels as one head that is projected from it.
    """

    down: LinearSpec
    decay: LinearSpec
    gate: LinearSpec


@dataclass(frozen=True)
class DeltaNetSpec:
    """The projections around the state.

    in_proj: h -> per key head its query, key, values, their gates z, and per value head b (how much of a token is
    written) and a (the decay). out_norm: over a value head's channels, before the gate. linear_proj: behind the state.
    latents: a and z are projected from them and not by in_proj, and the gate is a sigmoid and not a SiLU; or None.
    """

    in_proj: LinearSpec
    convolution: ConvolutionSpec
    decay: DecaySpec
    out_norm: NormSpec
    linear_proj: LinearSpec
    core: DeltaCoreSpec
    latents: DeltaLatentsSpec | None = None

    rotary = None  # nothing is rotated

    @property
    def cached(self) -> DeltaCoreSpec:
        """The state that generation keeps."""
        return self.core

    def parts(self) -> Iterator[tuple[str, LinearSpec | NormSpec | ConvolutionSpec | DecaySpec]]:
        """(path, spec) of the modules with parameters, in the order in which they are made."""
        yield "in_proj", self.in_proj
        if self.latents is not None:
            yield "latent_proj", self.latents.down
            yield "decay_proj", self.latents.decay
            yield "gate_proj", self.latents.gate
        yield "conv1d", self.convolution
        yield "decay", self.decay
        yield "out_norm", self.out_norm
        yield "out_proj", self.linear_proj


def delta_in_proj(hidden: int, core: DeltaCoreSpec, init: Init) -> LinearSpec:
    """The projection of hidden states; `out_shape` is (key heads, channels of a key head)."""
    heads, values = core.key_heads, core.shared * core.v_dim
    widths = (
        {"q_proj": core.qk_dim, "k_proj": core.qk_dim, "v_proj": values, "b_proj": core.shared}
        if core.by_channel
        else {
            "in_proj_qkv": core.convolved,
            "in_proj_z": values,
            "in_proj_b": core.shared,
            "in_proj_a": core.shared,
        }
    )
    projections, first = [], 0
    for name, width in widths.items():
        projections.append(Projection(name, Box((0, first), (heads, width))))
        first += width
    return LinearSpec(hidden, (heads, first), COLUMN, tuple(projections), init=init)


def delta_latents(hidden: int, core: DeltaCoreSpec, init: Init) -> DeltaLatentsSpec:
    """The projections of the form whose channels have decays, to latents and from them."""
    heads, widths = core.value_heads, (core.qk_dim, core.v_dim)
    down = (Projection("f_a_proj", Box((0,), widths[:1])), Projection("g_a_proj", Box(widths[:1], widths[1:])))
    decay, gate = (
        LinearSpec(width, (heads, width), COLUMN, (Projection(name, Box((0, 0), (heads, width))),), init=init)
        for name, width in zip(("f_b_proj", "g_b_proj"), widths, strict=True)
    )
    return DeltaLatentsSpec(LinearSpec(hidden, (sum(widths),), REPLICATED, down, init=init), decay, gate)
