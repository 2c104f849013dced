"""Layers of DeepSeek's kind in config.json: the first ones dense, the others with routed and shared experts. GLM took
them over, and their names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron.config.interval import AT_LEAST_ONE, COUNT_OR_NONE, POSITIVE, SIZE
from megatron.config.model import ModelConfig
from megatron.config.moe import SIGMOID
from megatron.core.models.hf.config_json import JsonFields
from megatron.core.models.hf.family.experts import layer_freq, read_experts, read_layers_with_experts


@dataclass(frozen=True)
class ExpertDefaults:
    """n_routed_experts, num_experts_per_tok, moe_intermediate_size, first_k_dense_replace, n_shared_experts,
    routed_scaling_factor, n_group, topk_group and norm_topk_prob of a config.json without these fields."""

    experts: int
    topk: int
    width: int
    dense: int
    shared: int = 1
    scale: float = 1.0
    groups: int = 1
    chosen_groups: int = 1
    normalizes: bool = True


def read_shared_and_routed(
    fields: JsonFields, layers: int, defaults: ExpertDefaults, *, lists_layers: bool = False
) -> dict[str, Any]:
    """Returns the flags of the layers with experts and of the experts' sizes.

    lists_layers: the file may say of each layer whether it has experts, and then the number of those without does not
    count. The file says how many layers predict further tokens, also of folders that hold none: see HFSource.
    """
    fields.integer("num_nextn_predict_layers", COUNT_OR_NONE, 1)
    dense = fields.integer("first_k_dense_replace", COUNT_OR_NONE, defaults.dense)
    has_experts = [layer >= dense for layer in range(layers)]
    if lists_layers and fields.take("mlp_layer_types", list, None) is not None:
        has_experts = read_layers_with_experts(fields, has_experts)
    elif dense >= layers:
        raise fields.error(f"first_k_dense_replace is {dense}, and there are {layers} layers: none has experts")
    width = fields.integer("moe_intermediate_size", SIZE, defaults.width)
    shared = fields.integer("n_shared_experts", SIZE, defaults.shared)
    return {
        **read_experts(fields, number=defaults.experts, topk=defaults.topk, names=("n_routed_experts",)),
        "moe_ffn_hidden_size": width,
        "moe_shared_expert_intermediate_size": shared * width,
        "moe_layer_freq": layer_freq(has_experts),
        "moe_router_topk_scaling_factor": fields.number("routed_scaling_factor", POSITIVE, defaults.scale),
    }


def write_shared_and_routed(model: ModelConfig) -> dict[str, Any]:
    """The fields that `read_shared_and_routed` reads."""
    shared = model.moe_shared_expert_intermediate_size or 0
    return {
        "n_routed_experts": model.num_experts,
        "num_experts_per_tok": model.moe_router_topk,
        "moe_intermediate_size": model.moe_ffn_dim,
        "n_shared_experts": shared // model.moe_ffn_dim,
        "first_k_dense_replace": model.moe_layers.index(True),
        "routed_scaling_factor": model.moe_router_topk_scaling_factor or 1.0,
        "num_nextn_predict_layers": model.mtp_num_layers,
    }


def read_sigmoid_choice(fields: JsonFields, defaults: ExpertDefaults) -> dict[str, Any]:
    """Returns the flags of a choice by the sigmoid of each expert's logit and a bias, within the best groups of
    experts. A group's score is the sum of its best two experts."""
    flags = {
        "moe_router_score_function": SIGMOID,
        "moe_router_enable_expert_bias": True,
        "moe_router_topk_normalization": "on" if fields.take("norm_topk_prob", bool, defaults.normalizes) else "off",
    }
    groups = fields.integer("n_group", AT_LEAST_ONE, defaults.groups)
    chosen = fields.integer("topk_group", AT_LEAST_ONE, defaults.chosen_groups)
    topk = fields.integer("num_experts_per_tok", SIZE, defaults.topk)
    if groups > 1 and topk // chosen != 2:
        raise fields.error(
            f"n_group is {groups}, and num_experts_per_tok {topk} / topk_group {chosen} is not 2: transformers scores "
            "a group by its best two experts, and a run by the best of that many"
        )
    return flags | ({} if groups == 1 else {"moe_router_num_groups": groups, "moe_router_group_topk": chosen})


def write_sigmoid_choice(model: ModelConfig) -> dict[str, Any]:
    """The fields that `read_sigmoid_choice` reads."""
    return {
        "norm_topk_prob": model.normalizes_topk,
        "n_group": model.moe_router_num_groups or 1,
        "topk_group": model.moe_router_group_topk or 1,
    }
