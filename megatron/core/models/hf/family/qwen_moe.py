"""Qwen1.5-MoE and Qwen2-MoE, with gated shared experts, and Qwen3-MoE, with norms of queries and keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron.config.interval import AT_LEAST_ONE, NOT_NEGATIVE, SIZE
from megatron.config.model import ModelConfig
from megatron.core.models.hf.config_json import JsonFields
from megatron.core.models.hf.family.experts import (
    EITHER,
    layer_freq,
    read_experts,
    read_normalization,
    write_normalization,
)
from megatron.core.models.hf.family.family import ExpertNames, Family
from megatron.core.models.hf.family.llama import read_attention_bias
from megatron.core.models.hf.family.windows import layer_types, read_sliding_layers, read_window, window_flags


def _read_qwen2_moe(fields: JsonFields, common: dict[str, Any]) -> dict[str, Any]:
    return {
        **read_some_experts(fields, common, number=60, topk=4, width=1408, names=("num_experts",)),
        "moe_shared_expert_intermediate_size": fields.integer("shared_expert_intermediate_size", SIZE, 5632),
        "moe_shared_expert_gate": True,
        "add_qkv_bias": fields.take("qkv_bias", bool, True),
        **_read_some_windows(fields, common["num_layers"]),
    }


def _read_qwen3_moe(fields: JsonFields, common: dict[str, Any]) -> dict[str, Any]:
    return {
        **read_attention_bias(fields),
        **read_some_experts(fields, common, number=128, topk=8, width=768),
        "qk_layernorm": True,
        **_read_one_window(fields, common["num_layers"]),
    }


def read_some_experts(
    fields: JsonFields,
    common: dict[str, Any],
    *,
    number: int,
    topk: int,
    width: int,
    names: Sequence[str] = EITHER,
    normalizes: bool = False,
) -> dict[str, Any]:
    """Returns the flags of experts in some layers; intermediate_size is the width of the others. normalizes:
    norm_topk_prob of a file without the field."""
    step = fields.integer("decoder_sparse_step", AT_LEAST_ONE, 1)
    dense: list[Any] = fields.take("mlp_only_layers", list, [])
    if not all(type(layer) is int for layer in dense):
        raise fields.error(f"mlp_only_layers is {dense}, not a list of layers")
    has_experts = [layer not in dense and (layer + 1) % step == 0 for layer in range(common["num_layers"])]
    return {
        **read_experts(fields, number=number, topk=topk, names=names),
        **read_normalization(fields, normalizes),
        "moe_ffn_hidden_size": fields.integer("moe_intermediate_size", SIZE, width),
        "moe_layer_freq": layer_freq(has_experts),
    }


def _read_some_windows(fields: JsonFields, layers: int) -> dict[str, Any]:
    """Only as layer_types says: versions of transformers differ in the meaning of max_window_layers here.

    Without a window the newer ones write one of 0.
    """
    fields.integer("max_window_layers", NOT_NEGATIVE, 28)
    used = fields.take("use_sliding_window", bool, False)
    if used and not fields.has("layer_types"):
        raise fields.error(
            "use_sliding_window is true, and versions of transformers differ in the layers that have the window then; "
            "list them in layer_types"
        )
    slides = read_sliding_layers(fields, [False] * layers)
    if any(slides) and not used:
        raise fields.error("layer_types has sliding_attention, but use_sliding_window is false")
    window = read_window(fields) if used else fields.take("sliding_window", int, None)
    if any(slides) and window is None:
        raise fields.error("layer_types has sliding_attention, but sliding_window is null")
    return window_flags(window, slides)


def _read_one_window(fields: JsonFields, layers: int) -> dict[str, Any]:
    """Reads one window for all layers. The first versions of transformers gave it to layers from max_window_layers
    on."""
    used = fields.take("use_sliding_window", bool, False)
    window = read_window(fields) if used else fields.take("sliding_window", int, None)
    first = fields.integer("max_window_layers", NOT_NEGATIVE, 0)
    has_window = used and window is not None
    if has_window and first > 0:
        raise fields.error(
            f"use_sliding_window is true and max_window_layers {first}, and versions of transformers differ in the "
            "layers that have the window then; only 0, a window in all layers, is supported"
        )
    slides = read_sliding_layers(fields, [has_window] * layers)
    if slides != [int(has_window)] * layers:
        raise fields.error(
            f"layer_types is {fields.take('layer_types', list)}; transformers has one kind of layers here"
        )
    return window_flags(window, slides)


def _write_qwen2_moe(model: ModelConfig) -> dict[str, Any]:
    slides = any(window is not None for window in model.windows)
    return {
        **write_some_experts(model),
        "shared_expert_intermediate_size": model.moe_shared_expert_intermediate_size,
        "qkv_bias": model.qkv_bias,
        "use_sliding_window": slides,
        "sliding_window": model.window,
        "max_window_layers": model.num_layers,
        "layer_types": layer_types(model),
    }


def _write_qwen3_moe(model: ModelConfig) -> dict[str, Any]:
    return {
        **write_some_experts(model),
        "attention_bias": model.attn_proj_bias,
        "use_sliding_window": model.window is not None,
        "sliding_window": model.window,
        "max_window_layers": 0,
    }


def write_some_experts(model: ModelConfig) -> dict[str, Any]:
    """The fields that `read_some_experts` reads."""
    return {
        "num_experts": model.num_experts,
        "num_experts_per_tok": model.moe_router_topk,
        "moe_intermediate_size": model.moe_ffn_dim,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [layer for layer, has_experts in enumerate(model.moe_layers) if not has_experts],
        **write_normalization(model),
    }


QWEN2_MOE = Family(
    "qwen2_moe", "Qwen2MoeForCausalLM", _read_qwen2_moe, _write_qwen2_moe, groups=16, experts=ExpertNames()
)
QWEN3_MOE = Family(
    "qwen3_moe", "Qwen3MoeForCausalLM", _read_qwen3_moe, _write_qwen3_moe, groups=4, experts=ExpertNames()
)
