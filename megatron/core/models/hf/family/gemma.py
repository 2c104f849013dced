"""Gemma: a Llama with a gated GELU, multiplied embeddings and norms whose weights are stored minus one."""

from __future__ import annotations

from typing import Any

from megatron.config.model import ModelConfig
from megatron.core.models.hf.config_json import JsonFields
from megatron.core.models.hf.family.family import GELU_TANH, Family
from megatron.core.models.hf.family.gemma2 import scaled_embeddings
from megatron.core.models.hf.family.llama import read_attention_bias


def _read_gemma(fields: JsonFields, common: dict[str, Any]) -> dict[str, Any]:
    fields.only("hidden_activation", GELU_TANH)
    fields.only("use_bidirectional_attention", False)
    return {**scaled_embeddings(common), **read_attention_bias(fields)}


def _write_gemma(model: ModelConfig) -> dict[str, Any]:
    return {"attention_bias": model.attn_proj_bias}


# The first files say "gelu", and mean the tanh form.
GEMMA = Family(
    "gemma",
    "GemmaForCausalLM",
    _read_gemma,
    _write_gemma,
    groups=16,
    head_dim=256,
    tied=True,
    activation=GELU_TANH,
    spellings=("gelu",),
)
