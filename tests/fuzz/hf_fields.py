"""What a random config.json of some families has besides the fields of all families. See hf_configs.py."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

Fields = dict[str, Any]
# From a random generator, the number of layers and hidden size / heads.
Draw = Callable[[random.Random, int, int], Fields]
_BIASES = ("attention_bias", "mlp_bias")
LAYER_KINDS = ("full_attention", "sliding_attention")
GELU, SQUARED_RELU = "gelu_pytorch_tanh", "relu2"


def flags(rng: random.Random, *names: str) -> Fields:
    """Each one true, false or left out."""
    return {name: rng.random() < 0.5 for name in names if rng.random() < 0.7}


def wide(rng: random.Random, *sizes: int) -> Fields:
    return {"head_dim": rng.choice(sizes or (2, 4, 6, 16))}


def _windows(rng: random.Random, layers: int, *others: Fields) -> Fields:
    """A window, and often the layers that have it; `others` are further choices."""
    kinds = [rng.choice(LAYER_KINDS) for _ in range(layers)]
    window = {"sliding_window": rng.choice((1, 2, 5, 24, 4096))}
    return rng.choice((window, {**window, "layer_types": kinds}, {**window, "layer_types": kinds}, *others))


def _renamed_epsilon(rng: random.Random, name: str) -> Fields:
    """Null takes away the field that most families have."""
    return {"rms_norm_eps": None, name: rng.choice((1e-6, 1e-5, 1e-2))}


def exaone4(rng: random.Random, layers: int) -> Fields:
    none = {"sliding_window": None, "layer_types": ["full_attention"] * layers}
    pattern = {"sliding_window": rng.choice((1, 5)), "sliding_window_pattern": rng.randint(1, 3)}
    return _windows(rng, layers, none, pattern)


def _hyperclovax(rng: random.Random) -> Fields:
    return {
        **flags(rng, "attention_bias", "mlp_bias", "use_post_norm"),
        "embedding_multiplier": rng.choice((1, 12.0, 0.3)),
        "residual_multiplier": rng.choice((1.0, 0.22, 2)),
        "logits_scaling": rng.choice((1.0, 0.125, 0.3, 7)),
        **rng.choice(({}, {"attention_multiplier": rng.choice((1.0, 0.25, None))})),
    }


def shared_and_routed(rng: random.Random, *, groups: bool = True) -> Fields:
    """Experts of DeepSeek's kind, in groups or in none."""
    number, chosen = rng.choice(((1, 1), (1, 1), (2, 1), (3, 2))) if groups else (1, 1)
    topk = 2 * chosen if number > 1 else rng.randint(1, 4)
    return {
        "n_routed_experts": number * rng.randint(4, 5),
        "num_experts_per_tok": topk,
        "n_shared_experts": rng.randint(1, 3),
        "moe_intermediate_size": rng.randint(1, 20),
        **rng.choice(
            ({}, {"n_group": number, "topk_group": chosen})
            if number == 1
            else ({"n_group": number, "topk_group": chosen},)
        ),
        **rng.choice(({}, {"routed_scaling_factor": rng.choice((1.0, 2.5))})),
        **flags(rng, "attention_bias", "norm_topk_prob"),
    }


def _dots1(rng: random.Random, layers: int) -> Fields:
    windows = _windows(rng, layers, {"sliding_window": None}, {"sliding_window": 5, "max_window_layers": 1})
    dense = rng.choice(({}, {"first_k_dense_replace": rng.randint(0, layers - 1)}))
    return shared_and_routed(rng) | windows | dense


def _flex_olmo(rng: random.Random) -> Fields:
    experts = rng.randint(1, 7)
    count = {"num_experts": experts, "num_experts_per_tok": rng.randint(1, min(experts, 4))}
    return count | flags(rng, "attention_bias", "norm_topk_prob")


