"""What a random config.json of families with latent attention, gated delta nets or a choice of experts by sigmoids has
besides the fields of all families. See hf_configs.py."""

from __future__ import annotations

import random
from typing import Any

from tests.fuzz.hf_fields import LAYER_KINDS, Draw, Fields, exaone4, flags, hunyuan, shared_and_routed, wide

# Each head of queries has its own of keys. Kimi-K2, which transformers does not know by name, is DeepSeek-V3.
LATENT = ("youtu", "mistral4", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "deepseek_v32", "glm_moe_dsa")
DELTA_KINDS = ("linear_attention", "full_attention")


def _latents(rng: random.Random, layers: int, *, groups: bool = True) -> Fields:
    """Latent attention, and the experts of DeepSeek's kind."""
    return {
        **{"n_group": 1, "topk_group": 1},
        **shared_and_routed(rng, groups=groups),
        "attention_bias": False,
        "q_lora_rank": rng.choice((None, 3, 20)),
        "kv_lora_rank": 2 * rng.randint(1, 10),
        "qk_nope_head_dim": 2 * rng.randint(1, 4),
        "qk_rope_head_dim": rng.choice((4, 8)),
        "v_head_dim": rng.randint(1, 9),
        **rng.choice(({}, {"rope_interleave": True})),
        "first_k_dense_replace": rng.randint(0, layers - 1),
        "num_nextn_predict_layers": 0,
    }


def _layer_types(rng: random.Random, layers: int) -> Fields:
    kinds = ["sparse" if rng.random() < 0.6 else "dense" for _ in range(layers)]
    kinds[rng.randrange(layers)] = "sparse"
    return {"mlp_layer_types": kinds, "first_k_dense_replace": 0}


def _indexed(rng: random.Random, layers: int) -> Fields:
    """Of an indexer that chooses all keys, which is the model that is read."""
    return {
        **_latents(rng, layers),
        "q_lora_rank": rng.choice((3, 20)),
        "index_topk": rng.choice((24, 80)),
        "index_n_heads": rng.randint(1, 3),
        "index_head_dim": rng.choice((8, 12)),
    }


def _deepseek_v2(rng: random.Random, layers: int) -> Fields:
    fields = _latents(rng, layers, groups=False)
    fields.pop("norm_topk_prob", None)
    if rng.random() < 0.5:
        return fields | rng.choice(({}, {"topk_method": "greedy"}))
    return fields | {
        "topk_method": "group_limited_greedy",
        "n_routed_experts": 8,
        "n_group": rng.choice((2, 4)),
        "topk_group": 2,
        "num_experts_per_tok": rng.randint(1, 4),
    }


def _delta(rng: random.Random, layers: int) -> Fields:
    """Layers of both kinds, which need two of them."""
    layers = max(2, layers)
    kinds = [*DELTA_KINDS, *(rng.choice(DELTA_KINDS) for _ in range(layers - 2))]
    rng.shuffle(kinds)
    keys = rng.randint(1, 3)
    return {
        **wide(rng, 16, 24),
        **flags(rng, "attention_bias"),
        "num_hidden_layers": layers,
        "layer_types": kinds,
        "linear_conv_kernel_dim": rng.randint(1, 5),
        "linear_key_head_dim": rng.choice((2, 5, 8)),
        "linear_value_head_dim": rng.choice((2, 7, 8)),
        "linear_num_key_heads": keys,
        "linear_num_value_heads": keys * rng.randint(1, 3),
    }


def _delta_experts(rng: random.Random, layers: int, **changes: Any) -> Fields:
    experts = rng.randint(1, 7)
    return {
        **_delta(rng, layers),
        "num_experts": experts,
        "num_experts_per_tok": rng.randint(1, min(experts, 4)),
        "moe_intermediate_size": rng.randint(1, 20),
        "shared_expert_intermediate_size": rng.randint(1, 20),
        **changes,
    }


