"""Mellum 2: Qwen3's experts, and layers with a window, whose rotary embedding has a base of its own."""

from __future__ import annotations

from typing import Any

from megatron.config.interval import SIZE
from megatron.config.model import ModelConfig
from megatron.core.models.hf.config_json import JsonFields
from megatron.core.models.hf.family.experts import (
    layer_freq,
    mlp_layer_types,
    read_experts,
    read_layers_with_experts,
    read_normalization,
    write_normalization,
)
from megatron.core.models.hf.family.family import NO_FIELD, ExpertNames, Family
from megatron.core.models.hf.family.llama import read_attention_bias
from megatron.core.models.hf.family.windows import layer_types, read_window_by_layer
from megatron.core.models.hf.rotary import write_rotary_by_kind

_WINDOW = 1024


def _read_mellum(fields: JsonFields, common: dict[str, Any]) -> dict[str, Any]:
    """Windows as layer_types says, by default in no layer, and experts as mlp_layer_types says, by default in all."""
    layers = common["num_layers"]
    for name in ("num_nextn_predict_layers", "mtp_layer_types", "mtp_mlp_layer_types"):
        fields.only(name, None, 0)
    windows = read_window_by_layer(fields, [False] * layers, _WINDOW)
    return {
        **read_attention_bias(fields),
        **read_experts(fields, number=64, topk=8),
        **read_normalization(fields, default=True),
        **windows,
        **({} if windows else {"rotary_base_local": None}),
        "moe_ffn_hidden_size": fields.integer("moe_intermediate_size", SIZE, 896),
        "moe_layer_freq": layer_freq(read_layers_with_experts(fields, [True] * layers)),
        "qk_layernorm": True,
    }


def _write_mellum(model: ModelConfig) -> dict[str, Any]:
    """transformers reads rotary embeddings by the kind of layer alone."""
    return {
        **write_normalization(model),
        "attention_bias": model.attn_proj_bias,
        "num_experts": model.num_experts,
        "num_experts_per_tok": model.moe_router_topk,
        "moe_intermediate_size": model.moe_ffn_dim,
        "mlp_layer_types": mlp_layer_types(model),
        "sliding_window": model.window or _WINDOW,
        "layer_types": layer_types(model),
        **write_rotary_by_kind(model),
    }


MELLUM = Family(
    "mellum",
    "MellumForCausalLM",
    _read_mellum,
    _write_mellum,
    groups=4,
    head_dim=128,
    theta=500000.0,
    local_theta=10000.0,
    width=7168,
    context=131072,
    fields=dict.fromkeys(("rope_theta", "rope_scaling"), NO_FIELD),
    experts=ExpertNames(),
)
