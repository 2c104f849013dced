"""Falcon: LayerNorm, and attention and MLP in parallel, behind one norm (7B, 11B) or behind a norm for each of the two
(40B), or one after the other, with ALiBi in place of rotary embeddings (RW)."""

from __future__ import annotations

from typing import Any

from megatron.config.interval import AT_LEAST_ONE, BELOW_ONE
from megatron.config.model import ModelConfig
from megatron.config.positions import ALIBI
from megatron.core.models.hf.config_json import JsonFields
from megatron.core.models.hf.family.family import GELU_TANH, NO_FIELD, Family
from megatron.core.models.hf.family.gpt_neox import FUSED
from megatron.core.models.hf.stored import StoredTensors

_GELU = "gelu"  # the exact one
_NAMES = (
    ("model.embed_tokens.", "transformer.word_embeddings."),
    ("model.layers.", "transformer.h."),
    ("model.norm.", "transformer.ln_f."),
    (".self_attn.", ".self_attention."),
)


def _read_falcon(fields: JsonFields, common: dict[str, Any]) -> dict[str, Any]:
    """hidden_dropout is that of the sum of attention and MLP, and is not taken over."""
    fields.only("apply_residual_connection_post_layernorm", False)
    fields.take("ff_factor", int, None)  # written, and not read
    fields.number("hidden_dropout", BELOW_ONE, 0.0)
    is_new = fields.take("new_decoder_architecture", bool, False)
    is_parallel = fields.take("parallel_attn", bool, True)
    has_one_group = fields.take("multi_query", bool, True)
    norms = fields.integer("num_ln_in_parallel_attn", AT_LEAST_ONE, 2 if is_new else 1)
    if norms > (2 if is_new else 1) or (is_new and not is_parallel):
        raise fields.error(
            f"num_ln_in_parallel_attn is {norms} and parallel_attn {is_parallel}; with new_decoder_architecture "
            f"{is_new} " + ("1 or 2, and True, are" if is_new else "1 norm is") + " supported"
        )
    heads = common["num_attention_heads"]
    groups = common["num_query_groups"] or heads
    if not is_new and has_one_group:
        groups = 1
    elif not is_new and groups != heads:
        raise fields.error(
            f"num_kv_heads is {groups}; without new_decoder_architecture and multi_query it is num_attention_heads, "
            f"{heads}"
        )
    is_exact = fields.take("hidden_act", str, _GELU) == _GELU
    return {
        **({"position_embedding_type": ALIBI, "scale_alibi_bias": True} if fields.take("alibi", bool, False) else {}),
        "normalization": "LayerNorm",
        "ffn_hidden_size": common["ffn_hidden_size"] or 4 * common["hidden_size"],
        "group_query_attention": groups != heads,
        "num_query_groups": groups if groups != heads else None,
        "parallel_residual": is_parallel,
        "shared_norm": is_parallel and norms == 1,
        "add_bias_linear": fields.take("bias", bool, False),
        **({"openai_gelu": False, "bias_gelu_fusion": False} if is_exact else {}),
    }


def _write_falcon(model: ModelConfig) -> dict[str, Any]:
    """The older form where it can describe the model."""
    groups = model.num_kv_heads
    is_old = groups in (1, model.num_attention_heads) and (model.shared_norm or not model.parallel_residual)
    return {
        "activation": GELU_TANH if model.tanh_gelu else _GELU,
        "alibi": model.position_embedding_type == ALIBI,
        "bias": model.mlp_bias,
        "multi_query": groups == 1,
        "new_decoder_architecture": not is_old,
        "num_ln_in_parallel_attn": 1 if is_old or model.shared_norm else 2,
        "parallel_attn": model.parallel_residual,
    }


FALCON = Family(
    "falcon",
    "FalconForCausalLM",
    _read_falcon,
    _write_falcon,
    epsilon=1e-5,
    width=0,
    tied=True,
    context=2048,
    activation=GELU_TANH,
    spellings=(_GELU, "gelu_new", "gelu_fast"),
    gated=False,
    fields={
        "num_key_value_heads": "num_kv_heads",
        "intermediate_size": "ffn_hidden_size",
        "rms_norm_eps": "layer_norm_epsilon",
        "hidden_act": "activation",
        **dict.fromkeys(("head_dim", "max_sequence_length"), NO_FIELD),
    },
    parallel_norms={"input_layernorm": "ln_attn", "pre_mlp_layernorm": "ln_mlp"},
    fused=FUSED,
    by_group=True,
    stored=StoredTensors(_NAMES, "transformer."),
)
