"""GLM-4.5 to GLM-4.7: a sigmoid of each expert's logit and a bias of the choice, a shared expert, dense first
layers."""

from __future__ import annotations

from typing import Any

from megatron.config.interval import AT_LEAST_ONE, COUNT_OR_NONE, POSITIVE, SIZE
from megatron.config.model import ModelConfig
from megatron.config.moe import SIGMOID
from megatron.core.models.hf.config_json import JsonFields
from megatron.core.models.hf.family.experts import layer_freq, read_experts
from megatron.core.models.hf.family.family import ExpertNames, Family


def _read_glm4_moe(fields: JsonFields, common: dict[str, Any]) -> dict[str, Any]:
    """The weights of its layers for several-token prediction are no part of the model, here as in transformers."""
    fields.integer("num_nextn_predict_layers", COUNT_OR_NONE, 1)
    dense, layers = fields.integer("first_k_dense_replace", COUNT_OR_NONE, 1), common["num_layers"]
    if dense >= layers:
        raise fields.error(f"first_k_dense_replace is {dense}, and there are {layers} layers: none has experts")
    width = fields.integer("moe_intermediate_size", SIZE, 1408)
    shared = fields.integer("n_shared_experts", SIZE, 1)
    return {
        **read_experts(fields, number=128, topk=8, names=("n_routed_experts",)),
        "add_qkv_bias": fields.take("attention_bias", bool, False),
        "qk_layernorm": fields.take("use_qk_norm", bool, False),
        "moe_ffn_hidden_size": width,
        "moe_shared_expert_intermediate_size": shared * width,
        "moe_layer_freq": layer_freq([layer >= dense for layer in range(layers)]),
        "moe_router_score_function": SIGMOID,
        "moe_router_enable_expert_bias": True,
        "moe_router_topk_normalization": "on" if fields.take("norm_topk_prob", bool, True) else "off",
        "moe_router_topk_scaling_factor": fields.number("routed_scaling_factor", POSITIVE, 1.0),
        **_read_groups(fields),
    }


def _read_groups(fields: JsonFields) -> dict[str, Any]:
    """A group's score is the sum of its best two experts."""
    groups, chosen = fields.integer("n_group", AT_LEAST_ONE, 1), fields.integer("topk_group", AT_LEAST_ONE, 1)
    topk = fields.integer("num_experts_per_tok", SIZE, 8)
    if groups > 1 and topk // chosen != 2:
        raise fields.error(
            f"n_group is {groups}, and num_experts_per_tok {topk} / topk_group {chosen} is not 2: transformers scores "
            "a group by its best two experts, and a run by the best of that many"
        )
    return {} if groups == 1 else {"moe_router_num_groups": groups, "moe_router_group_topk": chosen}


def _write_glm4_moe(model: ModelConfig) -> dict[str, Any]:
    shared = model.moe_shared_expert_intermediate_size or 0
    return {
        "attention_bias": model.qkv_bias,
        "use_qk_norm": model.qk_layernorm,
        "n_routed_experts": model.num_experts,
        "num_experts_per_tok": model.moe_router_topk,
        "moe_intermediate_size": model.moe_ffn_dim,
        "n_shared_experts": shared // model.moe_ffn_dim,
        "first_k_dense_replace": model.moe_layers.index(True),
        "norm_topk_prob": model.normalizes_topk,
        "routed_scaling_factor": model.moe_router_topk_scaling_factor or 1.0,
        "n_group": model.moe_router_num_groups or 1,
        "topk_group": model.moe_router_group_topk or 1,
        "num_nextn_predict_layers": 0,
    }


GLM4_MOE = Family(
    "glm4_moe",
    "Glm4MoeForCausalLM",
    _read_glm4_moe,
    _write_glm4_moe,
    groups=8,
    percent=0.5,
    epsilon=1e-5,
    experts=ExpertNames(shared="shared_experts"),
)