def _falcon(rng: random.Random) -> Fields:
    """One after the other, attention and MLP are StarCoder2's or GPT-NeoX's, too, with some activations and biases."""
    form = rng.choice(
        (
            {"new_decoder_architecture": True, **rng.choice(({}, {"num_ln_in_parallel_attn": rng.choice((1, 2))}))},
            {"new_decoder_architecture": True, "num_kv_heads": 1},
            flags(rng, "multi_query", "bias"),
            {"parallel_attn": False},
        )
    )
    return {
        **dict.fromkeys(("num_key_value_heads", "hidden_act", "intermediate_size")),
        **_renamed_epsilon(rng, "layer_norm_epsilon"),
        **rng.choice(({}, {"ffn_hidden_size": rng.randint(1, 70)})),
        "activation": "gelu" if "parallel_attn" in form else rng.choice((GELU, "gelu", "gelu_new")),
        **form,
    }


def _granitemoe(rng: random.Random) -> Fields:
    experts = rng.randint(1, 7)
    return {
        **flags(rng, "attention_bias"),
        "num_local_experts": experts,
        "num_experts_per_tok": rng.randint(1, min(experts, 4)),
        "embedding_multiplier": rng.choice((1, 12.0, 0.3)),
        "attention_multiplier": rng.choice((1, 0.25)),
        "residual_multiplier": rng.choice((1.0, 0.22, 2)),
        "logits_scaling": rng.choice((1.0, 6, 0.7)),
    }


def _gpt_oss(rng: random.Random, layers: int) -> Fields:
    experts = rng.randint(1, 7)
    return {
        **wide(rng, 4, 6, 16),
        "num_local_experts": experts,
        "num_experts_per_tok": rng.randint(1, min(experts, 4)),
        **_windows(rng, layers, {"sliding_window": 5}),
        **rng.choice(({}, {"swiglu_limit": rng.choice((0.3, 7.0))}, {"attention_bias": True})),
    }


def hunyuan(rng: random.Random) -> Fields:
    return {
        **wide(rng, 4, 6, 16),
        **flags(rng, "attention_bias"),
        **rng.choice(({}, {"use_qk_norm": True, "use_cla": False, "cla_share_factor": 2, "norm_type": "rms"})),
    }


def with_alpha(rng: random.Random, fields: Fields) -> Fields:
    """Dynamic scalings often with the factor on the base, which then need no other one."""

    def changed(scaling: Any) -> Any:
        if not isinstance(scaling, dict) or "dynamic" not in scaling.values() or rng.random() < 0.3:
            return scaling
        return {**scaling, "alpha": rng.choice((1.0, 30.0, 1000.0)), "beta_fast": 32, "factor": 1.0}

    return {name: changed(value) for name, value in fields.items()}


