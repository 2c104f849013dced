"""MPT: ALiBi, LayerNorm with a weight alone, no biases, an exact GELU without a gate, and queries, keys and values one
after the other in one tensor."""

from __future__ import annotations

from typing import Any

from megatron.config.interval import AT_LEAST_ONE, BELOW_ONE, POSITIVE
from megatron.config.layer_forms import WEIGHT
from megatron.config.model import ModelConfig
from megatron.config.positions import ALIBI
from megatron.core.models.hf.config_json import JsonFields
from megatron.core.models.hf.family.family import GELU_TANH, NO_FIELD, Family
from megatron.core.models.hf.stored import StoredTensors

_NAMES = (
    ("model.embed_tokens.", "transformer.wte."),
    ("model.layers.", "transformer.blocks."),
    ("model.norm.", "transformer.norm_f."),
    (".input_layernorm.", ".norm_1."),
    (".post_attention_layernorm.", ".norm_2."),
    (".self_attn.", ".attn."),
    (".mlp.", ".ffn."),
)
_FUSED = {
    "self_attention.linear_qkv": "Wqkv",
    "self_attention.linear_proj": "out_proj",
    "mlp.linear_fc1": "up_proj",
    "mlp.linear_fc2": "down_proj",
}
_WITHOUT_EFFECT = ("init_config", "init_device", "norm_type", "verbose", "tokenizer_name", "learned_pos_emb")


def _read_mpt(fields: JsonFields, common: dict[str, Any]) -> dict[str, Any]:
    """transformers reads neither dropout of embeddings nor factors of gradients and logits, and has no biases."""
    for name in _WITHOUT_EFFECT:  # learned_pos_emb: read where there is no ALiBi
        fields.take(name, object, None)
    for name in ("resid_pdrop", "emb_pdrop"):
        fields.number(name, BELOW_ONE, 0.0)
    fields.only("embedding_fraction", 1.0)
    fields.only("logit_scale", None)
    fields.only("no_bias", True)
    attention = fields.below("attn_config", fields.take("attn_config", dict, {}))
    attention.only("alibi", True)
    attention.only("attn_type", "multihead_attention")
    for name in ("qk_ln", "prefix_lm", "attn_uses_sequence_id"):
        attention.only(name, False)
    attention.take("attn_impl", str, None)
    settings = {
        "position_embedding_type": ALIBI,
        "alibi_bias_max": attention.number("alibi_bias_max", POSITIVE, 8),
        "softmax_scale": attention.optional_number("softmax_scale", POSITIVE),
        "attention_dropout": attention.number("attn_pdrop", BELOW_ONE, 0.0),
        "clip_qkv": attention.optional_number("clip_qkv", POSITIVE),
        "normalization": "LayerNorm",
        "norm_parameters": WEIGHT,
        "ffn_hidden_size": fields.integer("expansion_ratio", AT_LEAST_ONE, 4) * common["hidden_size"],
        "openai_gelu": False,
        "bias_gelu_fusion": False,
    }
    attention.finish()
    return settings


def _write_mpt(model: ModelConfig) -> dict[str, Any]:
    assert model.hidden_size
    bias_max = model.alibi_bias_max
    return {
        "attn_config": {
            "alibi": model.position_embedding_type == ALIBI,
            "alibi_bias_max": int(bias_max) if bias_max.is_integer() else bias_max,
            "attn_pdrop": model.attention_dropout or 0,  # transformers takes whole numbers alone
            "clip_qkv": model.clip_qkv,
            "softmax_scale": model.softmax_scale,
        },
        "expansion_ratio": max(1, model.ffn_dim // model.hidden_size),
        "no_bias": True,
    }


MPT = Family(
    "mpt",
    "MptForCausalLM",
    _read_mpt,
    _write_mpt,
    epsilon=1e-5,
    width=0,
    tied=True,
    context=2048,
    activation=GELU_TANH,
    gated=False,
    fields={
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "hidden_size": "d_model",
        "max_position_embeddings": "max_seq_len",
        "rms_norm_eps": "layer_norm_epsilon",
        **dict.fromkeys(("num_key_value_heads", "head_dim", "intermediate_size", "hidden_act"), NO_FIELD),
        **dict.fromkeys(("max_sequence_length", "partial_rotary_factor", "attention_dropout"), NO_FIELD),
        **dict.fromkeys(("rope_theta", "rope_scaling", "rope_parameters"), NO_FIELD),
    },
    fused=_FUSED,
    stored=StoredTensors(_NAMES, "transformer."),
)
