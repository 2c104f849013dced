"""Hunyuan 3: a Qwen3 whose experts are chosen as DeepSeek-V3's, with names of its own."""

from __future__ import annotations

from typing import Any

from megatron.config.model import ModelConfig
from megatron.core.models.hf.config_json import JsonFields
from megatron.core.models.hf.family.experts import mlp_layer_types
from megatron.core.models.hf.family.family import IN_MEMORY, NO_FIELD, ExpertNames, Family
from megatron.core.models.hf.family.llama import read_attention_bias
from megatron.core.models.hf.family.shared_experts import (
    ExpertDefaults,
    read_shared_and_routed,
    read_sigmoid_choice,
    write_shared_and_routed,
)

_EXPERTS = ExpertDefaults(experts=192, topk=8, width=1536, dense=1, scale=2.826)
_NAMES = {
    "n_routed_experts": "num_experts",
    "n_shared_experts": "num_shared_experts",
    "routed_scaling_factor": "router_scaling_factor",
    **dict.fromkeys(("n_group", "topk_group", "norm_topk_prob"), NO_FIELD),
}


def _read_hy_v3(fields: JsonFields, common: dict[str, Any]) -> dict[str, Any]:
    """transformers does not read first_k_dense_replace: without a list the first layer is dense."""
    fields.only("first_k_dense_replace", 1)
    fields.only("mlp_bias", False)
    fields.take("enable_moe_fp32_combine", bool, True)  # rounding of halves
    return {
        **read_attention_bias(fields),
        **read_shared_and_routed(fields, common["num_layers"], _EXPERTS, lists_layers=True),
        **read_sigmoid_choice(fields, _EXPERTS),
        "qk_layernorm": True,
    }


def _write_hy_v3(model: ModelConfig) -> dict[str, Any]:
    return write_shared_and_routed(model) | {
        "first_k_dense_replace": 1,
        "mlp_layer_types": mlp_layer_types(model),
        "attention_bias": model.attn_proj_bias,
    }


HY_V3 = Family(
    "hy_v3",
    "HYV3ForCausalLM",
    _read_hy_v3,
    _write_hy_v3,
    groups=8,
    head_dim=128,
    theta=11158840.0,
    epsilon=1e-5,
    std=0.006,
    width=13312,
    context=131072,
    fields=_NAMES,
    experts=ExpertNames(
        router="router.gate",
        choice_bias="expert_bias",
        shared="mlp.shared_mlp",
        in_memory=IN_MEMORY | {"choice_bias": "e_score_correction_bias", "shared": "mlp.shared_experts"},
    ),
)
