"""GPT-NeoX and Pythia: attention and MLP read the same residual stream, through a norm for each of the two; LayerNorm,
biases, partial rotation, and queries, keys and values of a head one after the other in one tensor."""

from __future__ import annotations

from typing import Any

from megatron.config.interval import BELOW_ONE
from megatron.config.model import ModelConfig
from megatron.core.models.hf.config_json import JsonFields
from megatron.core.models.hf.family.family import GELU_TANH, NO_FIELD, Family
from megatron.core.models.hf.stored import StoredTensors

_GELU = "gelu"  # the exact one
# Also of Falcon, which has its modules from here.
FUSED = {
    "self_attention.linear_qkv": "query_key_value",
    "self_attention.linear_proj": "dense",
    "mlp.linear_fc1": "dense_h_to_4h",
    "mlp.linear_fc2": "dense_4h_to_h",
}
_NAMES = (
    ("model.embed_tokens.", "gpt_neox.embed_in."),
    ("model.layers.", "gpt_neox.layers."),
    ("model.norm.", "gpt_neox.final_layer_norm."),
    (".self_attn.", ".attention."),
    ("lm_head.", "embed_out."),
)


def _read_gpt_neox(fields: JsonFields, common: dict[str, Any]) -> dict[str, Any]:
    """The MLP always has biases."""
    fields.number("classifier_dropout", BELOW_ONE, 0.1)
    fields.only("is_decoder", False)
    biases = fields.take("attention_bias", bool, True)
    is_exact = fields.take("hidden_act", str, _GELU) == _GELU
    return {
        "normalization": "LayerNorm",
        "parallel_residual": fields.take("use_parallel_residual", bool, True),
        **({"add_bias_linear": True} if biases else {"add_mlp_bias": True}),
        **({"openai_gelu": False, "bias_gelu_fusion": False} if is_exact else {}),
        "hidden_dropout": fields.number("hidden_dropout", BELOW_ONE, 0.0),
    }


def _write_gpt_neox(model: ModelConfig) -> dict[str, Any]:
    return {
        "attention_bias": model.attn_proj_bias,
        "hidden_act": GELU_TANH if model.tanh_gelu else _GELU,
        "hidden_dropout": model.hidden_dropout,
        "rotary_pct": model.rotary_percent,
        "use_parallel_residual": model.parallel_residual,
    }


GPT_NEOX = Family(
    "gpt_neox",
    "GPTNeoXForCausalLM",
    _read_gpt_neox,
    _write_gpt_neox,
    percent=0.25,
    epsilon=1e-5,
    activation=GELU_TANH,
    spellings=(_GELU, "gelu_new", "gelu_fast"),
    gated=False,
    fields={
        "rms_norm_eps": "layer_norm_eps",
        "rope_theta": "rotary_emb_base",
        "partial_rotary_factor": "rotary_pct",
        **dict.fromkeys(("num_key_value_heads", "head_dim", "max_sequence_length"), NO_FIELD),
    },
    fused=FUSED,
    by_group=True,
    stored=StoredTensors(_NAMES, "gpt_neox."),
)
