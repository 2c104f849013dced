"""Cohere's Command R, and its second generation: parallel layers behind one LayerNorm without a bias, and neighbouring
channels rotated as pairs. Cohere 2 rotates only in the layers with a sliding window."""

from __future__ import annotations

import math
from typing import Any

from megatron.config.interval import AT_LEAST_ONE, POSITIVE
from megatron.config.layer_forms import WEIGHT
from megatron.config.model import ModelConfig
from megatron.core.models.hf.config_json import JsonFields
from megatron.core.models.hf.family.family import Family
from megatron.core.models.hf.family.llama import read_attention_bias
from megatron.core.models.hf.family.olmoe import check_head_dim
from megatron.core.models.hf.family.windows import layer_types, read_sliding_layers, read_window_by_layer


def _read_common(fields: JsonFields) -> dict[str, Any]:
    """logit_scale is a factor, of which ours is the reciprocal."""
    return {
        **read_attention_bias(fields),
        "normalization": "LayerNorm",
        "norm_parameters": WEIGHT,
        "parallel_residual": True,
        "shared_norm": True,
        "rotary_interleaved": True,
        "logits_scaling": 1 / fields.number("logit_scale", POSITIVE, 0.0625),
    }


def _write_common(model: ModelConfig) -> dict[str, Any]:
    """The reciprocal of a reciprocal may differ in its last bit, so its neighbours are tried, too."""
    scale = 1 / model.logits_scaling
    scales = (scale, math.nextafter(scale, 0.0), math.nextafter(scale, math.inf))
    exact = next((number for number in scales if 1 / number == model.logits_scaling), scale)
    return {"attention_bias": model.attn_proj_bias, "logit_scale": exact}


def _read_cohere(fields: JsonFields, common: dict[str, Any]) -> dict[str, Any]:
    """The norm of queries and keys has a weight for each head, which ours has not."""
    fields.only("use_qk_norm", False)
    return _read_common(fields)


def _write_cohere(model: ModelConfig) -> dict[str, Any]:
    return {**_write_common(model), "use_qk_norm": False}


def _read_cohere2(fields: JsonFields, common: dict[str, Any]) -> dict[str, Any]:
    """Without a list every fourth layer, or every `sliding_window_pattern`-th, has full attention."""
    layers, pattern = common["num_layers"], fields.integer("sliding_window_pattern", AT_LEAST_ONE, 4)
    slides = read_sliding_layers(fields, [(layer + 1) % pattern > 0 for layer in range(layers)])
    check_head_dim(fields, common)
    positions = {} if all(slides) else {"no_rope_freq": str([1 - number for number in slides])}
    return {**_read_common(fields), **read_window_by_layer(fields, list(map(bool, slides))), **positions}


def _write_cohere2(model: ModelConfig) -> dict[str, Any]:
    return {**_write_common(model), "sliding_window": model.window, "layer_types": layer_types(model)}


_FIELDS = {"rms_norm_eps": "layer_norm_eps"}
COHERE = Family(
    "cohere",
    "CohereForCausalLM",
    _read_cohere,
    _write_cohere,
    theta=500000.0,
    epsilon=1e-5,
    tied=True,
    context=8192,
    width=22528,
    fields=_FIELDS,
)
COHERE2 = Family(
    "cohere2",
    "Cohere2ForCausalLM",
    _read_cohere2,
    _write_cohere2,
    theta=500000.0,
    epsilon=1e-5,
    tied=True,
    context=8192,
    width=22528,
    fields=_FIELDS,
)
