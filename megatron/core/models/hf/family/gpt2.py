"""GPT-2, and the GPT of StarCoder and SantaCoder, which shares one key and value between all heads: a learned table of
positions, LayerNorm, biases, an MLP without a gate."""

from __future__ import annotations

from typing import Any

from megatron.config.interval import BELOW_ONE
from megatron.config.model import ModelConfig
from megatron.core.models.hf.config_json import JsonFields
from megatron.core.models.hf.family.family import GELU_TANH, NO_FIELD, Family
from megatron.core.models.hf.stored import StoredTensors

_FIELDS = {
    "num_hidden_layers": "n_layer",
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "intermediate_size": "n_inner",
    "max_position_embeddings": "n_positions",
    "rms_norm_eps": "layer_norm_epsilon",
    "hidden_act": "activation_function",
    "attention_dropout": "attn_pdrop",
    **dict.fromkeys(("num_key_value_heads", "head_dim", "rope_theta", "rope_scaling", "rope_parameters"), NO_FIELD),
    **dict.fromkeys(("partial_rotary_factor", "max_sequence_length"), NO_FIELD),
}
_GELU = "gelu"  # the exact one
_NAMES = (
    ("model.embed_tokens.", "transformer.wte."),
    ("model.embed_positions.", "transformer.wpe."),
    ("model.layers.", "transformer.h."),
    ("model.norm.", "transformer.ln_f."),
    (".input_layernorm.", ".ln_1."),
    (".post_attention_layernorm.", ".ln_2."),
    (".self_attn.", ".attn."),
)
_FUSED = {
    "self_attention.linear_qkv": "c_attn",
    "self_attention.linear_proj": "c_proj",
    "mlp.linear_fc1": "c_fc",
    "mlp.linear_fc2": "c_proj",
}


def take_summaries(fields: JsonFields) -> None:
    """Takes the fields of heads for other tasks, which GPT-2's configuration and those made from it have."""
    for name in ("summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels"):
        fields.take(name, object, None)
    fields.number("summary_first_dropout", BELOW_ONE, 0.1)


def _read_gpt2(fields: JsonFields, common: dict[str, Any]) -> dict[str, Any]:
    fields.only("scale_attn_weights", True)
    fields.only("scale_attn_by_inverse_layer_idx", False)
    fields.take("reorder_and_upcast_attn", bool, False)  # a matter of rounding
    fields.take("n_ctx", int, None)  # written, and not read
    take_summaries(fields)
    residual, embedding = fields.number("resid_pdrop", BELOW_ONE, 0.1), fields.number("embd_pdrop", BELOW_ONE, 0.1)
    return {
        "position_embedding_type": "learned_absolute",
        "normalization": "LayerNorm",
        "add_bias_linear": True,
        **({"openai_gelu": False, "bias_gelu_fusion": False} if fields.take("hidden_act", str, "") == _GELU else {}),
        "hidden_dropout": residual if residual == embedding else 0.0,
    }


def _write_gpt2(model: ModelConfig) -> dict[str, Any]:
    dropout = {"resid_pdrop": model.hidden_dropout, "embd_pdrop": model.hidden_dropout}
    return {**dropout, "activation_function": GELU_TANH if model.tanh_gelu else _GELU}


def _read_gpt_bigcode(fields: JsonFields, common: dict[str, Any]) -> dict[str, Any]:
    """With a key and value for each head its tensors have another order."""
    fields.only("multi_query", True)
    fields.only("num_key_value_heads", 1)
    for name in ("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32"):
        fields.take(name, bool, True)
    # Written by the publisher, and not read.
    for name in ("inference_runner", "pad_key_length", "pre_allocate_kv_cache", "validate_runner_input"):
        fields.take(name, object, None)
    return _read_gpt2(fields, common)


def _write_gpt_bigcode(model: ModelConfig) -> dict[str, Any]:
    return {**_write_gpt2(model), "multi_query": True}


GPT2 = Family(
    "gpt2",
    "GPT2LMHeadModel",
    _read_gpt2,
    _write_gpt2,
    epsilon=1e-5,
    width=0,
    tied=True,
    activation=GELU_TANH,
    spellings=("gelu_new", _GELU),
    gated=False,
    fields=_FIELDS,
    fused=_FUSED,
    stored=StoredTensors(_NAMES, "transformer.", ("c_attn.weight", "c_fc.weight", "c_proj.weight")),
)
GPT_BIGCODE = Family(
    "gpt_bigcode",
    "GPTBigCodeForCausalLM",
    _read_gpt_bigcode,
    _write_gpt_bigcode,
    groups=1,
    spellings=("gelu_new", _GELU),
    epsilon=1e-5,
    width=0,
    tied=True,
    activation=GELU_TANH,
    gated=False,
    fields={name: field for name, field in _FIELDS.items() if name != "num_key_value_heads"},
    fused=_FUSED,
    stored=StoredTensors(_NAMES, "transformer."),
)
