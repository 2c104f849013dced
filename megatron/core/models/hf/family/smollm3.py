"""SmolLM3: a Llama some of whose layers have no rotary embedding."""

from __future__ import annotations

from typing import Any

from megatron.config.interval import AT_LEAST_ONE
from megatron.config.model import ModelConfig
from megatron.core.models.hf.config_json import JsonFields
from megatron.core.models.hf.family.family import Family
from megatron.core.models.hf.family.llama import read_llama, write_llama


def _read_smollm3(fields: JsonFields, common: dict[str, Any]) -> dict[str, Any]:
    """Without a list every fourth layer, or every `no_rope_layer_interval`-th, has no rotary embedding."""
    layers, interval = common["num_layers"], fields.integer("no_rope_layer_interval", AT_LEAST_ONE, 4)
    rotated: list[Any] = fields.take("no_rope_layers", list, [int((at + 1) % interval != 0) for at in range(layers)])
    if len(rotated) < layers or not all(flag in (0, 1) for flag in rotated):
        raise fields.error(f"no_rope_layers {rotated} is not one of 0, 1 for {layers} layers")
    without = [int(not flag) for flag in rotated[:layers]]
    if fields.has("use_sliding_window") and fields.take("use_sliding_window", bool, False):
        raise fields.error("use_sliding_window is true; only SmolLM3 without sliding windows is supported")
    fields.take("sliding_window", int, None)
    fields.take("layer_types", list, None)
    return {**read_llama(fields, common), "no_rope_freq": str(without) if any(without) else None}


def _write_smollm3(model: ModelConfig) -> dict[str, Any]:
    return {
        **write_llama(model),
        "no_rope_layers": [int(rotates) for rotates in model.layers_with_rotary],
        "use_sliding_window": False,
        "layer_types": ["full_attention"] * len(model.layers_with_rotary),
    }


SMOLLM3 = Family("smollm3", "SmolLM3ForCausalLM", _read_smollm3, _write_smollm3, groups=4, theta=2e6, tied=True)
