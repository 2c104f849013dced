"""Published model shapes by name, as the flags that make them. `--preset NAME` sets them; explicit flags win."""

from __future__ import annotations

import math
from typing import Any

from megatron.base.errors import ConfigError

_LLAMA: dict[str, Any] = {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "norm_epsilon": 1e-5,
}


def _llama(
    layers: int, hidden: int, heads: int, ffn: int, *, kv_heads: int | None = None, context: int, **settings: Any
) -> dict[str, Any]:
    shape = {
        "num_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "ffn_hidden_size": ffn,
        "max_position_embeddings": context,
    }
    groups = {"group_query_attention": True, "num_query_groups": kv_heads} if kv_heads else {}
    return {**_LLAMA, **shape, **groups, **settings}


def _llama3(layers: int, hidden: int, heads: int, ffn: int, kv_heads: int = 8, **settings: Any) -> dict[str, Any]:
    fields = {"kv_heads": kv_heads, "context": 8192, "rotary_base": 500000.0, "vocab_size": 128256, **settings}
    return _llama(layers, hidden, heads, ffn, **fields)


_LLAMA31: dict[str, Any] = {"context": 131072, "use_rope_scaling": True, "rope_scaling_factor": 8.0}
_LLAMA32: dict[str, Any] = {
    "context": 131072,
    "use_rope_scaling": True,
    "rope_scaling_factor": 32.0,
    "untie_embeddings_and_output_weights": False,
}


def _moe(experts: int, topk: int, width: int | None = None, **settings: Any) -> dict[str, Any]:
    """The fields of experts; `width` where it is not the MLP's."""
    expert_width = {} if width is None else {"moe_ffn_hidden_size": width}
    return {"num_experts": experts, "moe_router_topk": topk, **expert_width, **settings}


def _mixtral(layers: int, hidden: int, heads: int, ffn: int, **settings: Any) -> dict[str, Any]:
    return _llama(layers, hidden, heads, ffn, kv_heads=8, rotary_base=1e6, **_moe(8, 2), **settings)


def _qwen_moe(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, **settings: Any) -> dict[str, Any]:
    """`ffn`: width of a dense layer, of which the published models have none."""
    fields = {"kv_heads": kv_heads, "rotary_base": 1e6, "norm_epsilon": 1e-6, "vocab_size": 151936, **settings}
    return _llama(layers, hidden, heads, ffn, **fields)


def _latents(
    layers: int, hidden: int, heads: int, ffn: int, *, queries: int | None, dense: int = 1, **settings: Any
) -> dict[str, Any]:
    """Latent attention, and experts behind `dense` layers of width `ffn`. queries: width of their latents."""
    fields = {
        "multi_latent_attention": True,
        "q_lora_rank": queries,
        "kv_lora_rank": 512,
        "qk_layernorm": True,
        "latent_norm_epsilon": 1e-6,
        "norm_epsilon": 1e-6,
        "moe_layer_freq": f"[0]*{dense}+[1]*{layers - dense}",
    }
    return _llama(layers, hidden, heads, ffn, **{**fields, **settings})


def _deepseek_yarn(mscale: float, factor: float = 40.0, context: int = 163840) -> dict[str, Any]:
    """YaRN from 4,096 tokens."""
    return {
        "position_embedding_type": "yarn",
        "rope_scaling_factor": factor,
        "rope_scaling_original_max_position_embeddings": 4096,
        "mscale": mscale,
        "mscale_all_dim": mscale,
        "context": context,
    }


def _sigmoid(scale: float, shared: int, groups: int | None = None, chosen: int | None = None) -> dict[str, Any]:
    """DeepSeek-V3's choice of experts. shared: width of the shared ones."""
    return {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_topk_scaling_factor": scale,
        "moe_router_num_groups": groups,
        "moe_router_group_topk": chosen,
        "moe_shared_expert_intermediate_size": shared,
    }


def _gpt_oss(layers: int, experts: int) -> dict[str, Any]:
    """Biases everywhere, sinks, a clamped gate, and windows in every other layer from the first on."""
    return _llama(
        layers,
        2880,
        64,
        2880,
        kv_heads=8,
        context=131072,
        kv_channels=64,
        add_bias_linear=True,
        swiglu=False,
        quick_geglu=True,
        glu_linear_offset=1.0,
        activation_func_clamp_value=7.0,
        softmax_type="learnable",
        window_size="127,0",
        window_attn_skip_freq="2",
        position_embedding_type="yarn",
        rotary_base=150000.0,
        rope_scaling_factor=32.0,
        rope_scaling_original_max_position_embeddings=4096,
        yarn_correction_range_round_to_int=False,
        vocab_size=201088,
        **_moe(experts, 4),
    )


