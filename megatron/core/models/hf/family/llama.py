"""Llama, and families that are Llamas but for their windows or the names of their tensors."""

from __future__ import annotations

from typing import Any

from megatron.config.model import ModelConfig
from megatron.config.positions import ALIBI
from megatron.core.models.hf.config_json import JsonFields
from megatron.core.models.hf.family.family import NO_FIELD, Family
from megatron.core.models.hf.family.windows import layer_types, read_window, read_window_by_layer


def read_llama(fields: JsonFields, common: dict[str, Any]) -> dict[str, Any]:
    """Biases are in all projections of attention or in none, and in all of the MLP or in none."""
    fields.only("rope_interleaved", False)
    attention, mlp = read_attention_bias(fields), fields.take("mlp_bias", bool, False)
    return {"add_bias_linear": True} if mlp and attention["add_qkv_bias"] else {**attention, "add_mlp_bias": mlp}


def write_llama(model: ModelConfig) -> dict[str, Any]:
    """The fields of biases."""
    return {"attention_bias": model.attn_proj_bias, "mlp_bias": model.mlp_bias}


def read_attention_bias(fields: JsonFields) -> dict[str, Any]:
    """Biases in all projections of attention, or in none."""
    has = fields.take("attention_bias", bool, False)
    return {"add_qkv_bias": has, "add_attn_proj_bias": has}


def _read_mistral(fields: JsonFields, common: dict[str, Any]) -> dict[str, Any]:
    window = read_window(fields)
    return {} if window is None else {"window_size": f"{window - 1},0"}


def _write_mistral(model: ModelConfig) -> dict[str, Any]:
    return {"sliding_window": model.window}


def _read_ministral(fields: JsonFields, common: dict[str, Any]) -> dict[str, Any]:
    """Without a list all layers have the window."""
    slides = not fields.has("sliding_window") or fields.take("sliding_window", object, None) is not None
    return read_window_by_layer(fields, [slides] * common["num_layers"])


def _write_ministral(model: ModelConfig) -> dict[str, Any]:
    return {"sliding_window": model.window, "layer_types": layer_types(model)}


def _read_cwm(fields: JsonFields, common: dict[str, Any]) -> dict[str, Any]:
    """Without a list every fourth layer has no window, beginning with the first; without a rope it is Llama 3's."""
    fields.only("mlp_bias", False)
    windows = read_window_by_layer(fields, [layer % 4 > 0 for layer in range(common["num_layers"])])
    if any(fields.take(name, dict, None) for name in ("rope_scaling", "rope_parameters")):
        return windows
    return {**windows, "use_rope_scaling": True, "rope_scaling_factor": 16.0, "rotary_base": 1e6}


def _read_iquestcoder(fields: JsonFields, common: dict[str, Any]) -> dict[str, Any]:
    """transformers refuses clipped queries and sliding windows, too."""
    fields.only("clip_qkv", None)
    fields.only("use_sliding_window", False)
    return read_llama(fields, common)


def _read_internlm3(fields: JsonFields, common: dict[str, Any]) -> dict[str, Any]:
    """The publisher's files have other names for both fields of biases, which transformers takes for each other."""
    attention = fields.take("qkv_bias", bool, fields.take("attention_bias", bool, False))
    mlp = fields.take("bias", bool, fields.take("mlp_bias", bool, False))
    if attention != mlp:
        raise fields.error(f"qkv_bias is {attention} and bias {mlp}; as in transformers, only equal ones are supported")
    return {"add_bias_linear": attention}


def _read_baichuan(fields: JsonFields, common: dict[str, Any]) -> dict[str, Any]:
    """Baichuan-13B has ALiBi, and a name of its own for its context."""
    has_alibi = fields.take("max_position_embeddings", int, None) is None
    # The architecture of Baichuan-7B has a capital C, unlike those of Baichuan-13B and Baichuan 2.
    is_second = "BaichuanForCausalLM" in fields.take("architectures", list, []) and not has_alibi
    if fields.has("z_loss_weight") or is_second:
        raise fields.error("Baichuan 2 normalises its head; only Baichuan-7B and Baichuan-13B are supported")
    return {"position_embedding_type": ALIBI} if has_alibi else {}


def _write_baichuan(model: ModelConfig) -> dict[str, Any]:
    """The form of Baichuan-13B: without ALiBi the model is a Llama."""
    return {"max_position_embeddings": None, _CONTEXT: model.max_position_embeddings}


_CONTEXT = "model_max_length"
_SIZES = {"num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "vocab_size": 32000}
LLAMA = Family(
    "llama",
    "LlamaForCausalLM",
    read_llama,
    write_llama,
    sizes=_SIZES | {"intermediate_size": 11008, "max_position_embeddings": 2048},
)
MISTRAL = Family(
    "mistral",
    "MistralForCausalLM",
    _read_mistral,
    _write_mistral,
    groups=8,
    sizes=_SIZES | {"intermediate_size": 14336, "max_position_embeddings": 131072},
)
MINISTRAL = Family("ministral", "MinistralForCausalLM", _read_ministral, _write_ministral, groups=8)
# Without its config.json it is written as the Ministral that it is.
CWM = Family("cwm", "CwmForCausalLM", _read_cwm, _write_ministral, groups=8, head_dim=128, theta=1e6, epsilon=1e-5)
# These are written as the Llamas that they are.
IQUESTCODER = Family(
    "iquestcoder", "IQuestCoderForCausalLM", _read_iquestcoder, None, groups=8, head_dim=128, epsilon=1e-5
)
INTERNLM3 = Family(
    "internlm3", "InternLM3ForCausalLM", _read_internlm3, None, groups=2, head_dim=128, epsilon=1e-5, context=32768
)
BAICHUAN = Family(
    "baichuan",
    "BaichuanForCausalLM",
    _read_baichuan,
    _write_baichuan,
    fields={"max_sequence_length": _CONTEXT, **dict.fromkeys(("num_key_value_heads", "head_dim"), NO_FIELD)},
    fused={"self_attention.linear_qkv": "W_pack"},
)
