"""dots.llm1 and Solar Open: layers of GLM-4.5's kind that are rotated whole."""

from __future__ import annotations

from typing import Any

from megatron.config.model import ModelConfig
from megatron.config.moe import SIGMOID
from megatron.core.models.hf.config_json import JsonFields
from megatron.core.models.hf.family.family import ExpertNames, Family
from megatron.core.models.hf.family.llama import read_attention_bias
from megatron.core.models.hf.family.shared_experts import (
    ExpertDefaults,
    read_shared_and_routed,
    read_sigmoid_choice,
    write_shared_and_routed,
    write_sigmoid_choice,
)
from megatron.core.models.hf.family.windows import layer_types, read_window_by_layer

DOTS = ExpertDefaults(experts=128, topk=6, width=1408, dense=0, normalizes=False)
SOLAR = ExpertDefaults(experts=128, topk=8, width=1280, dense=0)


def _read_dots1(fields: JsonFields, common: dict[str, Any]) -> dict[str, Any]:
    """Without a list the layers from max_window_layers on have a window. Some fields are in the publisher's files
    only."""
    layers = common["num_layers"]
    fields.only("scoring_func", SIGMOID, "noaux_tc")
    fields.only("topk_method", "noaux_tc")
    fields.only("moe_layer_freq", 1)
    fields.take("use_sliding_window", bool, False)
    first = fields.take("max_window_layers", int, 62)
    has_window = not fields.has("sliding_window") or fields.take("sliding_window", object, None) is not None
    return {
        **read_shared_and_routed(fields, layers, DOTS),
        **read_sigmoid_choice(fields, DOTS),
        **read_attention_bias(fields),
        **read_window_by_layer(fields, [has_window and layer >= first for layer in range(layers)]),
        "qk_layernorm": True,
    }


def _write_dots1(model: ModelConfig) -> dict[str, Any]:
    return {
        **write_shared_and_routed(model),
        **write_sigmoid_choice(model),
        "attention_bias": model.attn_proj_bias,
        "sliding_window": model.window,
        "layer_types": layer_types(model),
    }


def _read_solar_open(fields: JsonFields, common: dict[str, Any]) -> dict[str, Any]:
    """All layers have experts."""
    fields.only("first_k_dense_replace", 0)
    fields.only("use_qk_norm", False)
    return {
        **read_shared_and_routed(fields, common["num_layers"], SOLAR),
        **read_sigmoid_choice(fields, SOLAR),
        "add_qkv_bias": fields.take("attention_bias", bool, False),
    }


def _write_solar_open(model: ModelConfig) -> dict[str, Any]:
    return {**write_shared_and_routed(model), **write_sigmoid_choice(model), "attention_bias": model.qkv_bias}


DOTS1 = Family(
    "dots1",
    "Dots1ForCausalLM",
    _read_dots1,
    _write_dots1,
    groups=32,
    experts=ExpertNames(shared="mlp.shared_experts"),
)
SOLAR_OPEN = Family(
    "solar_open",
    "SolarOpenForCausalLM",
    _read_solar_open,
    _write_solar_open,
    groups=8,
    head_dim=128,
    theta=1e6,
    epsilon=1e-5,
    width=SOLAR.width,
    experts=ExpertNames(shared="mlp.shared_experts"),
)