DRAWS: dict[str, Draw] = {
    "glm4": lambda rng, layers, size: wide(rng, 8, 12, 16) | flags(rng, "attention_bias"),
    "gemma": lambda rng, layers, size: {
        **wide(rng),
        **flags(rng, "attention_bias"),
        "hidden_act": rng.choice((GELU, "gelu")),
    },
    "seed_oss": lambda rng, layers, size: {
        **wide(rng),
        **flags(rng, "attention_bias", "attention_out_bias", "mlp_bias"),
        "residual_dropout": rng.choice((0.0, 0.1)),
    },
    "ernie4_5": lambda rng, layers, size: wide(rng) | flags(rng, "use_bias"),
    "starcoder2": lambda rng, layers, size: {
        **flags(rng, "use_bias"),
        **_renamed_epsilon(rng, "norm_epsilon"),
        **rng.choice(({}, {"sliding_window": rng.choice((None, 1, 7))})),
        "hidden_act": GELU,
    },
    "exaone4": lambda rng, layers, size: exaone4(rng, layers),
    "ministral": lambda rng, layers, size: wide(rng) | _windows(rng, layers, {}),
    "iquestcoder": lambda rng, layers, size: wide(rng) | flags(rng, "attention_bias", "mlp_bias"),
    "cwm": lambda rng, layers, size: wide(rng) | _windows(rng, layers),
    "nemotron": lambda rng, layers, size: {
        **wide(rng, 8, 12, 16),
        **flags(rng, "attention_bias", "mlp_bias"),
        **_renamed_epsilon(rng, "norm_eps"),
        "hidden_act": SQUARED_RELU,
    },
    "arcee": lambda rng, layers, size: flags(rng, "attention_bias", "mlp_bias") | {"hidden_act": SQUARED_RELU},
    "helium": lambda rng, layers, size: flags(rng, "attention_bias", "mlp_bias") | {"head_dim": size},
    "stablelm": lambda rng, layers, size: {
        **flags(rng, "use_qkv_bias", "use_parallel_residual"),
        **_renamed_epsilon(rng, "layer_norm_eps"),
        "partial_rotary_factor": rng.choice((0.5, 1.0)),
    },
    "olmo3": lambda rng, layers, size: _windows(rng, layers) | flags(rng, "attention_bias"),
    "hyperclovax": lambda rng, layers, size: _hyperclovax(rng),
    "glm": lambda rng, layers, size: wide(rng, 8, 12, 16) | flags(rng, "attention_bias"),
    "smollm3": lambda rng, layers, size: {
        **flags(rng, "attention_bias", "mlp_bias"),
        **rng.choice(
            (
                {},
                {"no_rope_layer_interval": rng.randint(1, 3)},
                {"no_rope_layers": [rng.randint(0, 1) for _ in range(layers)]},
            )
        ),
    },
    "gpt_neox": lambda rng, layers, size: {
        **dict.fromkeys(("num_key_value_heads", "rope_theta")),
        **flags(rng, "attention_bias"),
        **_renamed_epsilon(rng, "layer_norm_eps"),
        "hidden_act": rng.choice((GELU, "gelu", "gelu_new")),
        # One after the other, attention and MLP are StarCoder2's, too, if heads are rotated whole.
        **rng.choice(({"rotary_pct": 1.0}, {"rotary_pct": 0.5}, {"rotary_pct": 0.5, "use_parallel_residual": False})),
        "hidden_dropout": rng.choice((0.0, 0.1)),
    },
    "jais2": lambda rng, layers, size: {
        **flags(rng, "attention_bias", "mlp_bias"),
        **_renamed_epsilon(rng, "layer_norm_eps"),
        "hidden_act": SQUARED_RELU,
    },
    "dots1": lambda rng, layers, size: _dots1(rng, layers),
    "solar_open": lambda rng, layers, size: wide(rng) | shared_and_routed(rng),
    "flex_olmo": lambda rng, layers, size: _flex_olmo(rng),
    "granitemoe": lambda rng, layers, size: _granitemoe(rng),
    "granitemoeshared": lambda rng, layers, size: {
        **_granitemoe(rng),
        "shared_intermediate_size": rng.randint(1, 30),
    },
    "granite_swa": lambda rng, layers, size: {
        **_windows(rng, layers, {"sliding_window": 5}),
        **flags(rng, "attention_bias", "mlp_bias"),
        **rng.choice(({}, {"layer_rope_theta": [rng.choice((0, 50.0)) for _ in range(layers)]})),
        "attention_multiplier": rng.choice((1, 0.25)),
        "logits_scaling": rng.choice((1.0, 0.7)),
    },
    "granitemoe_swa": lambda rng, layers, size: {
        **_granitemoe(rng),
        **_windows(rng, layers, {"sliding_window": 5}),
        **rng.choice(({}, {"layer_rope_theta": [rng.choice((0, 50.0)) for _ in range(layers)]})),
        **rng.choice(({}, {"shared_intermediate_size": rng.randint(1, 30)})),
    },
    "falcon": lambda rng, layers, size: _falcon(rng),
    "bloom": lambda rng, layers, size: {
        **dict.fromkeys(("num_key_value_heads", "hidden_act", "intermediate_size", "max_position_embeddings")),
        **_renamed_epsilon(rng, "layer_norm_epsilon"),
        **rng.choice(({}, {"seq_length": rng.choice((64, 2048))})),
        **rng.choice(({}, {"hidden_dropout": 0.1})),
    },
    "apertus": lambda rng, layers, size: wide(rng) | flags(rng, "attention_bias") | {"hidden_act": "xielu"},
    "gpt_oss": lambda rng, layers, size: _gpt_oss(rng, layers),
    "phi": lambda rng, layers, size: {
        **flags(rng, "qk_layernorm"),
        **_renamed_epsilon(rng, "layer_norm_eps"),
        **rng.choice(({}, {"partial_rotary_factor": rng.choice((0.5, 1.0))})),
        "hidden_act": rng.choice((GELU, "gelu", "gelu_new")),
        **rng.choice(({}, {"resid_pdrop": 0.1, "embd_pdrop": 0.1}, {"resid_pdrop": 0.1})),
    },
    "persimmon": lambda rng, layers, size: {
        "num_key_value_heads": None,
        # Without the norms it is a Nemotron or a Jais 2 but for the form of its tensors.
        **rng.choice(({}, {"qk_layernorm": True})),
        **_renamed_epsilon(rng, "layer_norm_eps"),
        "partial_rotary_factor": rng.choice((0.5, 1.0)),
        "hidden_act": SQUARED_RELU,
        "hidden_dropout": rng.choice((0.0, 0.1)),
    },
    "cohere": lambda rng, layers, size: {
        **wide(rng),
        **flags(rng, "attention_bias", "use_qk_norm"),
        **_renamed_epsilon(rng, "layer_norm_eps"),
        "logit_scale": rng.choice((0.0625, 0.3, 1.0, 0.7)),
    },
    "cohere2": lambda rng, layers, size: {
        **_windows(rng, layers, {"sliding_window": 5, "sliding_window_pattern": rng.randint(1, 3)}),
        **flags(rng, "attention_bias"),
        **_renamed_epsilon(rng, "layer_norm_eps"),
        "logit_scale": rng.choice((0.0625, 0.3, 1.0)),
    },
    "olmo": lambda rng, layers, size: {
        "rms_norm_eps": None,
        **flags(rng, "attention_bias"),
        **rng.choice(({}, {"clip_qkv": rng.choice((None, 0.37, 8.0))})),
    },
    "nanochat": lambda rng, layers, size: {
        **wide(rng),
        **flags(rng, "attention_bias"),
        **rng.choice(({}, {"final_logit_softcapping": rng.choice((None, 0.5, 15.0))})),
        "hidden_act": SQUARED_RELU,
    },
    "ministral3": lambda rng, layers, size: wide(rng) | rng.choice(({}, {"sliding_window": rng.choice((None, 5))})),
    "hunyuan_v1_dense": lambda rng, layers, size: hunyuan(rng),
    "internlm3": lambda rng, layers, size: wide(rng) | dict.fromkeys(_BIASES, rng.random() < 0.5),
}
# Without a head_dim the heads have to be of an even number of pairs.
SQUARE = ("ernie4_5_moe", "helium", "stablelm", "falcon", "gpt_neox", "phi", "persimmon", "cohere2", "olmo", "bloom")
GPT = ("gpt2", "gpt_bigcode", "gptj", "codegen")


