"""Seed-OSS: a Llama with wide heads and biases of queries, keys and values."""

from __future__ import annotations

from typing import Any

from megatron.config.interval import BELOW_ONE
from megatron.config.model import ModelConfig
from megatron.core.models.hf.config_json import JsonFields
from megatron.core.models.hf.family.family import Family


def _read_seed_oss(fields: JsonFields, common: dict[str, Any]) -> dict[str, Any]:
    """residual_dropout is not taken over, because --hidden-dropout would also drop embeddings."""
    fields.number("residual_dropout", BELOW_ONE, 0.1)
    return {
        "add_qkv_bias": fields.take("attention_bias", bool, True),
        "add_attn_proj_bias": fields.take("attention_out_bias", bool, False),
        "add_mlp_bias": fields.take("mlp_bias", bool, False),
    }


def _write_seed_oss(model: ModelConfig) -> dict[str, Any]:
    return {
        "attention_bias": model.qkv_bias,
        "attention_out_bias": model.attn_proj_bias,
        "mlp_bias": model.mlp_bias,
        "residual_dropout": model.hidden_dropout,
    }


SEED_OSS = Family("seed_oss", "SeedOssForCausalLM", _read_seed_oss, _write_seed_oss, groups=8, head_dim=128)
