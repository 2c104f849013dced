"""EXAONE 4.0: norms behind attention and MLP only, normalised queries and keys; where some layers have a window, the
others have no rotary embedding. EXAONE's mixtures have norms before attention and experts instead."""

from __future__ import annotations

import re
from typing import Any

from megatron.config.interval import AT_LEAST_ONE
from megatron.config.model import ModelConfig
from megatron.core.models.hf.config_json import JsonFields
from megatron.core.models.hf.family.experts import mlp_layer_types
from megatron.core.models.hf.family.family import IN_MEMORY, ExpertNames, Family
from megatron.core.models.hf.family.olmo2 import POST_NORMS
from megatron.core.models.hf.family.shared_experts import (
    ExpertDefaults,
    read_shared_and_routed,
    read_sigmoid_choice,
    write_shared_and_routed,
    write_sigmoid_choice,
)
from megatron.core.models.hf.family.windows import layer_types, read_sliding_layers, read_window, window_flags


def _read_attention(fields: JsonFields, common: dict[str, Any]) -> dict[str, Any]:
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
        "qk_layernorm": True,
        "no_rope_freq": None if window is None or all(slides) else str([1 - flag for flag in slides]),
        **window_flags(window, slides),
    }


def _read_exaone4(fields: JsonFields, common: dict[str, Any]) -> dict[str, Any]:
    return {"pre_norm": False, "post_norm": True, **_read_attention(fields, common)}


def _write_exaone4(model: ModelConfig) -> dict[str, Any]:
    window = model.window or (None if all(model.layers_with_rotary) else 4096)
    return {"sliding_window": window, "sliding_window_pattern": None, "layer_types": layer_types(model)}


def _read_exaone_moe(fields: JsonFields, common: dict[str, Any]) -> dict[str, Any]:
    fields.only("scoring_func", "sigmoid")
    return {
        **_read_attention(fields, common),
        **read_shared_and_routed(fields, common["num_layers"], EXPERTS, lists_layers=True),
        **read_sigmoid_choice(fields, EXPERTS),
    }


def _write_exaone_moe(model: ModelConfig) -> dict[str, Any]:
    experts = {**write_shared_and_routed(model), **write_sigmoid_choice(model)}
    return {**_write_exaone4(model), **experts, "mlp_layer_types": mlp_layer_types(model)}


EXPERTS = ExpertDefaults(experts=64, topk=8, width=1024, dense=1, scale=2.5)
NAMES = {"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts"}
EXAONE_MOE = Family(
    "exaone_moe",
    "ExaoneMoeForCausalLM",
    _read_exaone_moe,
    _write_exaone_moe,
    groups=32,
    epsilon=1e-5,
    fields=NAMES,
    experts=ExpertNames(
        shared="mlp.shared_experts",
        choice_bias="e_score_correction_bias",
        in_memory=IN_MEMORY | {"choice_bias": "gate.e_score_correction_bias"},
    ),
    carried=re.compile(r"mtp.+"),
)
EXAONE4 = Family(
    "exaone4", "Exaone4ForCausalLM", _read_exaone4, _write_exaone4, groups=32, epsilon=1e-5, norms=POST_NORMS
)
