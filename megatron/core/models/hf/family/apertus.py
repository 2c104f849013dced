"""Apertus: an MLP without a gate whose activation, xIELU, has trained numbers; and norms of queries and keys."""

from __future__ import annotations

from typing import Any

from megatron.config.interval import BELOW_ONE
from megatron.config.model import ModelConfig
from megatron.core.models.hf.config_json import JsonFields
from megatron.core.models.hf.family.family import PRE_NORMS, XIELU, Family
from megatron.core.models.hf.family.llama import read_attention_bias
from megatron.core.models.hf.rotary import write_rotary
from megatron.spec.mlp import XIELU_BETA

_THETA, _CONTEXT = 12e6, 65536
# The rotary embedding of a file that has none.
_LLAMA3 = {
    "use_rope_scaling": True,
    "rope_scaling_factor": 8.0,
    "rope_scaling_low_freq_factor": 1.0,
    "rope_scaling_high_freq_factor": 4.0,
    "rope_scaling_original_max_position_embeddings": 8192,
}


def _read_apertus(fields: JsonFields, common: dict[str, Any]) -> dict[str, Any]:
    """The publisher's files also have four fields that transformers does not read."""
    for name, value in (("mlp_bias", False), ("post_norm", False), ("qk_norm", True)):
        fields.only(name, value)
    fields.number("hidden_dropout", BELOW_ONE, 0.0)
    has_rope = any(fields.take(name, dict, None) for name in ("rope_scaling", "rope_parameters"))
    rope = {} if has_rope else {"rotary_base": _THETA, **_LLAMA3}
    return {"qk_layernorm": True, **read_attention_bias(fields), **rope}


def _write_apertus(model: ModelConfig) -> dict[str, Any]:
    """A rotary embedding without scaling says so, because that of a file without one is scaled."""
    plain = {"rope_type": "default", "rope_theta": model.rotary_base}
    return {"attention_bias": model.attn_proj_bias, "rope_scaling": write_rotary(model)["rope_scaling"] or plain}


APERTUS = Family(
    "apertus",
    "ApertusForCausalLM",
    _read_apertus,
    _write_apertus,
    theta=_THETA,
    epsilon=1e-5,
    width=14336,
    context=_CONTEXT,
    activation=XIELU,
    gated=False,
    norms={
        **PRE_NORMS,
        "input_layernorm": "attention_layernorm",
        "pre_mlp_layernorm": "feedforward_layernorm",
    },
    constants={"mlp.act_fn.beta": XIELU_BETA, "mlp.act_fn.eps": -1e-6},
)
