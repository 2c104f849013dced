"""Gemma 3, its language model: Gemma 2 with normalised queries and keys, and a rotary embedding of their own in layers
with a sliding window."""

from __future__ import annotations

from typing import Any

from megatron.config.interval import AT_LEAST_ONE, POSITIVE
from megatron.config.model import ModelConfig
from megatron.core.models.hf.config_json import JsonFields
from megatron.core.models.hf.family.family import GELU_TANH, Family
from megatron.core.models.hf.family.gemma2 import NORMS, read_gemma, write_gemma


def _read_gemma3(fields: JsonFields, common: dict[str, Any]) -> dict[str, Any]:
    """Without a list every sixth layer has no window, or every sliding_window_pattern-th one."""
    if fields.optional_number("attn_logit_softcapping", POSITIVE) is not None:
        raise fields.error("attn_logit_softcapping is not null, and transformers caps no scores of this family")
    pattern = fields.integer("sliding_window_pattern", AT_LEAST_ONE, 6)
    pattern = fields.integer("_sliding_window_pattern", AT_LEAST_ONE, pattern)
    flags = read_gemma(fields, common, [(layer + 1) % pattern > 0 for layer in range(common["num_layers"])])
    return {
        **flags,
        "qk_layernorm": True,
        "final_logit_softcapping": fields.optional_number("final_logit_softcapping", POSITIVE),
        **({} if "window_size" in flags else {"rotary_base_local": None}),
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
    sizes={
        "num_hidden_layers": 26,
        "hidden_size": 2304,
        "num_attention_heads": 8,
        "intermediate_size": 9216,
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
    },
)
