"""OLMoE: experts in every layer, and norms over the queries and keys of all heads."""

from __future__ import annotations

from typing import Any

from megatron.config.model import ModelConfig
from megatron.core.models.hf.config_json import JsonFields
from megatron.core.models.hf.family.experts import read_experts, read_normalization, write_normalization
from megatron.core.models.hf.family.family import ExpertNames, Family
from megatron.core.models.hf.family.llama import read_attention_bias


def _read_olmoe(fields: JsonFields, common: dict[str, Any]) -> dict[str, Any]:
    """intermediate_size is the width of an expert."""
    fields.only("clip_qkv", None)
    if common["kv_channels"] not in (None, common["hidden_size"] // common["num_attention_heads"]):
        raise fields.error(
            f"head_dim is {common['kv_channels']}; transformers needs hidden_size / num_attention_heads in this family"
        )
    return {
        **read_attention_bias(fields),
        **read_experts(fields, number=64, topk=8),
        **read_normalization(fields),
        "qk_layernorm": True,
        "qk_layernorm_across_heads": True,
    }


def _write_olmoe(model: ModelConfig) -> dict[str, Any]:
    return {
        "intermediate_size": model.moe_ffn_dim,
        "num_experts": model.num_experts,
        "num_experts_per_tok": model.moe_router_topk,
        "attention_bias": model.attn_proj_bias,
        "clip_qkv": None,
        **write_normalization(model),
    }


OLMOE = Family("olmoe", "OlmoeForCausalLM", _read_olmoe, _write_olmoe, epsilon=1e-5, experts=ExpertNames())