def _gemma(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, **settings: Any) -> dict[str, Any]:
    """Norms on both sides of attention and MLP, a gated GELU, multiplied embeddings."""
    fields = {
        "swiglu": False,
        "geglu": True,
        "openai_gelu": True,
        "apply_layernorm_1p": True,
        "post_norm": True,
        "norm_epsilon": 1e-6,
        "kv_channels": 256,
        "embedding_multiplier_scale": math.sqrt(hidden),
        "untie_embeddings_and_output_weights": False,
    }
    return _llama(layers, hidden, heads, ffn, kv_heads=kv_heads, **{**fields, **settings})


def _gemma2(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, **settings: Any) -> dict[str, Any]:
    fields = {
        "context": 8192,
        "vocab_size": 256000,
        "softmax_scale": 256**-0.5,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "window_size": "4095,0",
        "window_attn_skip_freq": f"[1,0]*{layers // 2}",
    }
    return _gemma(layers, hidden, heads, kv_heads, ffn, **{**fields, **settings})


def _delta_nets(layers: int, hidden: int, kv_heads: int, ffn: int, **settings: Any) -> dict[str, Any]:
    """Qwen3-Next and Qwen3.5: a gated delta net in three layers of four, of the sizes that the flags have by default."""
    fields = {
        "kv_heads": kv_heads,
        "context": 262144,
        "rotary_base": 1e7,
        "rotary_percent": 0.25,
        "norm_epsilon": 1e-6,
        "apply_layernorm_1p": True,
        "kv_channels": 256,
        "qk_layernorm": True,
        "attention_output_gate": True,
        "experimental_attention_variant": "gdn",
        "linear_attention_freq": "4",
        "vocab_size": 248320,
    }
    return _llama(layers, hidden, 16, ffn, **{**fields, **settings})


_SHARED_512: dict[str, Any] = {"moe_shared_expert_intermediate_size": 512, "moe_shared_expert_gate": True}
_QWEN2_MOE: dict[str, Any] = {
    "add_qkv_bias": True,
    "moe_router_pre_softmax": True,
    "moe_shared_expert_gate": True,
}
_QWEN3_MOE: dict[str, Any] = {"qk_layernorm": True, "kv_channels": 128, "context": 40960}

