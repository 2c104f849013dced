"""GLM-4-9B: half of each head is rotated, neighbouring channels as pairs."""

from __future__ import annotations

from typing import Any

from megatron.config.model import ModelConfig
from megatron.core.models.hf.config_json import JsonFields
from megatron.core.models.hf.family.family import Family


def _read_glm(fields: JsonFields, common: dict[str, Any]) -> dict[str, Any]:
    return {"rotary_interleaved": True, "add_qkv_bias": fields.take("attention_bias", bool, True)}


def _write_glm(model: ModelConfig) -> dict[str, Any]:
    return {"attention_bias": model.qkv_bias}


GLM = Family(
    "glm",
    "GlmForCausalLM",
    _read_glm,
    _write_glm,
    groups=2,
    head_dim=128,
    percent=0.5,
    epsilon=1.5625e-7,
    fused={"mlp.linear_fc1": "gate_up_proj"},
)
