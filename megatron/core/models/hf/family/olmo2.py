"""OLMo 2: norms behind attention and MLP only, and over the queries and keys of all heads. OLMo 3 adds layers with a
sliding window, whose rotary embedding is not scaled."""

from __future__ import annotations

from typing import Any

from megatron.config.model import ModelConfig
from megatron.core.models.hf.config_json import JsonFields
from megatron.core.models.hf.family.family import Family
from megatron.core.models.hf.family.llama import read_attention_bias
from megatron.core.models.hf.family.windows import layer_types, read_window_by_layer
from megatron.core.models.hf.rotary import write_rotary_by_kind

POST_NORMS = {
    "post_self_attn_layernorm": "post_attention_layernorm",
    "post_mlp_layernorm": "post_feedforward_layernorm",
    "self_attention.q_layernorm": "self_attn.q_norm",
    "self_attention.k_layernorm": "self_attn.k_norm",
}


def _read_olmo2(fields: JsonFields, common: dict[str, Any]) -> dict[str, Any]:
    norms = {"pre_norm": False, "post_norm": True, "qk_layernorm": True, "qk_layernorm_across_heads": True}
    return {**norms, **read_attention_bias(fields)}


def _write_olmo2(model: ModelConfig) -> dict[str, Any]:
    return {"attention_bias": model.attn_proj_bias}


def _read_olmo3(fields: JsonFields, common: dict[str, Any]) -> dict[str, Any]:
    """Without a list every fourth layer has no window."""
    if fields.has("rope_local_base_freq"):
        raise fields.error("rope_local_base_freq is not read by transformers in this family; use rope_parameters")
    scaling: dict[str, Any] = fields.take("rope_scaling", dict, None) or {}
    if "type" in scaling and "rope_type" not in scaling:
        raise fields.error(
            "rope_scaling has a type, which transformers does not read in this family; name it rope_type"
        )
    windows = read_window_by_layer(fields, [layer % 4 < 3 for layer in range(common["num_layers"])])
    return {**_read_olmo2(fields, common), **windows, **({} if windows else {"rotary_base_local": None})}


def _write_olmo3(model: ModelConfig) -> dict[str, Any]:
    """A base of its own of layers with a window has a place in the dict by kinds of layers only."""
    fields = {**_write_olmo2(model), "sliding_window": model.window or _WINDOW, "layer_types": layer_types(model)}
    if model.rotary_base_local in (None, _THETA):
        return fields
    return {**fields, "rope_scaling": None, **write_rotary_by_kind(model)}


_WINDOW, _THETA = 4096, 500000.0
OLMO2 = Family("olmo2", "Olmo2ForCausalLM", _read_olmo2, _write_olmo2, epsilon=1e-5, norms=POST_NORMS)
OLMO3 = Family(
    "olmo3",
    "Olmo3ForCausalLM",
    _read_olmo3,
    _write_olmo3,
    theta=_THETA,
    local_theta=_THETA,
    epsilon=1e-5,
    norms=POST_NORMS,
)
