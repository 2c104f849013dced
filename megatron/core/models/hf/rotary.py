"""Rotary embedding in config.json: `rope_parameters`, or `rope_theta` and `rope_scaling` as older versions write it."""

from __future__ import annotations

import math
from typing import Any

from megatron.config.model import ModelConfig
from megatron.core.models.hf.config_json import JsonFields


def read_rotary(fields: JsonFields, where: str, *, default_theta: float, context: int) -> dict[str, Any]:
    """Fields of ModelConfig. `context`: the model's max_position_embeddings. Raises CheckpointError."""
    old, new = fields.take("rope_scaling", dict, None), fields.take("rope_parameters", dict, None)
    rope = JsonFields(new or old or {}, f"{where}: {'rope_parameters' if new else 'rope_scaling'}")
    theta = rope.take("rope_theta", (int, float), fields.take("rope_theta", (int, float), default_theta))
    fields.only("partial_rotary_factor", 1.0)
    rope.only("partial_rotary_factor", 1.0)
    kind = rope.take("rope_type", str, rope.take("type", str, "default"))
    found: dict[str, Any] = {"position_embedding_type": "rope", "rotary_base": float(theta)}
    if kind == "linear":
        found["rotary_seq_len_interpolation_factor"] = rope.number("factor")
    elif kind == "llama3":
        found |= {
            "use_rope_scaling": True,
            "rope_scaling_factor": rope.number("factor"),
            "rope_scaling_low_freq_factor": rope.number("low_freq_factor"),
            "rope_scaling_high_freq_factor": rope.number("high_freq_factor"),
            "rope_scaling_original_max_position_embeddings": rope.take("original_max_position_embeddings", int),
        }
    elif kind == "yarn":
        found |= _yarn(rope, context)
    elif kind != "default":
        raise rope.error(f"rope type {kind!r} is not supported; default, linear, llama3 and yarn are")
    if kind == "default":
        rope.take("original_max_position_embeddings", int, None)  # written without effect
    rope.finish(frozenset())
    return found


def _yarn(rope: JsonFields, context: int) -> dict[str, Any]:
    factor = rope.number("factor")
    rope.only("truncate", True)
    attention: float | None = rope.take("attention_factor", (int, float), None)
    scale, scale_all = rope.take("mscale", (int, float), None), rope.take("mscale_all_dim", (int, float), None)
    if attention is None:
        attention = _mscale(factor, scale) / _mscale(factor, scale_all) if scale and scale_all else _mscale(factor, 1.0)
    return {
        "position_embedding_type": "yarn",
        "rope_scaling_factor": factor,
        "rope_scaling_original_max_position_embeddings": rope.take("original_max_position_embeddings", int, context),
        "yarn_beta_fast": rope.number("beta_fast", 32.0),
        "yarn_beta_slow": rope.number("beta_slow", 1.0),
        "yarn_mscale": float(attention),
    }


def _mscale(factor: float, scale: float) -> float:
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0


def write_rotary(config: ModelConfig) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling`, which every version of transformers reads."""
    scaling: dict[str, Any] | None = None
    if config.position_embedding_type == "yarn":
        factor = config.rope_scaling_factor
        scaling = {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": config.rope_scaling_original_max_position_embeddings,
            "beta_fast": config.yarn_beta_fast,
            "beta_slow": config.yarn_beta_slow,
            "attention_factor": _mscale(factor, 1.0) if config.yarn_mscale is None else config.yarn_mscale,
        }
    elif config.use_rope_scaling:
        scaling = {
            "rope_type": "llama3",
            "factor": config.rope_scaling_factor,
            "low_freq_factor": config.rope_scaling_low_freq_factor,
            "high_freq_factor": config.rope_scaling_high_freq_factor,
            "original_max_position_embeddings": config.rope_scaling_original_max_position_embeddings,
        }
    elif config.rotary_seq_len_interpolation_factor:
        scaling = {"rope_type": "linear", "factor": float(config.rotary_seq_len_interpolation_factor)}
    return {"rope_theta": config.rotary_base, "rope_scaling": scaling}
