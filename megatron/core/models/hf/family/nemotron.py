"""Families whose MLP has no gate and squares its ReLU: Nemotron-4 and Minitron, Arcee's AFM, Jais 2."""

from __future__ import annotations

from typing import Any

from megatron.config.interval import SHARE
from megatron.core.models.hf.config_json import JsonFields
from megatron.core.models.hf.family.family import SQUARED_RELU, Family
from megatron.core.models.hf.family.llama import read_llama, write_llama


def _read_nemotron(fields: JsonFields, common: dict[str, Any]) -> dict[str, Any]:
    """The publisher's files also say how much of a head is rotated under a name that transformers does not read."""
    fields.number("rope_percent", SHARE, 0.5)
    return {**read_llama(fields, common), "normalization": "LayerNorm", "apply_layernorm_1p": True}


def _read_jais2(fields: JsonFields, common: dict[str, Any]) -> dict[str, Any]:
    attention, mlp = (fields.take(name, bool, True) for name in ("attention_bias", "mlp_bias"))
    biases = {"add_qkv_bias": attention, "add_attn_proj_bias": attention, "add_mlp_bias": mlp}
    return {**biases, "normalization": "LayerNorm"}


NEMOTRON = Family(
    "nemotron",
    "NemotronForCausalLM",
    _read_nemotron,
    write_llama,
    percent=0.5,
    epsilon=1e-5,
    std=0.0134,
    activation=SQUARED_RELU,
    gated=False,
    fields={"rms_norm_eps": "norm_eps"},
)
ARCEE = Family("arcee", "ArceeForCausalLM", read_llama, write_llama, epsilon=1e-5, activation=SQUARED_RELU, gated=False)
JAIS2 = Family(
    "jais2",
    "Jais2ForCausalLM",
    _read_jais2,
    write_llama,
    epsilon=1e-5,
    activation=SQUARED_RELU,
    gated=False,
    fields={"rms_norm_eps": "layer_norm_eps"},
)
