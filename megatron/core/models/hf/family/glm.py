"""GLM-4-9B: half of each head is rotated, neighbouring channels as pairs. GLM-4-0414 has norms behind attention and
MLP, too."""

from __future__ import annotations

from typing import Any

from megatron.config.model import ModelConfig
from megatron.core.models.hf.config_json import JsonFields
from megatron.core.models.hf.family.family import Family


def _read_glm(fields: JsonFields, common: dict[str, Any]) -> dict[str, Any]:
    return {"rotary_interleaved": True, "add_qkv_bias": fields.take("attention_bias", bool, True)}


def _read_glm4(fields: JsonFields, common: dict[str, Any]) -> dict[str, Any]:
    return {**_read_glm(fields, common), "post_norm": True}


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
GLM4 = Family(
    "glm4",
    "Glm4ForCausalLM",
    _read_glm4,
    _write_glm,
    groups=2,
    head_dim=128,
    percent=0.5,
    epsilon=1.5625e-7,
    norms={
        "input_layernorm": "input_layernorm",
        "post_self_attn_layernorm": "post_self_attn_layernorm",
        "pre_mlp_layernorm": "post_attention_layernorm",
        "post_mlp_layernorm": "post_mlp_layernorm",
    },
    fused={"mlp.linear_fc1": "gate_up_proj"},
)
