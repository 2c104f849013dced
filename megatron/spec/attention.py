"""Self-attention as data."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from megatron.base.box import Box
from megatron.config.layer_forms import VANILLA
from megatron.spec.linear import COLUMN, LinearSpec, Projection
from megatron.spec.norm import NormSpec
from megatron.spec.parameter import Init, ParamSpec, Shard

# Columns of a cache beyond its window: one step of so many moves the keys of the window.
WINDOW_SLACK = 64
ALIBI_CHANNELS = 8  # of queries and keys, behind those that are projected: see kernels/ops/alibi.py


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's rule: low frequencies are stretched by `factor`, high ones kept, those between blended."""

    factor: float
    low: float
    high: float
    original: int  # context length of the first training


@dataclass(frozen=True)
class QueryScaling:
    """Factor on the queries of a position: 1 + beta x ln(1 + floor(position / original)), which is 1 below `original`
    (Llama 4's temperature of long contexts, as Ministral 3 has it)."""

    beta: float
    original: int


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (Peng et al., arXiv 2309.00071). magnitude: factor on cos and sin. rounds: whether the dimensions between
    which stretching grows are rounded away from each other.
    """

    factor: float
    beta_fast: float
    beta_slow: float
    original: int
    magnitude: float
    rounds: bool = True


@dataclass(frozen=True)
class LongRopeScaling:
    """LongRoPE (Ding et al., arXiv 2402.13753): frequency i is divided by short[i] in sequences of up to `original`
    tokens, by long[i] in longer ones. magnitude: factor on cos and sin, of both.
    """

    short: tuple[float, ...]
    long: tuple[float, ...]
    original: int
    magnitude: float


@dataclass(frozen=True)
class DynamicNtkScaling:
    """The base is larger in sequences of more than `context` tokens, and the more the longer they are."""

    factor: float
    context: int


def longrope_magnitude(stretch: float, original: int) -> float:
    """LongRoPE's factor on cos and sin for contexts of `stretch` x `original` tokens, where a file gives none."""
    return math.sqrt(1 + math.log(stretch) / math.log(original)) if stretch > 1 else 1.0


@dataclass(frozen=True)
class RotarySpec:
    """Rotary embedding of the first `channels` of each head.

    interpolation: positions are divided by it (linear scaling). interleaved: channel 2 i is paired with 2 i + 1, else i
    with i + channels / 2.
    """

    channels: int
    base: float
    interleaved: bool
    interpolation: float | None = None
    llama3: Llama3Scaling | None = None
    yarn: YarnScaling | None = None
    longrope: LongRopeScaling | None = None
    dynamic: DynamicNtkScaling | None = None

    @property
    def short(self) -> int | None:
        """Tokens of the longest sequence with the frequencies of short ones; None: all sequences have them."""
        if self.longrope is not None:
            return self.longrope.original
        return None if self.dynamic is None else self.dynamic.context


@dataclass(frozen=True)
class AlibiSpec:
    """Attention with linear biases (ALiBi; Press et al., arXiv 2108.12409): each head adds its slope times the position
    of a key, less that of the query, to a score.

    bias_max: minus the binary logarithm of the last head's slope, where their number is a power of two. scale: factor
    on the slopes that takes them to products of queries and keys, before these are scaled.
    """

    heads: int
    bias_max: float
    scale: float

    @property
    def slopes(self) -> tuple[float, ...]:
        """Slope of each head, times `scale`. Heads behind the largest power of two get the odd steps of twice as
        many."""
        whole = 1 << (self.heads.bit_length() - 1)
        steps = [step / whole for step in range(1, whole + 1)]
        steps += [step / (2 * whole) for step in range(1, 2 * (self.heads - whole), 2)]
        return tuple(2.0 ** (-self.bias_max * step) * self.scale for step in steps)


