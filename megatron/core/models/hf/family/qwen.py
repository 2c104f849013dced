"""Qwen1.5 and Qwen2, with biases of queries, keys and values, and Qwen3, with norms of queries and keys."""

from __future__ import annotations

from typing import Any

from megatron.config.interval import NOT_NEGATIVE
from megatron.config.model import ModelConfig
from megatron.core.models.hf.config_json import JsonFields
from megatron.core.models.hf.family.family import Family
from megatron.core.models.hf.family.llama import read_attention_bias
from megatron.core.models.hf.family.windows import layer_types, read_sliding_layers, read_window, window_flags


def _read_qwen2(fields: JsonFields, common: dict[str, Any]) -> dict[str, Any]:
    fields.only("use_mrope", False)
    return {"add_qkv_bias": True, **_read_layer_windows(fields, common["num_layers"])}


def _read_qwen3(fields: JsonFields, common: dict[str, Any]) -> dict[str, Any]:
    return {"qk_layernorm": True, **read_attention_bias(fields), **_read_layer_windows(fields, common["num_layers"])}


def _write_qwen3(model: ModelConfig) -> dict[str, Any]:
    return {"attention_bias": model.attn_proj_bias, **_write_layer_windows(model)}


def _read_layer_windows(fields: JsonFields, layers: int) -> dict[str, Any]:
    """Reads Qwen's fields for layers with and without a sliding window."""
    used = fields.take("use_sliding_window", bool, False)
    window, first = read_window(fields), fields.integer("max_window_layers", NOT_NEGATIVE, 28)
    slide = used and window is not None
    slides = read_sliding_layers(fields, [slide and layer >= first for layer in range(layers)])
    if any(slides) and not slide:
        raise fields.error(
            f"layer_types has sliding_attention, but use_sliding_window is {used} and sliding_window {window}"
        )
    return window_flags(window, slides)


def _write_layer_windows(model: ModelConfig) -> dict[str, Any]:
    windows = model.windows
    if not any(windows):
        return {"use_sliding_window": False, "sliding_window": None}
    return {
        "use_sliding_window": True,
        "sliding_window": model.window,
        "max_window_layers": 0,
        "layer_types": layer_types(model),
    }


QWEN2 = Family("qwen2", "Qwen2ForCausalLM", _read_qwen2, _write_layer_windows, groups=32)
QWEN3 = Family("qwen3", "Qwen3ForCausalLM", _read_qwen3, _write_qwen3, groups=32, head_dim=128)
