"""Gemma 2: norms on both sides of attention and MLP, capped scores and logits, a gated GELU."""

from __future__ import annotations

import math
from typing import Any

from megatron.config.interval import AT_LEAST_ONE, POSITIVE
from megatron.config.model import ModelConfig
from megatron.core.models.hf.config_json import JsonFields
from megatron.core.models.hf.family.family import GELU_TANH, Family
from megatron.core.models.hf.family.llama import read_attention_bias
from megatron.core.models.hf.family.windows import layer_types, read_window_by_layer

NORMS = {
    "input_layernorm": "input_layernorm",
    "post_self_attn_layernorm": "post_attention_layernorm",
    "pre_mlp_layernorm": "pre_feedforward_layernorm",
    "post_mlp_layernorm": "post_feedforward_layernorm",
}


def _read_gemma2(fields: JsonFields, common: dict[str, Any]) -> dict[str, Any]:
    """Without a list every other layer has a window, beginning with the first one."""
    fields.take("sliding_window_size", int, None)  # which transformers does not read
    return {
        **read_gemma(fields, common, [layer % 2 == 0 for layer in range(common["num_layers"])]),
        "attn_logit_softcapping": _cap(fields, "attn_logit_softcapping", 50.0),
        "final_logit_softcapping": _cap(fields, "final_logit_softcapping", 30.0),
    }


def read_gemma(fields: JsonFields, common: dict[str, Any], slides: list[bool]) -> dict[str, Any]:
    """Returns the flags that Gemma 2 and 3 have in common. slides: the layers with a window where the file lists
    none."""
    fields.only("hidden_activation", GELU_TANH)
    fields.only("use_bidirectional_attention", False)
    fields.take("cache_implementation", str, None)
    return {
        **read_attention_bias(fields),
        **scaled_embeddings(common),
        "post_norm": True,
        "softmax_scale": 1.0 / math.sqrt(fields.integer("query_pre_attn_scalar", AT_LEAST_ONE, 256)),
        **read_window_by_layer(fields, slides),
    }


def scaled_embeddings(common: dict[str, Any]) -> dict[str, Any]:
    """Returns the flags that all of Gemma have: weights of norms are stored minus one, embeddings are multiplied."""
    return {"apply_layernorm_1p": True, "embedding_multiplier_scale": math.sqrt(common["hidden_size"])}


def _cap(fields: JsonFields, name: str, default: float) -> float | None:
    """Returns a cap; only null means none."""
    cap = fields.optional_number(name, POSITIVE)
    return cap if cap is not None or fields.has(name) else default


def write_gemma(model: ModelConfig) -> dict[str, Any]:
    """Returns the fields that the config.json of Gemma 2 and 3 have, and those of most families do not."""
    return {
        "hidden_activation": GELU_TANH,
        "attention_bias": model.attn_proj_bias,
        "query_pre_attn_scalar": round(model.attention_scale**-2),
        "attn_logit_softcapping": model.attn_logit_softcapping,
        "final_logit_softcapping": model.final_logit_softcapping,
        "sliding_window": model.window or 4096,  # transformers needs one even if no layer has it
        "layer_types": layer_types(model),
    }


def _read_vaultgemma(fields: JsonFields, common: dict[str, Any]) -> dict[str, Any]:
    return {**_read_gemma2(fields, common), "post_norm": False}


GEMMA2 = Family(
    "gemma2",
    "Gemma2ForCausalLM",
    _read_gemma2,
    write_gemma,
    groups=4,
    head_dim=256,
    tied=True,
    activation=GELU_TANH,
    norms=NORMS,
)
# Gemma 2 without norms behind attention and MLP.
VAULTGEMMA = Family(
    "vaultgemma",
    "VaultGemmaForCausalLM",
    _read_vaultgemma,
    write_gemma,
    groups=4,
    head_dim=256,
    tied=True,
    activation=GELU_TANH,
    norms={name: NORMS[name] for name in ("input_layernorm", "pre_mlp_layernorm")},
)
