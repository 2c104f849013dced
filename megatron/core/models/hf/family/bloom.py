"""BLOOM: ALiBi, a norm of the token embeddings, LayerNorm, biases everywhere, and queries, keys and values of a head
one after the other in one tensor."""

from __future__ import annotations

from typing import Any

from megatron.config.interval import BELOW_ONE
from megatron.config.model import ModelConfig
from megatron.config.positions import ALIBI
from megatron.core.models.hf.config_json import JsonFields
from megatron.core.models.hf.family.family import GELU_TANH, NO_FIELD, Family
from megatron.core.models.hf.family.gpt_neox import FUSED
from megatron.core.models.hf.stored import StoredTensors

_NAMES = (
    ("model.embed_tokens.", "transformer.word_embeddings."),
    ("model.embed_layernorm.", "transformer.word_embeddings_layernorm."),
    ("model.layers.", "transformer.h."),
    ("model.norm.", "transformer.ln_f."),
    (".self_attn.", ".self_attention."),
)
# Of the program that trained it, and of the order of sums.
_WITHOUT_EFFECT = (
    *("attention_softmax_in_fp32", "bias_dropout_fusion", "masked_softmax_fusion", "offset_alibi", "pretraining_tp"),
    *("skip_bias_add", "skip_bias_add_qkv", "slow_but_exact", "unk_token_id"),
)


def _read_bloom(fields: JsonFields, common: dict[str, Any]) -> dict[str, Any]:
    """hidden_dropout leaves the embedding out, and is not taken over."""
    fields.only("apply_residual_connection_post_layernorm", False)
    fields.number("hidden_dropout", BELOW_ONE, 0.0)
    for name in _WITHOUT_EFFECT:
        fields.take(name, object, None)
    return {
        "position_embedding_type": ALIBI,
        "embed_layernorm": True,
        "normalization": "LayerNorm",
        "ffn_hidden_size": 4 * common["hidden_size"],
        "add_bias_linear": True,
    }


def _write_bloom(model: ModelConfig) -> dict[str, Any]:
    return {"hidden_dropout": model.hidden_dropout}


BLOOM = Family(
    "bloom",
    "BloomForCausalLM",
    _read_bloom,
    _write_bloom,
    epsilon=1e-5,
    width=0,
    tied=True,
    context=2048,
    activation=GELU_TANH,
    gated=False,
    fields={
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "seq_length",
        "rms_norm_eps": "layer_norm_epsilon",
        **dict.fromkeys(("num_key_value_heads", "head_dim", "intermediate_size", "hidden_act"), NO_FIELD),
        **dict.fromkeys(("max_sequence_length", "partial_rotary_factor"), NO_FIELD),
        **dict.fromkeys(("rope_theta", "rope_scaling", "rope_parameters"), NO_FIELD),
    },
    fused=FUSED,
    by_group=True,
    stored=StoredTensors(_NAMES, "transformer."),
    older={"n_embed": "hidden_size", "num_attention_heads": "n_head", "num_hidden_layers": "n_layer"},
)
