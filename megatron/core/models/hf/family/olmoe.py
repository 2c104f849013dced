"""OLMoE and FlexOlmo: experts in every layer, and norms over the queries and keys of all heads."""

from __future__ import annotations

from typing import Any

from megatron.config.interval import POSITIVE
from megatron.config.model import ModelConfig
from megatron.core.models.hf.config_json import JsonFields
from megatron.core.models.hf.family.experts import read_experts, read_normalization, write_normalization
from megatron.core.models.hf.family.family import ExpertNames, Family
from megatron.core.models.hf.family.llama import read_attention_bias
from megatron.core.models.hf.family.olmo2 import POST_NORMS


def _read_olmoe(fields: JsonFields, common: dict[str, Any]) -> dict[str, Any]:
    """intermediate_size is the width of an expert."""
    check_head_dim(fields, common)
    clip = fields.optional_number("clip_qkv", POSITIVE)
    return {**_read_experts_and_norms(fields, number=64, topk=8), "clip_qkv": clip}


def _read_flex_olmo(fields: JsonFields, common: dict[str, Any]) -> dict[str, Any]:
    """Its norms are those of OLMo 2."""
    return {**_read_experts_and_norms(fields, number=7, topk=5), "pre_norm": False, "post_norm": True}


def check_head_dim(fields: JsonFields, common: dict[str, Any]) -> None:
    """Raises CheckpointError for heads of another size than the hidden size allows."""
    if common["kv_channels"] not in (None, common["hidden_size"] // common["num_attention_heads"]):
        raise fields.error(
            f"head_dim is {common['kv_channels']}; transformers needs hidden_size / num_attention_heads in this family"
        )


def _read_experts_and_norms(fields: JsonFields, *, number: int, topk: int) -> dict[str, Any]:
    return {
        **read_attention_bias(fields),
        **read_experts(fields, number=number, topk=topk),
        **read_normalization(fields),
        "qk_layernorm": True,
        "qk_layernorm_across_heads": True,
    }


def _write_olmoe(model: ModelConfig) -> dict[str, Any]:
    return {**_write_flex_olmo(model), "clip_qkv": model.clip_qkv}


def _write_flex_olmo(model: ModelConfig) -> dict[str, Any]:
    return {
        "intermediate_size": model.moe_ffn_dim,
        "num_experts": model.num_experts,
        "num_experts_per_tok": model.moe_router_topk,
        "attention_bias": model.attn_proj_bias,
        **write_normalization(model),
    }


OLMOE = Family("olmoe", "OlmoeForCausalLM", _read_olmoe, _write_olmoe, epsilon=1e-5, experts=ExpertNames())
FLEX_OLMO = Family(
    "flex_olmo",
    "FlexOlmoForCausalLM",
    _read_flex_olmo,
    _write_flex_olmo,
    theta=500000.0,
    norms=POST_NORMS,
    experts=ExpertNames(),
)
