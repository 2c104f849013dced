"""EXAONE 4.0: norms behind attention and MLP only, normalised queries and keys; where some layers have a window, the
others have no rotary embedding."""

from __future__ import annotations

from typing import Any

from megatron.config.interval import AT_LEAST_ONE
from megatron.config.model import ModelConfig
from megatron.core.models.hf.config_json import JsonFields
from megatron.core.models.hf.family.family import Family
from megatron.core.models.hf.family.olmo2 import POST_NORMS
from megatron.core.models.hf.family.windows import layer_types, read_sliding_layers, read_window, window_flags


def _read_exaone4(fields: JsonFields, common: dict[str, Any]) -> dict[str, Any]:
    """Without a list every fourth layer has no window, or every sliding_window_pattern-th one."""
    window = read_window(fields)
    pattern = 4
    if fields.has("layer_types"):  # then transformers does not look at the pattern, which may be a word
        fields.take("sliding_window_pattern", object, None)
    else:
        pattern = fields.integer("sliding_window_pattern", AT_LEAST_ONE, 4)
    slides = read_sliding_layers(fields, [(layer + 1) % pattern > 0 for layer in range(common["num_layers"])])
    if any(slides) and window is None:
        raise fields.error("sliding_window is null, and layer_types does not say full_attention for all layers")
    return {
        "pre_norm": False,
        "post_norm": True,
        "qk_layernorm": True,
        "no_rope_freq": None if window is None or all(slides) else str([1 - flag for flag in slides]),
        **window_flags(window, slides),
    }


def _write_exaone4(model: ModelConfig) -> dict[str, Any]:
    window = model.window or (None if all(model.layers_with_rotary) else 4096)
    return {"sliding_window": window, "sliding_window_pattern": None, "layer_types": layer_types(model)}


EXAONE4 = Family(
    "exaone4", "Exaone4ForCausalLM", _read_exaone4, _write_exaone4, groups=32, epsilon=1e-5, norms=POST_NORMS
)