def of_gpt(rng: random.Random, fields: Fields) -> Fields:
    """The fields of GPT-2's kind, from those of other families. With one head both families are the same model."""
    heads, dropout = max(2, fields["num_attention_heads"]), rng.choice((0.0, 0.1))
    if fields["model_type"] == "codegen":
        heads = 4 * rng.choice((1, 2, 3))
    size = rng.choice((2, 4, 6))
    rotated = {"rotary_dim": rng.randrange(2, size + 1, 2)} if fields["model_type"] in ("gptj", "codegen") else {}
    ours = {
        **rotated,
        "n_layer": fields["num_hidden_layers"],
        "n_head": heads,
        "n_embd": heads * size,
        "n_positions": fields["max_position_embeddings"],
        "layer_norm_epsilon": rng.choice((1e-6, 1e-5, 1e-2)),
        "activation_function": rng.choice((GELU, "gelu_new", "gelu")),
        "resid_pdrop": dropout,
        "embd_pdrop": dropout,
        **rng.choice(({}, {"n_inner": fields["intermediate_size"]}, {"n_inner": None})),
        **rng.choice(({}, {"attn_pdrop": 0.0})),
    }
    same = ("model_type", "vocab_size", "tie_word_embeddings", "initializer_range", "bos_token_id", "eos_token_id")
    return {name: fields[name] for name in same} | ours | {"torch_dtype": "float32"}
