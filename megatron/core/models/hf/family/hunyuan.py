"""Hunyuan, dense and with experts: queries and keys are normalized after their rotation."""

from __future__ import annotations

from typing import Any

from megatron.config.interval import SIZE
from megatron.config.model import ModelConfig
from megatron.core.models.hf.config_json import JsonFields
from megatron.core.models.hf.family.family import IN_MEMORY, PRE_NORMS, ExpertNames, Family
from megatron.core.models.hf.family.llama import read_attention_bias

_NORMS = {
    **PRE_NORMS,
    "self_attention.q_layernorm": "self_attn.query_layernorm",
    "self_attention.k_layernorm": "self_attn.key_layernorm",
}
# Fields of the publisher's files that transformers does not read: tokens, sizes of heads for other tasks, and how
# layers share keys or drop tokens where they do.
_UNREAD = """
    eod_token_id pad_id im_start_id im_end_id im_newline_id mask_init_id text_start_id text_end_id org_vocab_size
    class_num dense_list pool_type cla_share_factor moe_drop_tokens moe_random_routing_dropped_token
"""


def _read_hunyuan(fields: JsonFields, common: dict[str, Any]) -> dict[str, Any]:
    """The publisher's files have further fields, which have one value in models that transformers computes."""
    for name, supported in (
        ("use_qk_norm", True),
        ("use_rotary_pos_emb", True),
        ("position_embedding_xdrope", False),
        ("norm_type", "rms"),
        ("use_cla", False),
        ("mlp_bias", False),
        ("attention_head_dim", common["kv_channels"]),
    ):
        fields.only(name, supported)
    for name in _UNREAD.split():
        fields.take(name, object, None)
    return {"qk_layernorm": True, "qk_layernorm_after_rope": True, **read_attention_bias(fields)}


def _write_hunyuan(model: ModelConfig) -> dict[str, Any]:
    return {"attention_bias": model.attn_proj_bias}


def _read_hunyuan_moe(fields: JsonFields, common: dict[str, Any]) -> dict[str, Any]:
    """Every layer has experts and one more that reads all tokens, all as wide as intermediate_size says."""
    layers, width = common["num_layers"], common["ffn_hidden_size"]
    for name, supported in (("use_mixed_mlp_moe", True), ("moe_layer_num_skipped", 0)):
        fields.only(name, supported)
    for name, supported in (("num_shared_expert", 1), ("moe_intermediate_size", width)):
        fields.only(name, supported, [supported] * layers)
    experts, chosen = fields.integer("num_experts", SIZE, 1), _chosen(fields, layers)
    if chosen > experts:
        raise fields.error(f"moe_topk is {chosen}; there are {experts} experts")
    return {
        **_read_hunyuan(fields, common),
        "num_experts": experts,
        "moe_router_topk": chosen,
        "moe_ffn_hidden_size": width,
        "moe_shared_expert_intermediate_size": width,
    }


def _chosen(fields: JsonFields, layers: int) -> int:
    """Experts per token: a number, 1 by default, or a list of it for each layer."""
    value: Any = fields.take("num_experts_per_tok", (int, list), 1)
    if isinstance(value, list):
        if not value or type(value[0]) is not int or value != value[:1] * layers or not SIZE.holds(value[0]):
            raise fields.error(f"moe_topk is {value}; only one number for all {layers} layers is supported")
        return int(value[0])
    return fields.integer("num_experts_per_tok", SIZE, 1)


def _write_hunyuan_moe(model: ModelConfig) -> dict[str, Any]:
    return {
        **_write_hunyuan(model),
        "intermediate_size": model.moe_ffn_dim,
        "num_experts": model.num_experts,
        "moe_topk": model.moe_router_topk,
    }


HUNYUAN = Family(
    "hunyuan_v1_dense",
    "HunYuanDenseV1ForCausalLM",
    _read_hunyuan,
    _write_hunyuan,
    epsilon=1e-5,
    norms=_NORMS,
    scales_by_alpha=True,
)
HUNYUAN_MOE = Family(
    "hunyuan_v1_moe",
    "HunYuanMoEV1ForCausalLM",
    _read_hunyuan_moe,
    _write_hunyuan_moe,
    epsilon=1e-5,
    fields={"num_experts_per_tok": "moe_topk"},
    norms=_NORMS,
    scales_by_alpha=True,
    experts=ExpertNames(
        router="gate.wg",
        shared="mlp.shared_mlp",
        in_memory=IN_MEMORY | {"router": "gate.wg"},
    ),
)
