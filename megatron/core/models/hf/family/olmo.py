"""OLMo 1: a Llama with LayerNorm without weight and bias, whose queries, keys and values may be clipped."""

from __future__ import annotations

from typing import Any

from megatron.config.interval import POSITIVE
from megatron.config.layer_forms import NONE
from megatron.config.model import ModelConfig
from megatron.core.models.hf.config_json import JsonFields
from megatron.core.models.hf.family.family import NO_FIELD, Family
from megatron.core.models.hf.family.llama import read_attention_bias

_EPSILON = 1e-5  # no field of config.json changes it


def _read_olmo(fields: JsonFields, common: dict[str, Any]) -> dict[str, Any]:
    return {
        **read_attention_bias(fields),
        "normalization": "LayerNorm",
        "norm_parameters": NONE,
        "norm_epsilon": _EPSILON,
        "clip_qkv": fields.optional_number("clip_qkv", POSITIVE),
    }


def _write_olmo(model: ModelConfig) -> dict[str, Any]:
    return {"attention_bias": model.attn_proj_bias, "clip_qkv": model.clip_qkv}


OLMO = Family(
    "olmo",
    "OlmoForCausalLM",
    _read_olmo,
    _write_olmo,
    epsilon=_EPSILON,
    context=2048,
    width=11008,
    fields={"rms_norm_eps": NO_FIELD},
)
