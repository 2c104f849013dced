"""Latent attention with shared and routed experts: DeepSeek-V2 and -V3, Moonlight and Kimi-K2, GLM-4.7-Flash."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from megatron.config.interval import AT_LEAST_ONE, NOT_NEGATIVE, SIZE
from megatron.config.model import ModelConfig
from megatron.core.models.hf.config_json import JsonFields
from megatron.core.models.hf.family.experts import mlp_layer_types
from megatron.core.models.hf.family.family import PRE_NORMS, ExpertNames, Family
from megatron.core.models.hf.family.shared_experts import (
    ExpertDefaults,
    read_shared_and_routed,
    read_sigmoid_choice,
    write_shared_and_routed,
    write_sigmoid_choice,
)
from megatron.core.models.hf.rotary import latent_yarn, write_latent_yarn

V2 = ExpertDefaults(experts=64, topk=6, width=1407, dense=0, shared=2)
V3 = ExpertDefaults(experts=256, topk=8, width=2048, dense=3, scale=2.5, groups=8, chosen_groups=4)
GLM_FLASH = ExpertDefaults(experts=64, topk=4, width=1536, dense=1, scale=1.8)
# The norms of latents have the default epsilon of transformers' class, whatever rms_norm_eps is.
_EPSILON = 1e-6


def read_latents(
    fields: JsonFields, common: dict[str, Any], queries: int | None, sizes: tuple[int, int, int]
) -> dict[str, Any]:
    """Returns the flags of latent attention.

    queries, sizes: q_lora_rank; qk_nope_head_dim, qk_rope_head_dim and v_head_dim of a file without them.
    """
    heads, groups = common["num_attention_heads"], common["num_query_groups"]
    if groups is not None:
        raise fields.error(f"num_key_value_heads is {groups}; latents are projected to one for each of {heads} heads")
    fields.only("attention_bias", False)
    fields.only("rope_interleave", True)
    plain, rotated, values = (
        fields.integer(name, SIZE, size)
        for name, size in zip(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), sizes, strict=True)
    )
    if rotated % 2:
        raise fields.error(f"qk_rope_head_dim is {rotated}; channels are rotated in pairs")
    fields.integer("qk_head_dim", AT_LEAST_ONE, plain + rotated)  # transformers derives it
    rank = fields.optional_integer("q_lora_rank", SIZE)
    return {
        "multi_latent_attention": True,
        "q_lora_rank": queries if rank is None and not fields.has("q_lora_rank") else rank,
        "kv_lora_rank": fields.integer("kv_lora_rank", SIZE, 512),
        "qk_head_dim": plain,
        "qk_pos_emb_head_dim": rotated,
        "v_head_dim": values,
        "qk_layernorm": True,
        "latent_norm_epsilon": _EPSILON,
        "kv_channels": None,
        **latent_yarn(fields),
    }


def write_latents(model: ModelConfig) -> dict[str, Any]:
    """The fields that `read_latents` reads."""
    return {
        "q_lora_rank": model.q_lora_rank,
        "kv_lora_rank": model.kv_lora_rank,
        "qk_nope_head_dim": model.qk_head_dim,
        "qk_rope_head_dim": model.qk_pos_emb_head_dim,
        "v_head_dim": model.v_head_dim,
        "head_dim": model.qk_pos_emb_head_dim,
        "attention_bias": False,
        **write_latent_yarn(model),
    }


def read_published(fields: JsonFields, method: str) -> None:
    """Takes the fields of published files that transformers does not read, or that say what the family does anyway."""
    fields.only("moe_layer_freq", 1)
    fields.only("topk_method", method)
    for name in ("aux_loss_alpha", "seq_aux", "ep_size"):  # balance is a setting of each run here
        fields.has(name)


def _read_v3(fields: JsonFields, common: dict[str, Any]) -> dict[str, Any]:
    read_published(fields, "noaux_tc")
    fields.only("scoring_func", "sigmoid")
    return {
        **read_latents(fields, common, 1536, (128, 64, 128)),
        **read_shared_and_routed(fields, common["num_layers"], V3),
        **read_sigmoid_choice(fields, V3),
    }


def _write_v3(model: ModelConfig) -> dict[str, Any]:
    published = {"moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
    return write_latents(model) | write_shared_and_routed(model) | write_sigmoid_choice(model) | published


def _read_v2(fields: JsonFields, common: dict[str, Any]) -> dict[str, Any]:
    """The softmax over all experts weighs those that are chosen, whatever norm_topk_prob is."""
    method = fields.take("topk_method", str, "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise fields.error(f"topk_method is {method!r}; greedy and group_limited_greedy are supported")
    read_published(fields, method)
    fields.only("scoring_func", "softmax")
    fields.only("mlp_bias", False)
    fields.take("norm_topk_prob", bool, False)
    groups, chosen = (fields.optional_integer(name, AT_LEAST_ONE) for name in ("n_group", "topk_group"))
    flags: dict[str, Any] = {"moe_router_pre_softmax": True}
    if method == "group_limited_greedy" and (groups or 1) > 1:
        flags |= {
            "moe_router_num_groups": groups,
            "moe_router_group_topk": chosen or 1,
            "moe_router_group_score": "max",
        }
    return {
        **read_latents(fields, common, 1536, (128, 64, 128)),
        **read_shared_and_routed(fields, common["num_layers"], V2),
        **flags,
    }


def _write_v2(model: ModelConfig) -> dict[str, Any]:
    groups = model.moe_router_num_groups or 1
    return {
        **write_latents(model),
        **write_shared_and_routed(model),
        "moe_layer_freq": 1,
        "scoring_func": "softmax",
        "norm_topk_prob": False,
        "topk_method": "greedy" if groups == 1 else "group_limited_greedy",
        "n_group": groups,
        "topk_group": model.moe_router_group_topk or 1,
    }


def _read_youtu(fields: JsonFields, common: dict[str, Any]) -> dict[str, Any]:
    """Without initializer_range it follows from the width."""
    fields.optional_number("embedding_initializer_range", NOT_NEGATIVE)
    fields.only("mlp_bias", False)
    std = {} if fields.has("initializer_range") else {"init_method_std": 2.0 / math.sqrt(5.0 * common["hidden_size"])}
    return {**read_latents(fields, common, 1536, (128, 64, 128)), **std}


def _write_youtu(model: ModelConfig) -> dict[str, Any]:
    return write_latents(model)


def _read_glm_flash(fields: JsonFields, common: dict[str, Any]) -> dict[str, Any]:
    read_published(fields, "noaux_tc")
    return {
        **read_latents(fields, common, 768, (192, 64, 256)),
        **read_shared_and_routed(fields, common["num_layers"], GLM_FLASH, lists_layers=True),
        **read_sigmoid_choice(fields, GLM_FLASH),
    }


def _write_glm_flash(model: ModelConfig) -> dict[str, Any]:
    experts = {**write_shared_and_routed(model), **write_sigmoid_choice(model)}
    return {**write_latents(model), **experts, "mlp_layer_types": mlp_layer_types(model)}


LATENT_NORMS = {
    **PRE_NORMS,
    "self_attention.q_layernorm": "self_attn.q_a_layernorm",
    "self_attention.kv_layernorm": "self_attn.kv_a_layernorm",
}
SHARED_EXPERTS = ExpertNames(shared="mlp.shared_experts")
DEEPSEEK_V2 = Family(
    "deepseek_v2", "DeepseekV2ForCausalLM", _read_v2, _write_v2, head_dim=64, norms=LATENT_NORMS, experts=SHARED_EXPERTS
)
DEEPSEEK_V3 = Family(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    _read_v3,
    _write_v3,
    head_dim=64,
    norms=LATENT_NORMS,
    experts=SHARED_EXPERTS,
    predicts=True,
)
YOUTU = Family("youtu", "YoutuForCausalLM", _read_youtu, _write_youtu, head_dim=64, norms=LATENT_NORMS, tied=True)
KIMI_K2 = dataclasses.replace(DEEPSEEK_V3, model_type="kimi_k2")
GLM4_MOE_LITE = Family(
    "glm4_moe_lite",
    "Glm4MoeLiteForCausalLM",
    _read_glm_flash,
    _write_glm_flash,
    head_dim=64,
    epsilon=1e-5,
    norms=LATENT_NORMS,
    experts=SHARED_EXPERTS,
    predicts=True,
)
