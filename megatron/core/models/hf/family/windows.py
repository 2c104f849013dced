"""Sliding windows in config.json."""

from __future__ import annotations

from typing import Any

from megatron.config.interval import AT_LEAST_ONE
from megatron.config.model import ModelConfig
from megatron.core.models.hf.config_json import JsonFields


def read_window(fields: JsonFields, default: int | None = 4096) -> int | None:
    """Returns the window; only null means none, because a missing field means `default`: by default the window of the
    first Mistral or Qwen."""
    window = fields.optional_integer("sliding_window", AT_LEAST_ONE)
    return window if window is not None or fields.has("sliding_window") else default


def read_sliding_layers(fields: JsonFields, default: list[bool]) -> list[int]:
    """Returns 1 for each layer with a sliding window and 0 for the others; without layer_types as `default` says."""
    names = ["sliding_attention" if slides else "full_attention" for slides in default]
    kinds: list[Any] = fields.take("layer_types", list, names)
    if len(kinds) != len(default) or not all(kind in ("sliding_attention", "full_attention") for kind in kinds):
        raise fields.error(
            f"layer_types {kinds} is not one of sliding_attention, full_attention for {len(default)} layers"
        )
    return [int(kind == "sliding_attention") for kind in kinds]


def read_window_by_layer(fields: JsonFields, slides: list[bool], default: int | None = 4096) -> dict[str, Any]:
    """Returns the flags of a window whose layers are in layer_types; without that list they are those in `slides`.
    default: see read_window."""
    window = read_window(fields, default)
    sliding_layers = read_sliding_layers(fields, slides)
    if any(sliding_layers) and window is None:
        raise fields.error("layer_types has sliding_attention, but sliding_window is null")
    return window_flags(window, sliding_layers)


def window_flags(window: int | None, slides: list[int]) -> dict[str, Any]:
    """Returns the flags of a model whose layers slide where `slides` has a 1."""
    if window is None or not any(slides):
        return {}
    return {"window_size": f"{window - 1},0", "window_attn_skip_freq": None if all(slides) else str(slides)}


def layer_types(model: ModelConfig) -> list[str]:
    """Returns the value of layer_types."""
    return ["full_attention" if window is None else "sliding_attention" for window in model.windows]
