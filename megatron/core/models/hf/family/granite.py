"""Granite 3: a Llama with factors on embeddings, scores, residual branches and logits. HyperCLOVA X SEED Think adds norms
behind attention and MLP, Granite's mixtures have experts in all layers, and MiniCPM derives its factors from sizes."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from megatron.config.interval import AT_LEAST_ONE, COUNT_OR_NONE, POSITIVE
from megatron.config.model import ModelConfig
from megatron.core.models.hf.config_json import JsonFields
from megatron.core.models.hf.family.experts import read_experts
from megatron.core.models.hf.family.family import IN_MEMORY, PRE_NORMS, ExpertNames, Family
from megatron.core.models.hf.family.llama import read_attention_bias, read_llama, write_llama


def read_granite(fields: JsonFields, common: dict[str, Any]) -> dict[str, Any]:
    """Returns the flags of a Llama with Granite's factors."""
    return {
        **read_llama(fields, common),
        "embedding_multiplier_scale": fields.number("embedding_multiplier", POSITIVE, 1.0),
        "softmax_scale": fields.number("attention_multiplier", POSITIVE, 1.0),
        "residual_multiplier": fields.number("residual_multiplier", POSITIVE, 1.0),
        "logits_scaling": fields.number("logits_scaling", POSITIVE, 1.0),
    }


def write_granite(model: ModelConfig) -> dict[str, Any]:
    """The fields of a Llama with Granite's factors."""
    return {
        **write_llama(model),
        "embedding_multiplier": model.embedding_multiplier_scale,
        "attention_multiplier": model.attention_scale,
        "residual_multiplier": model.residual_multiplier,
        "logits_scaling": model.logits_scaling,
    }


def _read_granitemoe(fields: JsonFields, common: dict[str, Any]) -> dict[str, Any]:
    """intermediate_size is the width of an expert."""
    return {
        **read_granite(fields, common),
        **read_experts(fields, number=8, topk=2, names=("num_local_experts",)),
    }


def _write_granitemoe(model: ModelConfig) -> dict[str, Any]:
    return {
        **write_granite(model),
        "intermediate_size": model.moe_ffn_dim,
        "num_local_experts": model.num_experts,
        "num_experts_per_tok": model.moe_router_topk,
    }


def _read_granitemoeshared(fields: JsonFields, common: dict[str, Any]) -> dict[str, Any]:
    width = fields.integer("shared_intermediate_size", COUNT_OR_NONE, 0)
    return {**_read_granitemoe(fields, common), "moe_shared_expert_intermediate_size": width or None}


def _write_granitemoeshared(model: ModelConfig) -> dict[str, Any]:
    return {**_write_granitemoe(model), "shared_intermediate_size": model.moe_shared_expert_intermediate_size or 0}


def _read_minicpm(fields: JsonFields, common: dict[str, Any]) -> dict[str, Any]:
    return {
        **read_attention_bias(fields),
        "embedding_multiplier_scale": fields.number("scale_emb", POSITIVE, 1.0),
        "residual_multiplier": fields.number("scale_depth", POSITIVE, 1.0) / math.sqrt(common["num_layers"]),
        "logits_scaling": common["hidden_size"] / fields.integer("dim_model_base", AT_LEAST_ONE, 1),
    }


def _read_hyperclovax(fields: JsonFields, common: dict[str, Any]) -> dict[str, Any]:
    """logits_scaling multiplies, and is a divisor here."""
    return {
        **read_granite(fields, common),
        "softmax_scale": fields.optional_number("attention_multiplier", POSITIVE),
        "logits_scaling": 1.0 / fields.number("logits_scaling", POSITIVE, 1.0),
        "post_norm": fields.take("use_post_norm", bool, True),
    }


def _write_hyperclovax(model: ModelConfig) -> dict[str, Any]:
    near = 1.0 / model.logits_scaling
    factors = (near, math.nextafter(near, 0.0), math.nextafter(near, math.inf))
    exact = next((factor for factor in factors if 1.0 / factor == model.logits_scaling), near)
    return {**write_granite(model), "logits_scaling": exact, "use_post_norm": model.post_norm}


_EXPERTS = ExpertNames(
    "block_sparse_moe",
    router="router.layer",
    stacked=("input_linear.weight", "output_linear.weight"),
    in_memory=IN_MEMORY | {"block": "block_sparse_moe", "router": "router"},
)
GRANITE = Family("granite", "GraniteForCausalLM", read_granite, write_granite)
GRANITEMOE = Family(
    "granitemoe",
    "GraniteMoeForCausalLM",
    _read_granitemoe,
    _write_granitemoe,
    experts=_EXPERTS,
)
GRANITEMOESHARED = dataclasses.replace(
    GRANITEMOE,
    model_type="granitemoeshared",
    architecture="GraniteMoeSharedForCausalLM",
    read=_read_granitemoeshared,
    write=_write_granitemoeshared,
    fused={"mlp.shared_experts.linear_fc1": "input_linear", "mlp.shared_experts.linear_fc2": "output_linear"},
    experts=dataclasses.replace(_EXPERTS, shared="shared_mlp"),
)
# Written as the Granite that it is.
MINICPM = Family("minicpm", "MiniCPMForCausalLM", _read_minicpm, None, tied=True)
HYPERCLOVAX = Family(
    "hyperclovax",
    "HyperCLOVAXForCausalLM",
    _read_hyperclovax,
    _write_hyperclovax,
    norms=PRE_NORMS | {"post_self_attn_layernorm": "post_norm1", "post_mlp_layernorm": "post_norm2"},
)
