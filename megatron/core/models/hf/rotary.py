"""Rotary embedding in config.json: `rope_parameters`, or `rope_theta` and `rope_scaling` as older versions write it."""

from __future__ import annotations

import math
from typing import Any

from megatron.config.interval import ABOVE_ONE, AT_LEAST_ONE, NOT_NEGATIVE, POSITIVE, SHARE
from megatron.config.latent_attention import yarn_temperature
from megatron.config.layers import written
from megatron.config.model import ModelConfig
from megatron.core.models.hf.config_json import JsonFields
from megatron.spec.attention import longrope_magnitude

_YARN_FIELDS = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")

_BETA = "llama_4_scaling_beta"


def read_rotary(
    fields: JsonFields,
    where: str,
    *,
    default_theta: float,
    default_percent: float | None,
    default_original: int | None,
    default_local_theta: float | None,
    context: int,
    alpha_channels: int | None = None,
    scales_queries: bool = False,
    unread: frozenset[str] = frozenset(),
) -> dict[str, Any]:
    """Returns fields of ModelConfig. `context` is the model's max_position_embeddings. Raises CheckpointError.

    unread: fields of the embedding that do not change that of text. alpha_channels: the rotated channels of a head in a
    family whose field alpha scales the base of the type "dynamic" once, whatever the length; None: it has no such
    field. scales_queries: it has only YaRN, with the factor of queries by their position, and may repeat `context`.

    default_percent: the fraction of a head that is rotated where the file does not say; None: always all of it.
    default_original: the original_max_position_embeddings where the file does not say, of a family whose only scaling
    is LongRoPE; None: any other scaling. default_local_theta: the rope_local_base_freq where the file does not say, of
    a family whose layers with a window have an embedding of their own; its `rope_parameters` has a dict for each kind.

    If both dicts are given, transformers uses `rope_scaling` and no field of the other.
    """
    old: dict[str, Any] | None = fields.take("rope_scaling", dict, None)
    new: dict[str, Any] | None = fields.take("rope_parameters", dict, None)
    local: dict[str, Any] = {}
    if default_local_theta is not None:
        new, local = _by_kind(fields, where, new or {}, default_local_theta)
        old = {**new, **old} if old else None
    rope = JsonFields(old or new or {}, f"{where}: {'rope_scaling' if old else 'rope_parameters'}")
    outer = fields.number("rope_theta", ABOVE_ONE, default_theta)
    percent = 1.0
    if scales_queries:
        rope.take("partial_rotary_factor", (int, float), None)  # of heads whose rotated part has a size of its own
    elif default_percent is None:
        for place in (fields, rope):
            place.only("partial_rotary_factor", 1.0)
    else:
        whole = fields.number("partial_rotary_factor", SHARE, default_percent)
        percent = rope.number("partial_rotary_factor", SHARE, whole)
    kind = rope.take("rope_type", str, rope.take("type", str, "default"))
    if scales_queries and kind != "yarn":
        raise rope.error(f"rope type {kind!r} is not supported in this family; yarn is")
    base = rope.number("rope_theta", ABOVE_ONE, outer)
    settings: dict[str, Any] = {
        "position_embedding_type": "rope",
        "rotary_base": base,
        "rotary_percent": percent,
        **local,
    }
    if default_original is not None:
        first_context = fields.integer("original_max_position_embeddings", ABOVE_ONE, default_original)
        rope.take("original_max_position_embeddings", object, None)  # transformers prefers the one outside
        # The names of LongRoPE in the first files, which transformers still takes for it.
        if kind in ("longrope", "su", "yarn"):
            settings |= _longrope(rope, first_context)
        elif kind != "default":
            raise rope.error(f"rope type {kind!r} is not supported in this family; default and longrope are")
    elif kind == "linear":
        settings["rotary_seq_len_interpolation_factor"] = rope.number("factor", POSITIVE)
    elif kind == "llama3":
        low, high = rope.number("low_freq_factor", POSITIVE), rope.number("high_freq_factor", POSITIVE)
        if low >= high:
            raise rope.error(f"low_freq_factor {low} is not below high_freq_factor {high}")
        original = "original_max_position_embeddings"
        settings |= {
            "use_rope_scaling": True,
            "rope_scaling_factor": rope.number("factor", AT_LEAST_ONE),
            "rope_scaling_low_freq_factor": low,
            "rope_scaling_high_freq_factor": high,
            f"rope_scaling_{original}": rope.integer(original, AT_LEAST_ONE, context),
        }
    elif kind == "yarn":
        settings |= read_yarn(rope, context)
        if scales_queries:
            rope.only("max_position_embeddings", context)
            settings[_BETA] = rope.number(_BETA, POSITIVE)
    elif kind == "dynamic":
        rope.take("original_max_position_embeddings", int, None)  # written, but without effect
        settings |= _dynamic(rope, base, alpha_channels)
    elif kind != "default":
        raise rope.error(f"rope type {kind!r} is not supported; default, linear, dynamic, llama3 and yarn are")
    if kind == "default":
        rope.take("original_max_position_embeddings", int, None)  # written, but without effect
    rope.finish(unread)
    return settings


