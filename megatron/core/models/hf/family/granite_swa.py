"""Granite with sliding windows, dense and with experts: sinks in all layers, and a base of the rotary embedding for
each layer, or none."""

from __future__ import annotations

import dataclasses
from typing import Any

from megatron.config.layer_forms import LEARNABLE
from megatron.config.model import ModelConfig
from megatron.core.models.hf.config_json import JsonFields
from megatron.core.models.hf.family.family import Family
from megatron.core.models.hf.family.granite import GRANITEMOESHARED, read_granite, write_granite
from megatron.core.models.hf.family.windows import layer_types, read_sliding_layers, read_window_by_layer

_WINDOW = 128


def _read_layers(fields: JsonFields, common: dict[str, Any]) -> dict[str, Any]:
    default = [layer % 4 != 0 for layer in range(common["num_layers"])]
    slides = read_sliding_layers(fields, default)
    return {
        **read_window_by_layer(fields, default, _WINDOW),
        **_bases(fields, common, slides),
        "softmax_type": LEARNABLE,
    }


def _read_granite_swa(fields: JsonFields, common: dict[str, Any]) -> dict[str, Any]:
    return {**read_granite(fields, common), **_read_layers(fields, common)}


def _read_granitemoe_swa(fields: JsonFields, common: dict[str, Any]) -> dict[str, Any]:
    return {**GRANITEMOESHARED.read(fields, common), **_read_layers(fields, common)}


def _bases(fields: JsonFields, common: dict[str, Any], slides: list[int]) -> dict[str, Any]:
    """The flags for layer_rope_theta, in which 0 means no rotary embedding."""
    bases: list[Any] | None = fields.take("layer_rope_theta", list, None)
    if bases is None:
        return {}
    numbers = all(isinstance(base, (int, float)) and not isinstance(base, bool) for base in bases)
    if not numbers or len(bases) != len(slides) or not all(base == 0 or 1 < base < float("inf") for base in bases):
        raise fields.error(f"layer_rope_theta {bases} is not 0 or a number above 1 for each of {len(slides)} layers")
    of_kinds = [sorted({float(base) for base, slid in zip(bases, slides) if base and slid == kind}) for kind in (0, 1)]
    whole, local = of_kinds
    if len(whole) > 1 or len(local) > 1:
        raise fields.error(f"layer_rope_theta {bases} has several bases for layers of a kind, which is not supported")
    differs = bool(whole and local and whole != local)
    factors = (common.get(name) for name in ("rotary_seq_len_interpolation_factor", "dynamic_ntk_factor"))
    scaled = common["position_embedding_type"] != "rope" or common.get("use_rope_scaling")
    if differs and (scaled or any(factor is not None for factor in factors)):
        raise fields.error(f"layer_rope_theta {bases} has two bases with a scaling, which is not supported")
    without = [int(base == 0) for base in bases]
    return {
        "rotary_base": [*whole, *local, common["rotary_base"]][0],
        "rotary_base_local": local[0] if differs else None,
        "no_rope_freq": str(without) if any(without) else None,
    }


def _write_layers(model: ModelConfig) -> dict[str, Any]:
    local = model.rotary_base if model.rotary_base_local is None else model.rotary_base_local
    layers = zip(model.windows, model.layers_with_rotary, strict=True)
    return {
        "sliding_window": model.window or _WINDOW,
        "layer_types": layer_types(model),
        "layer_rope_theta": [
            (model.rotary_base if window is None else local) if rotates else 0 for window, rotates in layers
        ],
    }


def _write_granite_swa(model: ModelConfig) -> dict[str, Any]:
    return {**write_granite(model), **_write_layers(model)}


def _write_granitemoe_swa(model: ModelConfig) -> dict[str, Any]:
    assert GRANITEMOESHARED.write is not None
    return {**GRANITEMOESHARED.write(model), **_write_layers(model)}


GRANITE_SWA = Family(
    "granite_swa",
    "GraniteSWAForCausalLM",
    _read_granite_swa,
    _write_granite_swa,
    groups=4,
    epsilon=1e-5,
    tied=True,
)
# The folder has the tensors of transformers' modules.
GRANITEMOE_SWA = dataclasses.replace(
    GRANITEMOESHARED,
    model_type="granitemoe_swa",
    architecture="GraniteMoeSWAForCausalLM",
    read=_read_granitemoe_swa,
    write=_write_granitemoe_swa,
    experts=None if GRANITEMOESHARED.experts is None else GRANITEMOESHARED.experts.of_modules,
)
