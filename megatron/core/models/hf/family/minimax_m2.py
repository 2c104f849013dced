"""MiniMax-M2: a sigmoid of each expert's logit and a bias of the choice, and norms over the queries and keys of all
heads."""

from __future__ import annotations

from typing import Any

from megatron.config.interval import AT_LEAST_ONE
from megatron.config.model import ModelConfig
from megatron.config.moe import SIGMOID
from megatron.core.models.hf.config_json import JsonFields
from megatron.core.models.hf.family.experts import read_experts
from megatron.core.models.hf.family.family import ExpertNames, Family
from megatron.core.models.hf.rotary import rotary_share


def _read_minimax_m2(fields: JsonFields, common: dict[str, Any]) -> dict[str, Any]:
    """intermediate_size is the width of an expert. The publisher's files have further fields, with one value each."""
    layers = common["num_layers"]
    fields.only("attn_type_list", [1] * layers)
    fields.only("qk_norm_type", "per_layer")
    fields.only("use_qk_norm", True)
    fields.only("use_routing_bias", True)
    fields.only("scoring_func", SIGMOID)
    fields.only("shared_intermediate_size", 0)
    fields.only("router_jitter_noise", 0.0)
    for name in ("use_mtp", "num_mtp_modules", "mtp_transformer_layers"):  # their files hold no such weights
        fields.take(name, (bool, int), None)
    return {
        **read_experts(fields, number=256, topk=8),
        **_read_rotated_channels(fields, common),
        "qk_layernorm": True,
        "qk_layernorm_across_heads": True,
        "moe_router_score_function": SIGMOID,
        "moe_router_enable_expert_bias": True,
        "moe_router_topk_normalization": "on",
    }


def _read_rotated_channels(fields: JsonFields, common: dict[str, Any]) -> dict[str, Any]:
    """rotary_dim says the same as partial_rotary_factor."""
    rotated = fields.optional_integer("rotary_dim", AT_LEAST_ONE)
    if rotated is None:
        return {}
    head_dim = common["kv_channels"]
    share = rotary_share(rotated, head_dim)
    if common["rotary_percent"] not in (1.0, rotated / head_dim, share):
        raise fields.error(f"rotary_dim is {rotated} of {head_dim}, and partial_rotary_factor says otherwise")
    return {"rotary_percent": share}


def _write_minimax_m2(model: ModelConfig) -> dict[str, Any]:
    return {
        "intermediate_size": model.moe_ffn_dim,
        "num_local_experts": model.num_experts,
        "num_experts_per_tok": model.moe_router_topk,
        "rotary_dim": model.rotary_dim,
    }


MINIMAX_M2 = Family(
    "minimax_m2",
    "MiniMaxM2ForCausalLM",
    _read_minimax_m2,
    _write_minimax_m2,
    groups=8,
    head_dim=128,
    theta=5e6,
    percent=1.0,
    experts=ExpertNames("block_sparse_moe", ("w1", "w3", "w2"), choice_bias="e_score_correction_bias"),
)
