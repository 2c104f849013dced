"""OLMo 2: norms behind attention and MLP only, and over the queries and keys of all heads."""

from __future__ import annotations

from typing import Any

from megatron.config.model import ModelConfig
from megatron.core.models.hf.config_json import JsonFields
from megatron.core.models.hf.family.family import Family
from megatron.core.models.hf.family.llama import read_attention_bias

POST_NORMS = {
    "post_self_attn_layernorm": "post_attention_layernorm",
    "post_mlp_layernorm": "post_feedforward_layernorm",
    "self_attention.q_layernorm": "self_attn.q_norm",
    "self_attention.k_layernorm": "self_attn.k_norm",
}


def _read_olmo2(fields: JsonFields, common: dict[str, Any]) -> dict[str, Any]:
    norms = {"pre_norm": False, "post_norm": True, "qk_layernorm": True, "qk_layernorm_across_heads": True}
    return {**norms, **read_attention_bias(fields)}


def _write_olmo2(model: ModelConfig) -> dict[str, Any]:
    return {"attention_bias": model.attn_proj_bias}


OLMO2 = Family("olmo2", "Olmo2ForCausalLM", _read_olmo2, _write_olmo2, epsilon=1e-5, norms=POST_NORMS)
