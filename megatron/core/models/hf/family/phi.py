"""Phi-1, 1.5 and 2, and Persimmon: LayerNorm, biases, partial rotation, and LayerNorms of queries and keys that all
heads share. In a Phi attention and MLP are parallel, behind one norm, and the output layer has a bias, too."""

from __future__ import annotations

from typing import Any

from megatron.config.interval import BELOW_ONE
from megatron.config.model import ModelConfig
from megatron.core.models.hf.config_json import JsonFields
from megatron.core.models.hf.family.family import GELU_TANH, NO_FIELD, PRE_NORMS, SQUARED_RELU, Family
from megatron.core.models.hf.family.gpt_neox import FUSED
from megatron.core.models.hf.stored import StoredTensors

_GELU = "gelu"  # the exact one
_HEAD_NORMS = {
    "self_attention.q_layernorm": "self_attn.q_layernorm",
    "self_attention.k_layernorm": "self_attn.k_layernorm",
}
_STORED = StoredTensors((("model.norm.", "model.final_layernorm."),))


def _read_phi(fields: JsonFields, common: dict[str, Any]) -> dict[str, Any]:
    """Dropout of the residual stream is one number here."""
    residual, embedding = (fields.number(f"{name}_pdrop", BELOW_ONE, 0.0) for name in ("resid", "embd"))
    is_exact = fields.take("hidden_act", str, GELU_TANH) == _GELU
    return {
        "normalization": "LayerNorm",
        "parallel_residual": True,
        "shared_norm": True,
        "add_bias_linear": True,
        "add_output_layer_bias": True,
        "qk_layernorm": fields.take("qk_layernorm", bool, False),
        **({"openai_gelu": False, "bias_gelu_fusion": False} if is_exact else {}),
        "hidden_dropout": residual if residual == embedding else 0.0,
    }


def _write_phi(model: ModelConfig) -> dict[str, Any]:
    return {
        "embd_pdrop": model.hidden_dropout,
        "hidden_act": GELU_TANH if model.tanh_gelu else _GELU,
        "partial_rotary_factor": model.rotary_percent,
        "qk_layernorm": model.qk_layernorm,
        "resid_pdrop": model.hidden_dropout,
    }


def _read_persimmon(fields: JsonFields, common: dict[str, Any]) -> dict[str, Any]:
    """hidden_dropout is that of the MLP alone, and is not taken over."""
    fields.number("hidden_dropout", BELOW_ONE, 0.0)
    return {
        "normalization": "LayerNorm",
        "add_bias_linear": True,
        "qk_layernorm": fields.take("qk_layernorm", bool, True),
    }


def _write_persimmon(model: ModelConfig) -> dict[str, Any]:
    return {"partial_rotary_factor": model.rotary_percent, "qk_layernorm": model.qk_layernorm}


PHI = Family(
    "phi",
    "PhiForCausalLM",
    _read_phi,
    _write_phi,
    percent=0.5,
    epsilon=1e-5,
    width=8192,
    context=2048,
    activation=GELU_TANH,
    spellings=(_GELU, "gelu_new", "gelu_fast"),
    gated=False,
    fields={"rms_norm_eps": "layer_norm_eps", **dict.fromkeys(("head_dim", "max_sequence_length"), NO_FIELD)},
    norms={"input_layernorm": "input_layernorm", **_HEAD_NORMS},
    fused={"self_attention.linear_proj": "dense", "mlp.linear_fc1": "fc1", "mlp.linear_fc2": "fc2"},
    stored=_STORED,
)
PERSIMMON = Family(
    "persimmon",
    "PersimmonForCausalLM",
    _read_persimmon,
    _write_persimmon,
    percent=0.5,
    epsilon=1e-5,
    activation=SQUARED_RELU,
    gated=False,
    fields={
        "rms_norm_eps": "layer_norm_eps",
        **dict.fromkeys(("num_key_value_heads", "head_dim", "max_sequence_length"), NO_FIELD),
    },
    norms={**PRE_NORMS, **_HEAD_NORMS},
    fused=FUSED,
    by_group=True,
    stored=_STORED,
)
