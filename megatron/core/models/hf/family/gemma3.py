"""Gemma 3, the language model: Gemma 2 with normalised queries and keys, and a rotary embedding of their own in layers
with a sliding window."""

from __future__ import annotations

import math
from typing import Any

from megatron.config.interval import AT_LEAST_ONE, POSITIVE
from megatron.config.model import ModelConfig
from megatron.core.models.hf.config_json import JsonFields
from megatron.core.models.hf.family.family import GELU_TANH, Family
from megatron.core.models.hf.family.gemma2 import NORMS, write_gemma
from megatron.core.models.hf.family.llama import read_attention_bias
from megatron.core.models.hf.family.windows import read_sliding_layers, read_window, window_flags


def _read_gemma3(fields: JsonFields, common: dict[str, Any]) -> dict[str, Any]:
    """Without a list every sixth layer has no window, or every sliding_window_pattern-th one."""
    fields.only("hidden_activation", GELU_TANH)
    fields.only("use_bidirectional_attention", False)
    fields.take("cache_implementation", str, None)
    if fields.optional_number("attn_logit_softcapping", POSITIVE) is not None:
        raise fields.error("attn_logit_softcapping is not null, and transformers caps no scores of this family")
    window = read_window(fields)
    pattern = fields.integer("sliding_window_pattern", AT_LEAST_ONE, 6)
    pattern = fields.integer("_sliding_window_pattern", AT_LEAST_ONE, pattern)
    slides = read_sliding_layers(fields, [(layer + 1) % pattern > 0 for layer in range(common["num_layers"])])
    if any(slides) and window is None:
        raise fields.error("layer_types has sliding_attention, but sliding_window is null")
    return {
        **read_attention_bias(fields),
        "swiglu": False,
        "geglu": True,
        "openai_gelu": True,
        "apply_layernorm_1p": True,
        "post_norm": True,
        "qk_layernorm": True,
        "embedding_multiplier_scale": math.sqrt(common["hidden_size"]),
        "softmax_scale": 1.0 / math.sqrt(fields.integer("query_pre_attn_scalar", AT_LEAST_ONE, 256)),
        "final_logit_softcapping": fields.optional_number("final_logit_softcapping", POSITIVE),
        **window_flags(window, slides),
        **({} if any(slides) else {"rotary_base_local": None}),
    }


def _write_gemma3(model: ModelConfig) -> dict[str, Any]:
    """The names that every version of transformers reads."""
    return {**write_gemma(model), "rope_local_base_freq": model.rotary_base_local or 10000.0}


GEMMA3 = Family(
    "gemma3_text",
    "Gemma3ForCausalLM",
    _read_gemma3,
    _write_gemma3,
    groups=4,
    head_dim=256,
    theta=1e6,
    local_theta=10000.0,
    tied=True,
    activation=GELU_TANH,
    norms={
        **NORMS,
        "self_attention.q_layernorm": "self_attn.q_norm",
        "self_attention.k_layernorm": "self_attn.k_norm",
    },
)
