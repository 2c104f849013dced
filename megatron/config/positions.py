"""How the positions of tokens enter the decoder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron.config.flag import Need, flag, on_by_default
from megatron.config.interval import ABOVE_ONE, AT_LEAST_ONE, POSITIVE, SHARE, SIZE

# Position embeddings that rotate queries and keys.
ROTARY = ("rope", "yarn", "longrope")
ALIBI = "alibi"
ALIBI_POSITIONS = 1 << 16  # two digits of eight bits: see kernels/ops/alibi.py


def _positions(run: Any) -> str:
    return f"--position-embedding-type is {run.model.position_embedding_type}"


_ROTARY = Need(
    lambda run: run.model.position_embedding_type in ROTARY, _positions, "give --position-embedding-type rope"
)
_ROPE = Need(lambda run: run.model.position_embedding_type == "rope", _positions, "give --position-embedding-type rope")
_YARN = Need(lambda run: run.model.position_embedding_type == "yarn", _positions, "give --position-embedding-type yarn")
_LONGROPE = Need(
    lambda run: run.model.position_embedding_type == "longrope", _positions, "give --position-embedding-type longrope"
)
_ALIBI = Need(
    lambda run: run.model.position_embedding_type == ALIBI, _positions, "give --position-embedding-type alibi"
)
_ROPE_SCALING_OR_YARN = Need(
    lambda run: run.model.use_rope_scaling or _YARN.holds(run),
    lambda run: f"{_positions(run)} without --use-rope-scaling",
    "add --use-rope-scaling, or give --position-embedding-type yarn",
)
_ORIGINAL_CONTEXT = Need(
    lambda run: _ROPE_SCALING_OR_YARN.holds(run) or _LONGROPE.holds(run),
    _ROPE_SCALING_OR_YARN.reason,
    "add --use-rope-scaling, or give --position-embedding-type yarn or longrope",
)
_ROPE_SCALING = Need(
    lambda run: run.model.use_rope_scaling, "rotary frequencies are not scaled", "add --use-rope-scaling"
)


@dataclass(frozen=True, kw_only=True)
class PositionModel:
    """Fields of ModelConfig."""

    max_position_embeddings: int | None = flag(
        None,
        "longest sequence: rows of a learned position table, and the limit on --seq-length; default --seq-length",
        within=SIZE,
    )
    position_embedding_type: str = flag(
        "learned_absolute",
        "how positions enter: a learned table, rotary (rope), rotary with YaRN scaling (yarn) or LongRoPE's "
        "(longrope), a bias of attention's scores for each head, in proportion to the distance of query and key "
        "(alibi), or not at all",
        choices=("learned_absolute", *ROTARY, ALIBI, "none"),
    )
    rotary_base: float = flag(10000.0, "base of the rotary frequencies (theta)", within=ABOVE_ONE, needs=_ROTARY)
    rotary_base_local: float | None = flag(
        None,
        "base of the rotary frequencies of layers with a sliding window, which then have no scaling; default that of "
        "the other layers, and their scaling",
        within=ABOVE_ONE,
        needs=Need(
            lambda run: run.model.position_embedding_type in ROTARY and run.model.window_size is not None,
            lambda run: _positions(run) if run.model.window_size is not None else "no layer has a window",
            "give --position-embedding-type rope and --window-size",
        ),
    )
    rotary_percent: float = flag(1.0, "fraction of a head's channels that is rotated", within=SHARE, needs=_ROTARY)
    rotary_interleaved: bool = flag(
        False, "rotate neighbouring channels as a pair (GPT-J), not channels half a head apart (GPT-NeoX, Llama)"
    )
    no_rope_freq: str | None = flag(
        None,
        "layers without rotary positions: a number N for every N-th layer, or a list with one number per layer, 1 for "
        "a layer without them and 0 for one with them, such as [0,0,0,1] or ([0]*3+[1])*4",
        metavar="PATTERN",
        needs=_ROTARY,
    )
    rotary_seq_len_interpolation_factor: float | None = flag(
        None, "linear rotary scaling: positions are divided by this factor", within=POSITIVE, needs=_ROPE
    )
    dynamic_ntk_factor: float | None = flag(
        None,
        "dynamic NTK scaling by this factor X: runs whose --seq-length L is above --max-position-embeddings N, which "
        "then may be, multiply the rotary base by (X L / N - X + 1)^(d / (d - 2)) for d rotated channels",
        within=POSITIVE,
        needs=_ROPE,
    )
    use_rope_scaling: bool = flag(
        False, "Llama-3.1 rotary scaling (low frequencies stretched, high ones kept)", needs=_ROPE
    )
    rope_scaling_factor: float = flag(
        8.0,
        "stretch of --use-rope-scaling and of yarn: new context length / original context length",
        within=AT_LEAST_ONE,
        needs=_ROPE_SCALING_OR_YARN,
    )
    rope_scaling_low_freq_factor: float = flag(
        1.0, "Llama-3.1 scaling: wavelengths above original/this are stretched", within=POSITIVE, needs=_ROPE_SCALING
    )
    rope_scaling_high_freq_factor: float = flag(
        4.0, "Llama-3.1 scaling: wavelengths below original/this are kept", within=POSITIVE, needs=_ROPE_SCALING
    )
    rope_scaling_original_max_position_embeddings: int = flag(
        8192,
        "context length the rotary frequencies were first trained for (Llama-3.1 scaling, yarn and longrope)",
        aliases=("--yarn-original-max-position-embeddings",),
        within=SIZE,
        needs=_ORIGINAL_CONTEXT,
    )
    yarn_beta_fast: float = flag(
        32.0, "yarn: dimensions that turn more often than this over the context are kept", within=POSITIVE, needs=_YARN
    )
    yarn_beta_slow: float = flag(
        1.0,
        "yarn: dimensions that turn less often than this over the context are stretched",
        within=POSITIVE,
        needs=_YARN,
    )
    yarn_correction_range_round_to_int: bool = on_by_default(
        when_off="yarn: the dimensions between which stretching grows may lie between two whole numbers, as in gpt-oss",
        needs=_YARN,
    )
    yarn_mscale: float | None = flag(
        None,
        "yarn: factor on cos and sin (attention temperature); default 0.1 ln(scaling factor) + 1",
        within=POSITIVE,
        needs=_YARN,
    )
    llama_4_scaling_beta: float | None = flag(
        None,
        "yarn: queries are multiplied by 1 + this x ln(1 + floor(position / original context)), as in Ministral 3 and "
        "Mistral Large 3",
        within=POSITIVE,
        needs=_YARN,
    )
    short_factor: str | None = flag(
        None,
        "longrope: divisors of the rotary frequencies, one per pair of rotated channels, in runs whose --seq-length is "
        "at most --rope-scaling-original-max-position-embeddings; numbers separated by commas, in one word",
        metavar="X,X,...",
        needs=_LONGROPE,
    )
    long_factor: str | None = flag(
        None,
        "longrope: as --short-factor, in runs with longer sequences",
        metavar="X,X,...",
        needs=_LONGROPE,
    )
    longrope_mscale: float | None = flag(
        None,
        "longrope: factor on cos and sin; default sqrt(1 + ln(context / original context) / ln(original context)), of "
        "--max-position-embeddings and --rope-scaling-original-max-position-embeddings, and 1 if the first is not "
        "larger",
        within=POSITIVE,
        needs=_LONGROPE,
    )
    alibi_bias_max: float = flag(
        8.0,
        "alibi: the bias of head h of n is 2^(-X h / n) per token of distance (MPT); heads behind the largest power "
        "of two get the odd steps of twice as many heads",
        within=POSITIVE,
        needs=_ALIBI,
    )
    scale_alibi_bias: bool = flag(
        False, "alibi: add the bias before the scores are scaled, which scales it, too (Falcon)", needs=_ALIBI
    )
