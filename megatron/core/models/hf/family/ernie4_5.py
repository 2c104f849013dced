"""ERNIE 4.5, dense, and Helium: Llamas that rotate neighbouring channels as pairs."""

from __future__ import annotations

from typing import Any

from megatron.config.model import ModelConfig
from megatron.core.models.hf.config_json import JsonFields
from megatron.core.models.hf.family.family import Family


def _read_ernie(fields: JsonFields, common: dict[str, Any]) -> dict[str, Any]:
    """Biases are in all linear layers or in none."""
    return {"rotary_interleaved": True, "add_bias_linear": fields.take("use_bias", bool, False)}


def _write_ernie(model: ModelConfig) -> dict[str, Any]:
    return {"use_bias": model.mlp_bias}


def _read_helium(fields: JsonFields, common: dict[str, Any]) -> dict[str, Any]:
    """The output projection of attention is square, and has no bias."""
    head_dim, hidden = common["kv_channels"], common["hidden_size"]
    if head_dim * common["num_attention_heads"] != hidden:
        raise fields.error(
            f"head_dim {head_dim} times num_attention_heads {common['num_attention_heads']} is not hidden_size {hidden}"
        )
    return {
        "rotary_interleaved": True,
        "add_qkv_bias": fields.take("attention_bias", bool, False),
        "add_mlp_bias": fields.take("mlp_bias", bool, False),
    }


def _write_helium(model: ModelConfig) -> dict[str, Any]:
    return {"attention_bias": model.qkv_bias, "mlp_bias": model.mlp_bias}


ERNIE4_5 = Family(
    "ernie4_5",
    "Ernie4_5ForCausalLM",
    _read_ernie,
    _write_ernie,
    groups=2,
    head_dim=128,
    theta=500000.0,
    epsilon=1e-5,
    tied=True,
)
HELIUM = Family(
    "helium",
    "HeliumForCausalLM",
    _read_helium,
    _write_helium,
    groups=20,
    head_dim=128,
    theta=100000.0,
    epsilon=1e-8,
)
