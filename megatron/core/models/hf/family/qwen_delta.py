"""Qwen3-Next and Qwen3.5: gated delta nets in most layers, and attention with an output gate in the others."""

from __future__ import annotations

import re
from typing import Any

from megatron.config.interval import AT_LEAST_ONE, SIZE
from megatron.config.model import ModelConfig
from megatron.core.models.hf.config_json import JsonFields
from megatron.core.models.hf.family.experts import read_experts
from megatron.core.models.hf.family.family import PRE_NORMS, ExpertNames, Family
from megatron.core.models.hf.family.llama import read_attention_bias
from megatron.core.models.hf.family.qwen_moe import read_some_experts, write_some_experts

_SIZES = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
_KINDS = ("full_attention", "linear_attention")
# Layers that predict further tokens have another form here, so they are carried.
_PREDICTIONS = re.compile(r"mtp\..+")
_OF_PREDICTIONS = ("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings")
_WIDTH = "moe_intermediate_size"


def _read_layers(fields: JsonFields, common: dict[str, Any]) -> dict[str, Any]:
    layers = common["num_layers"]
    interval = fields.integer("full_attention_interval", AT_LEAST_ONE, 4)
    default = [_KINDS[int((layer + 1) % interval > 0)] for layer in range(layers)]
    kinds: list[Any] = fields.take("layer_types", list, default)
    if len(kinds) != layers or set(kinds) != set(_KINDS):
        raise fields.error(f"layer_types has to name {layers} layers, each {' or '.join(_KINDS)}, with both kinds")
    fields.only("attn_output_gate", True)
    for name in _OF_PREDICTIONS:
        fields.has(name)
    fields.take("mamba_ssm_dtype", str, None)  # states are in fp32 here
    sizes = {name: fields.integer(name, SIZE, size) for name, size in _SIZES.items()}
    values, keys = sizes["linear_num_value_heads"], sizes["linear_num_key_heads"]
    if values % keys:
        raise fields.error(f"linear_num_value_heads {values} is not a multiple of linear_num_key_heads {keys}")
    return {
        "experimental_attention_variant": "gdn",
        "linear_attention_freq": str([_KINDS.index(kind) for kind in kinds]),
        **sizes,
        "attention_output_gate": True,
        "qk_layernorm": True,
        "apply_layernorm_1p": True,
        **read_attention_bias(fields),
    }


def _write_layers(model: ModelConfig) -> dict[str, Any]:
    return {
        **{name: getattr(model, name) for name in _SIZES},
        "layer_types": [_KINDS[int(has_delta_net)] for has_delta_net in model.delta_layers],
        "attention_bias": model.attn_proj_bias,
    }


def _read_shared(fields: JsonFields) -> dict[str, Any]:
    return {
        "moe_shared_expert_intermediate_size": fields.integer("shared_expert_intermediate_size", SIZE, 512),
        "moe_shared_expert_gate": True,
    }


def _read_qwen3_next(fields: JsonFields, common: dict[str, Any]) -> dict[str, Any]:
    experts = read_some_experts(fields, common, number=512, topk=10, width=512, names=("num_experts",), normalizes=True)
    return {**_read_layers(fields, common), **experts, **_read_shared(fields)}


def _write_qwen3_next(model: ModelConfig) -> dict[str, Any]:
    shared = {"shared_expert_intermediate_size": model.moe_shared_expert_intermediate_size}
    return _write_layers(model) | write_some_experts(model) | shared


def _read_qwen3_5_moe(fields: JsonFields, common: dict[str, Any]) -> dict[str, Any]:
    """All layers have experts, and the weights of those that are chosen sum to one."""
    fields.only("norm_topk_prob", True)
    return {
        **_read_layers(fields, common),
        **read_experts(fields, number=256, topk=8, names=("num_experts",)),
        "moe_ffn_hidden_size": fields.integer(_WIDTH, SIZE, 512),
        **_read_shared(fields),
    }


def _write_qwen3_5_moe(model: ModelConfig) -> dict[str, Any]:
    return _write_layers(model) | {
        "num_experts": model.num_experts,
        "num_experts_per_tok": model.moe_router_topk,
        _WIDTH: model.moe_ffn_dim,
        "shared_expert_intermediate_size": model.moe_shared_expert_intermediate_size,
    }


_NORMS = {**PRE_NORMS, "self_attention.out_norm": "linear_attn.norm"}
_IMAGES = frozenset({"mrope_section", "mrope_interleaved"})
QWEN3_NEXT = Family(
    "qwen3_next",
    "Qwen3NextForCausalLM",
    _read_qwen3_next,
    _write_qwen3_next,
    groups=2,
    head_dim=256,
    percent=0.25,
    width=5632,
    norms=_NORMS,
    joined={"in_proj_qkvz": ("in_proj_qkv", "in_proj_z"), "in_proj_ba": ("in_proj_b", "in_proj_a")},
    experts=ExpertNames(),
    carried=_PREDICTIONS,
)
QWEN3_5 = Family(
    "qwen3_5_text",
    "Qwen3_5ForCausalLM",
    _read_layers,
    _write_layers,
    groups=4,
    head_dim=256,
    percent=0.25,
    width=12288,
    norms=_NORMS,
    rope_of_images=_IMAGES,
    carried=_PREDICTIONS,
)
QWEN3_5_MOE = Family(
    "qwen3_5_moe_text",
    "Qwen3_5MoeForCausalLM",
    _read_qwen3_5_moe,
    _write_qwen3_5_moe,
    groups=2,
    head_dim=256,
    percent=0.25,
    width=0,
    norms=_NORMS,
    rope_of_images=_IMAGES,
    experts=ExpertNames(),
    carried=_PREDICTIONS,
)