def rotary_share(channels: int, size: int) -> float:
    """Returns the --rotary-percent with which this number of channels of a head are rotated, and not one fewer."""
    share = channels / size
    return share if int(size * share) == channels else math.nextafter(share, 1.0)


def _by_kind(
    fields: JsonFields, where: str, parameters: dict[str, Any], theta: float
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the rope_parameters of layers without a window, and the fields of ModelConfig for those with one."""
    kinds = JsonFields(parameters, f"{where}: rope_parameters")
    whole = kinds.take("full_attention", dict, None) or {}
    sliding = JsonFields(kinds.take("sliding_attention", dict, None) or {}, f"{where}: sliding_attention")
    kinds.finish(frozenset())
    sliding.only("rope_type", "default")
    outside = fields.number("rope_local_base_freq", ABOVE_ONE, theta)
    local = {"rotary_base_local": sliding.number("rope_theta", ABOVE_ONE, outside)}
    sliding.finish(frozenset())
    return whole, local


def _dynamic(rope: JsonFields, base: float, alpha_channels: int | None) -> dict[str, Any]:
    alpha = None if alpha_channels is None else rope.optional_number("alpha", NOT_NEGATIVE)
    if alpha_channels is None or not alpha:
        return {"dynamic_ntk_factor": rope.number("factor", POSITIVE)}
    for name in ("factor", *_YARN_FIELDS):
        rope.take(name, (int, float), None)  # alpha alone has an effect
    if alpha_channels == 2:
        raise rope.error(f"alpha is {alpha}, and heads of 2 channels have no base that it could scale")
    return {"rotary_base": base * alpha ** (alpha_channels / (alpha_channels - 2))}


def _longrope(rope: JsonFields, original: int) -> dict[str, Any]:
    magnitude, factor = (rope.optional_number(name, POSITIVE) for name in ("attention_factor", "factor"))
    if magnitude is None and factor is not None:
        magnitude = longrope_magnitude(factor, original)
    return {
        "position_embedding_type": "longrope",
        "rope_scaling_original_max_position_embeddings": original,
        "short_factor": written(rope.numbers("short_factor", POSITIVE)),
        "long_factor": written(rope.numbers("long_factor", POSITIVE)),
        "longrope_mscale": magnitude,
    }


def read_yarn(rope: JsonFields, context: int) -> dict[str, Any]:
    """Returns the fields of ModelConfig for YaRN; `context` is the model's max_position_embeddings."""
    factor = rope.number("factor", AT_LEAST_ONE)
    rounds = (
        rope.take("truncate", bool, False) if rope.has("truncate") else True
    )  # a null does not mean the default here
    attention = rope.optional_number("attention_factor", POSITIVE)
    scale, scale_all = (rope.optional_number(name, NOT_NEGATIVE) for name in ("mscale", "mscale_all_dim"))
    fast, slow = rope.number("beta_fast", POSITIVE, 32.0), rope.number("beta_slow", POSITIVE, 1.0)
    if slow > fast:
        raise rope.error(f"beta_slow {slow} is above beta_fast {fast}")
    original = "original_max_position_embeddings"
    if attention is None:
        above, below = (scale, scale_all) if scale and scale_all else (1.0, 0.0)
        attention = yarn_temperature(factor, above) / yarn_temperature(factor, below)
    return {
        "position_embedding_type": "yarn",
        "rope_scaling_factor": factor,
        f"rope_scaling_{original}": rope.integer(original, AT_LEAST_ONE, context),
        "yarn_beta_fast": fast,
        "yarn_beta_slow": slow,
        "yarn_mscale": attention,
        "yarn_correction_range_round_to_int": rounds,
    }


def latent_yarn(fields: JsonFields) -> dict[str, Any]:
    """Returns the fields of ModelConfig for YaRN's two temperatures with latent attention, after `read_rotary`."""
    rope: dict[str, Any] = fields.take("rope_scaling", dict, None) or fields.take("rope_parameters", dict, None) or {}
    if rope.get("rope_type", rope.get("type")) != "yarn":
        return {}
    scale, scale_all = (rope.get(name) or 0.0 for name in ("mscale", "mscale_all_dim"))
    ratio = {"mscale": float(scale), "yarn_mscale": None} if scale and scale_all else {}
    return ({} if rope.get("attention_factor") else ratio) | {"mscale_all_dim": float(scale_all)}


def write_latent_yarn(config: ModelConfig) -> dict[str, Any]:
    """Returns `rope_scaling` with both temperatures, of a model with latent attention."""
    scaling = write_rotary(config)["rope_scaling"]
    if config.position_embedding_type != "yarn" or not config.mscale_all_dim:
        return {}
    if config.yarn_mscale is None and config.mscale:
        scaling = {name: value for name, value in scaling.items() if name != "attention_factor"}
        scaling |= {"mscale": config.mscale}
    return {"rope_scaling": scaling | {"mscale_all_dim": config.mscale_all_dim}}


def write_rotary(config: ModelConfig) -> dict[str, Any]:
    """Returns `rope_theta` and `rope_scaling`, which every version of transformers reads."""
    scaling: dict[str, Any] | None = None
    if config.position_embedding_type == "yarn":
        factor = config.rope_scaling_factor
        scaling = {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": config.rope_scaling_original_max_position_embeddings,
            "beta_fast": config.yarn_beta_fast,
            "beta_slow": config.yarn_beta_slow,
            "attention_factor": config.yarn_magnitude,
        } | ({} if config.yarn_correction_range_round_to_int else {"truncate": False})
        scaling |= {} if config.llama_4_scaling_beta is None else {_BETA: config.llama_4_scaling_beta}
    elif config.position_embedding_type == "longrope":
        scaling = _longrope_scaling(config)
    elif config.use_rope_scaling:
        scaling = {
            "rope_type": "llama3",
            "factor": config.rope_scaling_factor,
            "low_freq_factor": config.rope_scaling_low_freq_factor,
            "high_freq_factor": config.rope_scaling_high_freq_factor,
            "original_max_position_embeddings": config.rope_scaling_original_max_position_embeddings,
        }
    elif config.dynamic_ntk_factor is not None:
        scaling = {"rope_type": "dynamic", "factor": config.dynamic_ntk_factor}
    elif config.rotary_seq_len_interpolation_factor:
        scaling = {"rope_type": "linear", "factor": float(config.rotary_seq_len_interpolation_factor)}
    partial = {} if config.rotary_percent == 1.0 else {"partial_rotary_factor": config.rotary_percent}
    return {"rope_theta": config.rotary_base, "rope_scaling": scaling, **partial}


def write_rotary_by_kind(config: ModelConfig) -> dict[str, Any]:
    """Returns `rope_parameters` with a dict for each kind of layer, of which those with a window are not scaled."""
    whole = {"rope_type": "default", **(write_rotary(config)["rope_scaling"] or {}), "rope_theta": config.rotary_base}
    sliding = {"rope_type": "default", "rope_theta": config.rotary_base_local or config.rotary_base}
    return {"rope_parameters": {"full_attention": whole, "sliding_attention": sliding}}


def _longrope_scaling(config: ModelConfig) -> dict[str, Any]:
    """Without attention_factor where it is the default, because the first versions of transformers take only these
    three."""
    short, long = config.longrope_factors
    scaling: dict[str, Any] = {"type": "longrope", "short_factor": list(short), "long_factor": list(long)}
    if config.longrope_mscale is not None:
        scaling["attention_factor"] = config.longrope_mscale
    return scaling
