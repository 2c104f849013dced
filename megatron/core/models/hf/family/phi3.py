"""Phi-3 to Phi-4-mini: fused projections, LongRoPE, partial rotation."""

from __future__ import annotations

from typing import Any

from megatron.config.interval import AT_LEAST_ONE, BELOW_ONE
from megatron.config.model import ModelConfig
from megatron.core.models.hf.config_json import JsonFields
from megatron.core.models.hf.family.family import Family


def _read_phi3(fields: JsonFields, common: dict[str, Any]) -> dict[str, Any]:
    for name in ("attention_bias", "mlp_bias", "lm_head_bias"):
        fields.only(name, False)
    # Written by Phi-4-mini's publisher; at 1 every layer is alike and nothing is interpolated.
    for name in ("full_attn_mod", "interpolate_factor"):
        fields.only(name, 1)
    residual, embedding = fields.number("resid_pdrop", BELOW_ONE, 0.0), fields.number("embd_pdrop", BELOW_ONE, 0.0)
    if residual != embedding:
        raise fields.error(
            f"resid_pdrop is {residual} and embd_pdrop {embedding}; one probability for both (--hidden-dropout) is "
            "supported: change one of them"
        )
    if common["position_embedding_type"] == "longrope":
        _check_longrope(fields, common)
    window = fields.optional_integer("sliding_window", AT_LEAST_ONE)
    return {"hidden_dropout": residual, "window_size": None if window is None else f"{window - 1},0"}


def _check_longrope(fields: JsonFields, common: dict[str, Any]) -> None:
    """Raises CheckpointError unless both lists have a number for each pair of channels, counted as transformers
    counts."""
    head_dim = common["hidden_size"] // common["num_attention_heads"]
    if common["kv_channels"] not in (None, head_dim):
        raise fields.error(
            f"head_dim is {common['kv_channels']}; with LongRoPE transformers needs hidden_size / num_attention_heads, "
            f"{head_dim}"
        )
    pairs = int(head_dim * common["rotary_percent"]) // 2
    for name in ("short_factor", "long_factor"):
        if (count := len(common[name].split(","))) != pairs:
            raise fields.error(f"{name} has {count} numbers, and a head has {pairs} pairs of rotated channels")


def _write_phi3(model: ModelConfig) -> dict[str, Any]:
    original = {"original_max_position_embeddings": model.rope_scaling_original_max_position_embeddings}
    return {
        "sliding_window": model.window,
        "resid_pdrop": model.hidden_dropout,
        "embd_pdrop": model.hidden_dropout,
        **(original if model.position_embedding_type == "longrope" else {}),
    }


PHI3 = Family(
    "phi3",
    "Phi3ForCausalLM",
    _read_phi3,
    _write_phi3,
    percent=1.0,
    original=4096,
    epsilon=1e-5,
    fused={"self_attention.linear_qkv": "qkv_proj", "mlp.linear_fc1": "gate_up_proj"},
)
