"""GPT-J and CodeGen: attention and MLP in parallel, behind one LayerNorm; neighbouring channels of a part of each head
are rotated as pairs; biases of the MLP and of the output layer. CodeGen has queries, values and keys in one tensor."""

from __future__ import annotations

import dataclasses
from typing import Any

from megatron.config.interval import AT_LEAST_ONE, BELOW_ONE
from megatron.config.model import ModelConfig
from megatron.core.models.hf.config_json import JsonFields
from megatron.core.models.hf.family.family import GELU_TANH, NO_FIELD, Family
from megatron.core.models.hf.family.gpt2 import take_summaries
from megatron.core.models.hf.rotary import rotary_share
from megatron.core.models.hf.stored import StoredTensors

_GELU = "gelu"  # the exact one
_BLOCKS = 4  # of heads, one for each core of the machine that trained CodeGen
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
_NAMES = (
    ("model.embed_tokens.", "transformer.wte."),
    ("model.layers.", "transformer.h."),
    ("model.norm.", "transformer.ln_f."),
    (".input_layernorm.", ".ln_1."),
    (".self_attn.", ".attn."),
)
_MODULES = {
    "self_attention.linear_proj": "out_proj",
    "mlp.linear_fc1": "fc_in",
    "mlp.linear_fc2": "fc_out",
}


def _read_gptj(fields: JsonFields, common: dict[str, Any]) -> dict[str, Any]:
    """Dropout of the residual stream is one number here."""
    fields.only("rotary", True)
    fields.only("scale_attn_weights", True)
    take_summaries(fields)
    residual, embedding = (fields.number(f"{name}_pdrop", BELOW_ONE, 0.0) for name in ("resid", "embd"))
    size = common["hidden_size"] // common["num_attention_heads"]
    rotated = fields.integer("rotary_dim", AT_LEAST_ONE, 64)
    if rotated % 2 or rotated > size:
        raise fields.error(f"rotary_dim is {rotated}; an even number up to the size of a head, {size}, is supported")
    is_exact = fields.take("hidden_act", str, GELU_TANH) == _GELU
    return {
        "normalization": "LayerNorm",
        "parallel_residual": True,
        "shared_norm": True,
        "rotary_interleaved": True,
        "rotary_percent": rotary_share(rotated, size),
        "add_mlp_bias": True,
        "add_output_layer_bias": True,
        **({"openai_gelu": False, "bias_gelu_fusion": False} if is_exact else {}),
        "hidden_dropout": residual if residual == embedding else 0.0,
    }


def _read_codegen(fields: JsonFields, common: dict[str, Any]) -> dict[str, Any]:
    fields.take("n_ctx", int, None)  # written, and not read
    heads = common["num_attention_heads"]
    if heads % _BLOCKS:
        raise fields.error(f"n_head is {heads}, which is not a multiple of {_BLOCKS}, the number of blocks of heads")
    return _read_gptj(fields, common)


def _write_gptj(model: ModelConfig) -> dict[str, Any]:
    dropout = {"resid_pdrop": model.hidden_dropout, "embd_pdrop": model.hidden_dropout}
    activation = GELU_TANH if model.tanh_gelu else _GELU
    return {**dropout, "activation_function": activation, "rotary_dim": model.rotary_dim}


GPTJ = Family(
    "gptj",
    "GPTJForCausalLM",
    _read_gptj,
    _write_gptj,
    epsilon=1e-5,
    width=0,
    activation=GELU_TANH,
    spellings=(_GELU, "gelu_new", "gelu_fast"),
    gated=False,
    fields=_FIELDS,
    norms={"input_layernorm": "input_layernorm"},
    fused=_MODULES,
    stored=StoredTensors(_NAMES, "transformer."),
)
CODEGEN = dataclasses.replace(
    GPTJ,
    model_type="codegen",
    architecture="CodeGenForCausalLM",
    read=_read_codegen,
    fused={**_MODULES, "self_attention.linear_qkv": "qkv_proj"},
    blocks=_BLOCKS,
)