PRESETS: dict[str, dict[str, Any]] = {
    "llama-tiny": _llama(6, 320, 8, 896, kv_heads=4, context=2048),
    "llama2-7b": _llama(32, 4096, 32, 11008, context=4096, vocab_size=32000),
    "llama2-13b": _llama(40, 5120, 40, 13824, context=4096, vocab_size=32000),
    "llama2-70b": _llama(80, 8192, 64, 28672, kv_heads=8, context=4096, vocab_size=32000),
    "llama3-8b": _llama3(32, 4096, 32, 14336),
    "llama3-70b": _llama3(80, 8192, 64, 28672),
    "llama3.1-8b": _llama3(32, 4096, 32, 14336, **_LLAMA31),
    "llama3.1-70b": _llama3(80, 8192, 64, 28672, **_LLAMA31),
    "llama3.1-405b": _llama3(126, 16384, 128, 53248, **_LLAMA31),
    "llama3.2-1b": _llama3(16, 2048, 32, 8192, **_LLAMA32),
    "llama3.2-3b": _llama3(28, 3072, 24, 8192, **_LLAMA32),
    "moe-tiny": _llama(4, 256, 8, 704, kv_heads=4, context=2048, **_moe(8, 2, 320)),
    "mixtral-8x7b": _mixtral(32, 4096, 32, 14336, context=32768, vocab_size=32000),
    "mixtral-8x22b": _mixtral(56, 6144, 48, 16384, context=65536, vocab_size=32000),
    "qwen1.5-moe-a2.7b": _qwen_moe(
        24,
        2048,
        16,
        16,
        5632,
        context=8192,
        **_moe(60, 4, 1408, moe_shared_expert_intermediate_size=5632, **_QWEN2_MOE),
    ),
    "qwen2-57b-a14b": _qwen_moe(
        28,
        3584,
        28,
        4,
        18944,
        context=131072,
        **_moe(64, 8, 2560, moe_shared_expert_intermediate_size=20480, **_QWEN2_MOE),
    ),
    "qwen3-30b-a3b": _qwen_moe(48, 2048, 32, 4, 6144, **_moe(128, 8, 768, **_QWEN3_MOE)),
    "qwen3-235b-a22b": _qwen_moe(94, 4096, 64, 4, 12288, **_moe(128, 8, 1536, **_QWEN3_MOE)),
    "qwen3-next-80b-a3b": _delta_nets(48, 2048, 2, 5632, vocab_size=151936, **_moe(512, 10, 512, **_SHARED_512)),
    "qwen3.5-9b": _delta_nets(32, 4096, 4, 12288),
    "qwen3.5-35b-a3b": _delta_nets(40, 2048, 2, 512, **_moe(256, 8, 512, **_SHARED_512)),
    "deepseek-v2-lite": _latents(
        27,
        2048,
        16,
        10944,
        queries=None,
        vocab_size=102400,
        **_deepseek_yarn(0.707),
        **_moe(64, 6, 1408, moe_router_pre_softmax=True, moe_shared_expert_intermediate_size=2816),
    ),
    "deepseek-v2": _latents(
        60,
        5120,
        128,
        12288,
        queries=1536,
        vocab_size=102400,
        **_deepseek_yarn(0.707),
        **_moe(
            160,
            6,
            1536,
            moe_router_pre_softmax=True,
            moe_router_topk_scaling_factor=16.0,
            moe_router_num_groups=8,
            moe_router_group_topk=3,
            moe_router_group_score="max",
            moe_shared_expert_intermediate_size=3072,
        ),
    ),
    "deepseek-v3": _latents(
        61,
        7168,
        128,
        18432,
        queries=1536,
        dense=3,
        vocab_size=129280,
        **_deepseek_yarn(1.0),
        **_moe(256, 8, 2048, **_sigmoid(2.5, 2048, 8, 4)),
    ),
    "moonlight-16b-a3b": _latents(
        27,
        2048,
        16,
        11264,
        queries=None,
        context=8192,
        rotary_base=50000.0,
        norm_epsilon=1e-5,
        vocab_size=163840,
        **_moe(64, 6, 1408, **_sigmoid(2.446, 2816)),
    ),
    "kimi-k2": _latents(
        61,
        7168,
        64,
        18432,
        queries=1536,
        rotary_base=50000.0,
        vocab_size=163840,
        yarn_beta_fast=1.0,
        **_deepseek_yarn(1.0, 32.0, 131072),
        **_moe(384, 8, 2048, **_sigmoid(2.827, 2048)),
    ),
    "glm-4.7-flash": _latents(
        47,
        2048,
        20,
        10240,
        queries=768,
        context=202752,
        rotary_base=1e6,
        norm_epsilon=1e-5,
        qk_head_dim=192,
        v_head_dim=256,
        vocab_size=154880,
        **_moe(64, 4, 1536, **_sigmoid(1.8, 1536)),
    ),
    "glm-4.5-air": _llama(
        46,
        4096,
        96,
        10944,
        kv_heads=8,
        context=131072,
        kv_channels=128,
        rotary_base=1e6,
        rotary_percent=0.5,
        add_qkv_bias=True,
        vocab_size=151552,
        moe_layer_freq="[0]+[1]*45",
        **_moe(128, 8, 1408, **_sigmoid(1.0, 1408)),
    ),
    "minimax-m2": _llama(
        62,
        3072,
        48,
        1536,
        kv_heads=8,
        context=196608,
        kv_channels=128,
        norm_epsilon=1e-6,
        rotary_base=5e6,
        rotary_percent=0.5,
        qk_layernorm=True,
        qk_layernorm_across_heads=True,
        vocab_size=200064,
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        **_moe(256, 8),
    ),
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
    "gemma2-2b": _gemma2(26, 2304, 8, 4, 9216),
    "gemma2-9b": _gemma2(42, 3584, 16, 8, 14336),
    "gemma2-27b": _gemma2(46, 4608, 32, 16, 36864, kv_channels=128, softmax_scale=144**-0.5),
    "gemma3-1b": _gemma(
        26,
        1152,
        4,
        1,
        6912,
        context=32768,
        vocab_size=262144,
        qk_layernorm=True,
        rotary_base=1e6,
        rotary_base_local=1e4,
        window_size="511,0",
        window_attn_skip_freq="([1]*5+[0])*4+[1]*2",
    ),
    "olmoe-1b-7b": _llama(
        16,
        2048,
        16,
        1024,
        context=4096,
        vocab_size=50304,
        qk_layernorm=True,
        qk_layernorm_across_heads=True,
        **_moe(64, 8, moe_router_pre_softmax=True),
    ),
}


def preset(name: str) -> dict[str, Any]:
    """Fields of ModelConfig for a published model. Raises ConfigError with the known names."""
    if name not in PRESETS:
        raise ConfigError(f"--preset {name} is not known; choose one of {', '.join(PRESETS)}")
    return dict(PRESETS[name])