@dataclass(frozen=True)
class CoreSpec:
    """softmax(scale q k^T) v of causal self-attention, between the projections: all that kernels, context parallelism,
    caches and the memory of attention need to know of a layer.

    heads: query heads. groups: key/value heads, which divide them. qk_dim: channels of a query and of a key. v_dim:
    channels of a value, and of a head's output. window: the keys that a query sees at most, its own included; None:
    all. scale: factor on the products of queries and keys. softcap: scores are capped smoothly at it; None: they are
    not. dropout: rate of dropped probabilities. softmax_type: "vanilla"; "off-by-one" or "learnable" if the softmax of
    each head has a sink, a score without a key, which is 0 or trained. position_channels: those of qk_dim that are not
    projected, but hold positions.
    """

    heads: int
    groups: int
    qk_dim: int
    v_dim: int
    window: int | None
    scale: float
    softcap: float | None
    dropout: float = field(compare=False)
    softmax_type: str = VANILLA
    position_channels: int = 0

    @property
    def plain_dim(self) -> int:
        """Channels of a query and of a key as they are projected."""
        return self.qk_dim - self.position_channels

    @property
    def has_sinks(self) -> bool:
        """Whether the softmax of each head has a sink."""
        return self.softmax_type != VANILLA

    @property
    def head_dim(self) -> int:
        """Channels of heads with as many for queries as for values, whose attention costs as much."""
        return (self.plain_dim + self.v_dim) // 2

    @property
    def output_channels(self) -> int:
        """Channels of the output of all heads."""
        return self.heads * self.v_dim

    def local_groups(self, tp: int) -> int:
        """Key/value heads that each of `tp` ranks holds: at least one."""
        return max(1, self.groups // tp)

    def group_holders(self, tp: int) -> int:
        """The number of neighbours that hold the same key/value head and divide its query heads."""
        return max(1, tp // self.groups)

    def cached_columns(self, capacity: int) -> int:
        """Tokens whose keys and values generation keeps of sequences of up to `capacity` tokens."""
        return capacity if self.window is None else min(capacity, self.window + WINDOW_SLACK)

    def cache_bytes(self, tp: int, capacity: int, itemsize: int) -> int:
        """Bytes of a sequence's keys and values on one of `tp` ranks."""
        return self.cached_columns(capacity) * self.local_groups(tp) * (self.qk_dim + self.v_dim) * itemsize

    def step_bytes(self, tp: int, columns: float, itemsize: int) -> float:
        """Bytes of the cache that a new token reads, of a sequence of so many tokens."""
        seen = columns if self.window is None else min(columns, self.window)
        return seen * self.local_groups(tp) * (self.qk_dim + self.v_dim) * itemsize

    def multiply_adds(self, seq_length: int) -> float:
        """Scores and weighted values per token, causal, on average over a sample."""
        return self.heads * (self.plain_dim + self.v_dim) * keys_seen(self.window, seq_length)


@dataclass(frozen=True)
class SinksSpec:
    """A trained score per query head, which takes part in the softmax and has no value."""

    heads: int
    init: Init = field(default=Init("normal", 0.02), compare=False)

    @property
    def weight(self) -> ParamSpec:
        """[heads], sharded over tp as the heads are."""
        return ParamSpec((self.heads,), self.init, (Shard("tp", 0),), decay=False)

    def parameters(self) -> Iterator[tuple[str, ParamSpec]]:
        """(name, parameter), in the order of the module."""
        yield "softmax_offset", self.weight


@dataclass(frozen=True)
class AttentionSpec:
    """Self-attention: the projections around its core.

    The fused QKV weight is [groups, (q + 1) plain_dim + v_dim, h]: per group its q queries, its key and its value.
    q_norm, k_norm: over each head's channels, or over those of all heads together. rotary: None in a layer without
    rotary embedding. gated: behind each query the weight has the rows of its gate, as wide as a value, and the output
    of its head is multiplied by the sigmoid of that. sinks: None in a layer without trained ones. alibi: None in a
    layer without the bias. clip: limit of queries, keys and values, see --clip-qkv. norm_after_rotation: the norms read
    rotated queries and keys, in a layer with both.
    """

    linear_qkv: LinearSpec
    linear_proj: LinearSpec
    q_norm: NormSpec | None
    k_norm: NormSpec | None
    rotary: RotarySpec | None
    core: CoreSpec
    gated: bool = False
    sinks: SinksSpec | None = None
    clip: float | None = None
    alibi: AlibiSpec | None = None
    norm_after_rotation: bool = False

    def parts(self) -> Iterator[tuple[str, LinearSpec | NormSpec | SinksSpec]]:
        """(path, spec) of the modules with parameters, in the order in which they are made."""
        if self.sinks is not None:
            yield "core_attention", self.sinks
        yield "linear_qkv", self.linear_qkv
        yield "linear_proj", self.linear_proj
        if self.q_norm is not None and self.k_norm is not None:
            yield "q_layernorm", self.q_norm
            yield "k_layernorm", self.k_norm

    @property
    def cached(self) -> CoreSpec:
        """The heads whose keys and values generation keeps."""
        return self.core


def keys_seen(window: int | None, seq_length: int) -> float:
    """Tokens that a token attends to, on average over a sample: s / 2, or W - W^2 / 2s with a window of W < s."""
    if window is None or window >= seq_length:
        return seq_length / 2
    return window - window**2 / (2 * seq_length)


def qkv_linear(hidden: int, core: CoreSpec, *, bias: bool, init: Init, gated: bool = False) -> LinearSpec:
    """The fused projection; `out_shape` is (groups, (q + 1) plain_dim + v_dim), with v_dim more for each gate."""
    groups, queries = core.groups, core.heads // core.groups * (core.plain_dim + (core.v_dim if gated else 0))
    keys = queries + core.plain_dim
    return LinearSpec(
        hidden,
        (groups, keys + core.v_dim),
        COLUMN,
        (
            Projection("q_proj", Box((0, 0), (groups, queries)), own_rows=queries),
            Projection("k_proj", Box((0, queries), (groups, core.plain_dim)), own_rows=0),
            Projection("v_proj", Box((0, keys), (groups, core.v_dim)), own_rows=0),
        ),
        has_bias=bias,
        init=init,
        own_rows=queries,
    )