def _minimax_m2(rng: random.Random) -> Fields:
    experts = rng.randint(1, 7)
    head_dim = rng.choice((4, 8, 16))
    return {
        "head_dim": head_dim,
        "num_local_experts": experts,
        "num_experts_per_tok": rng.randint(1, min(experts, 4)),
        **rng.choice(({}, {"rotary_dim": head_dim}, {"rotary_dim": head_dim // 2})),
    }


def _shared(rng: random.Random, layers: int) -> Fields:
    """Of DeepSeek's kind, by the names of EXAONE and Hunyuan."""
    experts = rng.randint(2, 7)
    return {
        "num_experts": experts,
        "num_experts_per_tok": rng.randint(1, min(experts, 4)),
        "num_shared_experts": rng.randint(1, 3),
        "moe_intermediate_size": rng.randint(1, 20),
        **rng.choice(({}, {"mlp_layer_types": _layer_types(rng, layers)["mlp_layer_types"]})),
    }


def _exaone_moe(rng: random.Random, layers: int) -> Fields:
    """Unlike EXAONE 4.0, always with a window, if not in all layers."""
    attention = exaone4(rng, layers)
    window = attention["sliding_window"] or 5
    shape = {**wide(rng), **_shared(rng, layers), **flags(rng, "norm_topk_prob")}
    return {**shape, **attention, "sliding_window": window, "num_hidden_layers": layers}


def _ernie4_5_moe(rng: random.Random, layers: int) -> Fields:
    experts = rng.randint(1, 7)
    start = rng.randint(0, layers - 1)
    return {
        "moe_num_experts": experts,
        "moe_k": rng.randint(1, min(experts, 4)),
        "moe_num_shared_experts": rng.randint(0, 3),
        "moe_intermediate_size": rng.randint(1, 20),
        "moe_layer_start_index": start,
        **rng.choice(({}, {"moe_layer_end_index": rng.randint(start, layers)}, {"moe_layer_interval": 1})),
    }


def _hunyuan_moe(rng: random.Random, layers: int) -> Fields:
    experts = rng.randint(1, 7)
    topk = rng.randint(1, min(experts, 4))
    return hunyuan(rng) | {"num_experts": experts, "moe_topk": rng.choice((topk, [topk] * layers))}


# As DRAWS of hf_fields.py.
EXPERT_DRAWS: dict[str, Draw] = {
    "glm4_moe": lambda rng, layers, size: {
        **wide(rng, 8, 16),
        **shared_and_routed(rng),
        **flags(rng, "use_qk_norm"),
        "first_k_dense_replace": rng.randint(0, layers - 1),
        "num_nextn_predict_layers": 0,
    },
    "minimax_m2": lambda rng, layers, size: _minimax_m2(rng),
    "ernie4_5_moe": lambda rng, layers, size: _ernie4_5_moe(rng, layers),
    "exaone_moe": lambda rng, layers, size: _exaone_moe(rng, max(2, layers)),
    "hy_v3": lambda rng, layers, size: {
        **wide(rng),
        **_shared(rng, max(2, layers)),
        **flags(rng, "attention_bias"),
        "router_scaling_factor": rng.choice((1.0, 2.826)),
        "num_hidden_layers": max(2, layers),
    },
    "youtu": lambda rng, layers, size: {
        name: value
        for name, value in _latents(rng, layers).items()
        if name.endswith(("_rank", "head_dim", "interleave")) or name == "attention_bias"
    },
    "mistral4": lambda rng, layers, size: {
        name: value
        for name, value in _latents(rng, layers, groups=False).items()
        if name not in ("attention_bias", "n_group", "topk_group", "num_nextn_predict_layers")
    },
    "mellum": lambda rng, layers, size: {
        **wide(rng),
        **flags(rng, "attention_bias", "norm_topk_prob"),
        "num_local_experts": rng.randint(4, 7),
        "num_experts_per_tok": rng.randint(1, 4),
        "moe_intermediate_size": rng.randint(1, 20),
        "sliding_window": rng.choice((1, 5)),
        "layer_types": [*(rng.choice(LAYER_KINDS) for _ in range(layers - 1)), "sliding_attention"],
        **rng.choice(({}, {"mlp_layer_types": _layer_types(rng, layers)["mlp_layer_types"]})),
    },
    "deepseek_v2": lambda rng, layers, size: _deepseek_v2(rng, layers),
    "deepseek_v3": lambda rng, layers, size: _latents(rng, layers),
    "glm4_moe_lite": lambda rng, layers, size: _latents(rng, layers) | _layer_types(rng, layers),
    "deepseek_v32": lambda rng, layers, size: _indexed(rng, layers),
    "glm_moe_dsa": lambda rng, layers, size: _indexed(rng, layers) | _layer_types(rng, layers),
    "qwen3_next": lambda rng, layers, size: _delta_experts(
        rng, layers, **flags(rng, "norm_topk_prob"), **rng.choice(({}, {"mlp_only_layers": [0]}))
    ),
    "qwen3_5_text": lambda rng, layers, size: _delta(rng, layers),
    "hunyuan_v1_moe": lambda rng, layers, size: _hunyuan_moe(rng, layers),
    "qwen3_5_moe_text": lambda rng, layers, size: _delta_experts(rng, layers, intermediate_size=None),
}
