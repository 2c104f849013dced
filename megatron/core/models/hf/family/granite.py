"""Granite 3: a Llama with factors on embeddings, scores, residual branches and logits."""

from __future__ import annotations

from typing import Any

from megatron.config.interval import POSITIVE
from megatron.config.model import ModelConfig
from megatron.core.models.hf.config_json import JsonFields
from megatron.core.models.hf.family.family import Family
from megatron.core.models.hf.family.llama import read_llama, write_llama


def _read_granite(fields: JsonFields, common: dict[str, Any]) -> dict[str, Any]:
    return {
        **read_llama(fields, common),
        "embedding_multiplier_scale": fields.number("embedding_multiplier", POSITIVE, 1.0),
        "softmax_scale": fields.number("attention_multiplier", POSITIVE, 1.0),
        "residual_multiplier": fields.number("residual_multiplier", POSITIVE, 1.0),
        "logits_scaling": fields.number("logits_scaling", POSITIVE, 1.0),
    }


def _write_granite(model: ModelConfig) -> dict[str, Any]:
    return {
        **write_llama(model),
        "embedding_multiplier": model.embedding_multiplier_scale,
        "attention_multiplier": model.attention_scale,
        "residual_multiplier": model.residual_multiplier,
        "logits_scaling": model.logits_scaling,
    }


GRANITE = Family("granite", "GraniteForCausalLM", _read_granite, _write_granite)
