"""The supported families: the format of their config.json, and the names of their tensors.

A family is a reader and a writer of config.json and a list of mappings (names.py). All are Llama-shaped decoders:
RMSNorm, rotary positions, a gated MLP.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.base.errors import CheckpointError, ConfigError
from megatron.config.interval import AT_LEAST_ONE, BELOW_ONE, NOT_NEGATIVE, POSITIVE, Interval
from megatron.config.model import PADDING_FIELDS, RUNTIME_FIELDS, ModelConfig
from megatron.core.models.hf.config_json import JsonFields
from megatron.core.models.hf.rotary import attention_factor, read_rotary, write_rotary

CONFIG_FILE = "config.json"
# Much larger than any model: lists of layers are made before the weights are checked.
_LAYERS = Interval("from 1 to 100000", lambda x: 1 <= x <= 100_000)


# Norms of a pre-norm layer, our name -> theirs.
PRE_NORMS = {
    "input_layernorm": "input_layernorm",
    "pre_mlp_layernorm": "post_attention_layernorm",
    "self_attention.q_layernorm": "self_attn.q_norm",
    "self_attention.k_layernorm": "self_attn.k_norm",
}
# Of a layer with norms behind attention and MLP only.
POST_NORMS = {
    "post_self_attn_layernorm": "post_attention_layernorm",
    "post_mlp_layernorm": "post_feedforward_layernorm",
    "self_attention.q_layernorm": "self_attn.q_norm",
    "self_attention.k_layernorm": "self_attn.k_norm",
}


# Norms on both sides of attention and MLP.
GEMMA2_NORMS = {
    "input_layernorm": "input_layernorm",
    "post_self_attn_layernorm": "post_attention_layernorm",
    "pre_mlp_layernorm": "pre_feedforward_layernorm",
    "post_mlp_layernorm": "post_feedforward_layernorm",
}
SILU, GELU_TANH = "silu", "gelu_pytorch_tanh"


@dataclass(frozen=True)
class Family:
    """`read`: config.json -> fields of ModelConfig. `write`: the fields that only this family's config.json has.

    groups, head_dim, theta, percent, original, epsilon, tied: num_key_value_heads, head_dim, rope_theta,
    partial_rotary_factor, original_max_position_embeddings, rms_norm_eps and tie_word_embeddings of a config.json without
    these fields. None: one group for each head; hidden / heads; heads that are always rotated whole; no LongRoPE.
    activation: the only hidden_act. norms: our norm in a layer -> theirs. fused: our linear layer in a layer -> the one
    tensor that holds all its projections, one after the other.
    """

    model_type: str
    architecture: str
    read: Callable[[JsonFields, dict[str, Any]], dict[str, Any]]
    write: Callable[[ModelConfig], dict[str, Any]] | None
    groups: int | None = None
    theta: float = 10000.0
    percent: float | None = None
    original: int | None = None
    epsilon: float = 1e-6
    tied: bool = False
    head_dim: int | None = None
    activation: str = SILU
    norms: Mapping[str, str] = field(default_factory=lambda: PRE_NORMS)
    fused: Mapping[str, str] = field(default_factory=dict)


def read_config(folder: Path) -> tuple[Family, ModelConfig]:
    """Returns the family and the model that `folder`/config.json describes. No communication. Raises CheckpointError.

    Precision, kernels and dropout of hidden states are not in the file: they have their defaults, dropout is 0.
    """
    path = folder / CONFIG_FILE
    try:
        values = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path} is not there; give a folder in Hugging Face format: config.json and *.safetensors"
        ) from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    kind = values.get("model_type")
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None:
        raise CheckpointError(f"{path}: model_type {kind!r} is not supported; {', '.join(FAMILIES)} are")
    return family, parse_config(family, values, str(path))


def parse_config(family: Family, values: dict[str, Any], where: str) -> ModelConfig:
    """Returns the model that the content of a config.json describes. Raises CheckpointError naming unknown fields."""
    fields = JsonFields(values, where)
    common = _read_common(fields, where, family)
    found = {**common, **family.read(fields, common)}
    fields.finish()
    return ModelConfig(**found)


def write_config(model: ModelConfig, like: Path | None = None) -> tuple[Family, dict[str, Any]]:
    """Returns a family that can represent a model, and its config.json without token ids. Raises ConfigError if none
    can.

    `like` is a folder whose config.json is used instead if it describes the same model, because it has more
    information, such as token ids.
    """
    described = None if like is None else _read_if_known(like)
    if like is not None and described is not None:
        family, other = described
        if family.write is not None and _maths(other) == _maths(model):
            return family, json.loads((like / CONFIG_FILE).read_bytes())
    family = _family_of(model)
    assert family.write is not None
    values = {"architectures": [family.architecture], "model_type": family.model_type, "torch_dtype": model.dtype_name}
    values |= _write_common(model) | family.write(model)
    there, here = _maths(parse_config(family, values, family.model_type)), _maths(model)
    different = [name for name in here if here[name] != there[name]]
    if different:
        listed = ", ".join(f"{name} {here[name]}" for name in different)
        raise ConfigError(
            f"no supported Hugging Face family has {listed} (nearest: {family.model_type}); the model cannot be written "
            "in that format"
        )
    return family, values


def _read_if_known(folder: Path) -> tuple[Family, ModelConfig] | None:
    """`read_config`, or None for a file that is missing or unsupported and therefore describes another model, if any."""
    try:
        return read_config(folder)
    except CheckpointError:
        return None


def _read_common(fields: JsonFields, where: str, family: Family) -> dict[str, Any]:
    """Returns the fields of all families. The defaults are those of a file without the field; None: derived."""
    heads, hidden = fields.integer("num_attention_heads", AT_LEAST_ONE), fields.integer("hidden_size", AT_LEAST_ONE)
    groups = fields.optional_integer("num_key_value_heads", AT_LEAST_ONE)
    if groups is None:
        groups = heads if fields.has("num_key_value_heads") else family.groups or heads
    if heads % groups:
        raise fields.error(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {groups}")
    head_dim = fields.optional_integer("head_dim", AT_LEAST_ONE) or family.head_dim
    if head_dim is None and hidden % heads:
        raise fields.error(
            f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}, and there is no head_dim"
        )
    size = head_dim or hidden // heads
    if size % 2:
        raise fields.error(f"head_dim is {size}; rotary embeddings need an even one")
    # The first conversions of Llama 1 have only the other name, some later ones both.
    older = fields.has("max_sequence_length") and not fields.has("max_position_embeddings")
    context = fields.integer("max_sequence_length" if older else "max_position_embeddings", AT_LEAST_ONE)
    fields.only("hidden_act", family.activation)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        fields.take(name, (int, list), None)
    return {
        "num_layers": fields.integer("num_hidden_layers", _LAYERS),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "group_query_attention": groups != heads,
        "num_query_groups": groups if groups != heads else None,
        "kv_channels": head_dim,
        "ffn_hidden_size": fields.integer("intermediate_size", AT_LEAST_ONE),
        "vocab_size": fields.integer("vocab_size", AT_LEAST_ONE),
        "max_position_embeddings": context,
        "norm_epsilon": fields.number("rms_norm_eps", POSITIVE, family.epsilon),
        "init_method_std": fields.number("initializer_range", NOT_NEGATIVE, 0.02),
        "attention_dropout": fields.number("attention_dropout", BELOW_ONE, 0.0),
        "untie_embeddings_and_output_weights": not fields.take("tie_word_embeddings", bool, family.tied),
        "hidden_dropout": 0.0,
        "normalization": "RMSNorm",
        "swiglu": family.activation == SILU,
        "add_bias_linear": False,
        **read_rotary(
            fields,
            where,
            default_theta=family.theta,
            default_percent=family.percent,
            default_original=family.original,
            context=context,
        ),
    }


def _write_common(model: ModelConfig) -> dict[str, Any]:
    return {
        "num_hidden_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "intermediate_size": model.ffn_dim,
        "vocab_size": model.vocab_size,
        "max_position_embeddings": model.max_position_embeddings,
        "rms_norm_eps": model.norm_epsilon,
        "initializer_range": model.init_method_std,
        "attention_dropout": model.attention_dropout,
        "tie_word_embeddings": not model.untie_embeddings_and_output_weights,
        "hidden_act": GELU_TANH if model.geglu else SILU,
        "use_cache": True,
        **write_rotary(model),
    }


def _read_llama(fields: JsonFields, common: dict[str, Any]) -> dict[str, Any]:
    fields.only("rope_interleaved", False)
    attention, mlp = fields.take("attention_bias", bool, False), fields.take("mlp_bias", bool, False)
    if attention != mlp:
        raise fields.error(
            f"attention_bias is {attention} and mlp_bias {mlp}; biases in all linear layers or in none are supported"
        )
    return {"add_bias_linear": attention}


def _write_llama(model: ModelConfig) -> dict[str, Any]:
    return {"attention_bias": model.add_bias_linear, "mlp_bias": model.add_bias_linear}


def _read_mistral(fields: JsonFields, common: dict[str, Any]) -> dict[str, Any]:
    window = _window(fields)
    return {} if window is None else {"window_size": f"{window - 1},0"}


def _window(fields: JsonFields) -> int | None:
    """Returns the window; only null means none, because a missing field means the window of the first Mistral or Qwen."""
    window = fields.optional_integer("sliding_window", AT_LEAST_ONE)
    return window if window is not None or fields.has("sliding_window") else 4096


def _write_mistral(model: ModelConfig) -> dict[str, Any]:
    return {"sliding_window": model.window}


def _read_qwen2(fields: JsonFields, common: dict[str, Any]) -> dict[str, Any]:
    fields.only("use_mrope", False)
    return {"add_qkv_bias": True, **_read_layer_windows(fields, common["num_layers"])}


def _read_qwen3(fields: JsonFields, common: dict[str, Any]) -> dict[str, Any]:
    fields.only("attention_bias", False)
    return {"qk_layernorm": True, **_read_layer_windows(fields, common["num_layers"])}


def _read_layer_windows(fields: JsonFields, layers: int) -> dict[str, Any]:
    """Reads Qwen's fields for layers with and without a sliding window."""
    used = fields.take("use_sliding_window", bool, False)
    window, first = _window(fields), fields.integer("max_window_layers", NOT_NEGATIVE, 28)
    slide = used and window is not None
    slides = _sliding_layers(fields, [slide and layer >= first for layer in range(layers)])
    if any(slides) and not slide:
        raise fields.error(
            f"layer_types has sliding_attention, but use_sliding_window is {used} and sliding_window {window}"
        )
    return _window_flags(window, slides)


def _sliding_layers(fields: JsonFields, default: list[bool]) -> list[int]:
    """Returns 1 for each layer with a sliding window and 0 for the others; without layer_types as `default` says."""
    names = ["sliding_attention" if slides else "full_attention" for slides in default]
    kinds: list[Any] = fields.take("layer_types", list, names)
    if len(kinds) != len(default) or not all(kind in ("sliding_attention", "full_attention") for kind in kinds):
        raise fields.error(
            f"layer_types {kinds} is not one of sliding_attention, full_attention for {len(default)} layers"
        )
    return [int(kind == "sliding_attention") for kind in kinds]


def _window_flags(window: int | None, slides: list[int]) -> dict[str, Any]:
    if window is None or not any(slides):
        return {}
    return {"window_size": f"{window - 1},0", "window_attn_skip_freq": None if all(slides) else str(slides)}


def _read_smollm3(fields: JsonFields, common: dict[str, Any]) -> dict[str, Any]:
    """Without a list every fourth layer, or every `no_rope_layer_interval`-th, has no rotary embedding."""
    layers, interval = common["num_layers"], fields.integer("no_rope_layer_interval", AT_LEAST_ONE, 4)
    rotated: list[Any] = fields.take("no_rope_layers", list, [int((at + 1) % interval != 0) for at in range(layers)])
    if len(rotated) < layers or not all(each in (0, 1) for each in rotated):
        raise fields.error(f"no_rope_layers {rotated} is not one of 0, 1 for {layers} layers")
    without = [int(not each) for each in rotated[:layers]]
    if fields.has("use_sliding_window") and fields.take("use_sliding_window", bool, False):
        raise fields.error("use_sliding_window is true; only SmolLM3 without sliding windows is supported")
    fields.take("sliding_window", int, None)
    fields.take("layer_types", list, None)
    return {**_read_llama(fields, common), "no_rope_freq": str(without) if any(without) else None}


def _write_smollm3(model: ModelConfig) -> dict[str, Any]:
    return {
        **_write_llama(model),
        "no_rope_layers": [int(each) for each in model.layers_with_rotary],
        "use_sliding_window": False,
        "layer_types": ["full_attention"] * len(model.layers_with_rotary),
    }


def _write_layer_windows(model: ModelConfig) -> dict[str, Any]:
    windows = model.windows
    if not any(windows):
        return {"use_sliding_window": False, "sliding_window": None}
    return {
        "use_sliding_window": True,
        "sliding_window": model.window,
        "max_window_layers": 0,
        "layer_types": _layer_types(model),
    }


def _layer_types(model: ModelConfig) -> list[str]:
    return ["full_attention" if window is None else "sliding_attention" for window in model.windows]


def _read_glm(fields: JsonFields, common: dict[str, Any]) -> dict[str, Any]:
    return {"rotary_interleaved": True, "add_qkv_bias": fields.take("attention_bias", bool, True)}


def _write_glm(model: ModelConfig) -> dict[str, Any]:
    return {"attention_bias": model.qkv_bias}


def _read_granite(fields: JsonFields, common: dict[str, Any]) -> dict[str, Any]:
    return {
        **_read_llama(fields, common),
        "embedding_multiplier_scale": fields.number("embedding_multiplier", POSITIVE, 1.0),
        "softmax_scale": fields.number("attention_multiplier", POSITIVE, 1.0),
        "residual_multiplier": fields.number("residual_multiplier", POSITIVE, 1.0),
        "logits_scaling": fields.number("logits_scaling", POSITIVE, 1.0),
    }


def _write_granite(model: ModelConfig) -> dict[str, Any]:
    return {
        **_write_llama(model),
        "embedding_multiplier": model.embedding_multiplier_scale,
        "attention_multiplier": model.attention_scale,
        "residual_multiplier": model.residual_multiplier,
        "logits_scaling": model.logits_scaling,
    }


def _read_olmo2(fields: JsonFields, common: dict[str, Any]) -> dict[str, Any]:
    fields.only("attention_bias", False)
    return {"pre_norm": False, "post_norm": True, "qk_layernorm": True, "qk_layernorm_across_heads": True}


def _write_olmo2(model: ModelConfig) -> dict[str, Any]:
    return {"attention_bias": False}


def _read_gemma2(fields: JsonFields, common: dict[str, Any]) -> dict[str, Any]:
    """Without a list every other layer has a window, beginning with the first one."""
    fields.only("hidden_activation", GELU_TANH)
    fields.only("attention_bias", False)
    fields.only("use_bidirectional_attention", False)
    fields.take("cache_implementation", str, None)
    fields.take("sliding_window_size", int, None)  # which transformers does not read
    window = _window(fields)
    slides = _sliding_layers(fields, [layer % 2 == 0 for layer in range(common["num_layers"])])
    if any(slides) and window is None:
        raise fields.error("layer_types has sliding_attention, but sliding_window is null")
    return {
        "swiglu": False,
        "geglu": True,
        "openai_gelu": True,
        "apply_layernorm_1p": True,
        "post_norm": True,
        "embedding_multiplier_scale": math.sqrt(common["hidden_size"]),
        "softmax_scale": 1.0 / math.sqrt(fields.integer("query_pre_attn_scalar", AT_LEAST_ONE, 256)),
        "attn_logit_softcapping": _cap(fields, "attn_logit_softcapping", 50.0),
        "final_logit_softcapping": _cap(fields, "final_logit_softcapping", 30.0),
        **_window_flags(window, slides),
    }


def _cap(fields: JsonFields, name: str, default: float) -> float | None:
    """Returns a cap; only null means none."""
    cap = fields.optional_number(name, POSITIVE)
    return cap if cap is not None or fields.has(name) else default


def _write_gemma2(model: ModelConfig) -> dict[str, Any]:
    return {
        "hidden_activation": GELU_TANH,
        "attention_bias": False,
        "query_pre_attn_scalar": round(model.attention_scale**-2),
        "attn_logit_softcapping": model.attn_logit_softcapping,
        "final_logit_softcapping": model.final_logit_softcapping,
        "sliding_window": model.window or 4096,  # transformers needs one even if no layer has it
        "layer_types": _layer_types(model),
    }


def _read_phi3(fields: JsonFields, common: dict[str, Any]) -> dict[str, Any]:
    for name in ("attention_bias", "mlp_bias", "lm_head_bias"):
        fields.only(name, False)
    # Written by Phi-4-mini's publisher; at 1 every layer is alike and nothing is interpolated.
    for name in ("full_attn_mod", "interpolate_factor"):
        fields.only(name, 1)
    residual, embedding = fields.number("resid_pdrop", BELOW_ONE, 0.0), fields.number("embd_pdrop", BELOW_ONE, 0.0)
    if residual != embedding:
        raise fields.error(
            f"resid_pdrop is {residual} and embd_pdrop {embedding}; one probability for both (--hidden-dropout) is "
            "supported: change one of them"
        )
    if common["position_embedding_type"] == "longrope":
        _check_longrope(fields, common)
    window = fields.optional_integer("sliding_window", AT_LEAST_ONE)
    return {"hidden_dropout": residual, "window_size": None if window is None else f"{window - 1},0"}


def _check_longrope(fields: JsonFields, common: dict[str, Any]) -> None:
    """Raises CheckpointError unless both lists have a number for each pair of channels, counted as transformers counts."""
    head_dim = common["hidden_size"] // common["num_attention_heads"]
    if common["kv_channels"] not in (None, head_dim):
        raise fields.error(
            f"head_dim is {common['kv_channels']}; with LongRoPE transformers needs hidden_size / num_attention_heads, "
            f"{head_dim}"
        )
    pairs = int(head_dim * common["rotary_percent"]) // 2
    for name in ("short_factor", "long_factor"):
        if (count := len(common[name].split(","))) != pairs:
            raise fields.error(f"{name} has {count} numbers, and a head has {pairs} pairs of rotated channels")


def _write_phi3(model: ModelConfig) -> dict[str, Any]:
    original = {"original_max_position_embeddings": model.rope_scaling_original_max_position_embeddings}
    return {
        "sliding_window": model.window,
        "resid_pdrop": model.hidden_dropout,
        "embd_pdrop": model.hidden_dropout,
        **(original if model.position_embedding_type == "longrope" else {}),
    }


def _read_baichuan(fields: JsonFields, common: dict[str, Any]) -> dict[str, Any]:
    # Its architecture has a capital C, unlike those of Baichuan-13B and Baichuan 2.
    if fields.has("z_loss_weight") or "BaichuanForCausalLM" in fields.take("architectures", list, []):
        raise fields.error(
            "only Baichuan-7B (BaiChuanForCausalLM) is supported: Baichuan 2 normalises its head, Baichuan-13B has ALiBi"
        )
    return {}


FAMILIES = {
    family.model_type: family
    for family in (
        Family("llama", "LlamaForCausalLM", _read_llama, _write_llama),
        Family("mistral", "MistralForCausalLM", _read_mistral, _write_mistral, groups=8),
        Family("qwen2", "Qwen2ForCausalLM", _read_qwen2, _write_layer_windows, groups=32),
        Family("qwen3", "Qwen3ForCausalLM", _read_qwen3, _write_layer_windows, groups=32, head_dim=128),
        Family("smollm3", "SmolLM3ForCausalLM", _read_smollm3, _write_smollm3, groups=4, theta=2e6, tied=True),
        Family(
            "glm",
            "GlmForCausalLM",
            _read_glm,
            _write_glm,
            groups=2,
            head_dim=128,
            percent=0.5,
            epsilon=1.5625e-7,
            fused={"mlp.linear_fc1": "gate_up_proj"},
        ),
        Family("granite", "GraniteForCausalLM", _read_granite, _write_granite),
        Family("olmo2", "Olmo2ForCausalLM", _read_olmo2, _write_olmo2, epsilon=1e-5, norms=POST_NORMS),
        Family(
            "gemma2",
            "Gemma2ForCausalLM",
            _read_gemma2,
            _write_gemma2,
            groups=4,
            head_dim=256,
            tied=True,
            activation=GELU_TANH,
            norms=GEMMA2_NORMS,
        ),
        Family(
            "phi3",
            "Phi3ForCausalLM",
            _read_phi3,
            _write_phi3,
            percent=1.0,
            original=4096,
            epsilon=1e-5,
            fused={"self_attention.linear_qkv": "qkv_proj", "mlp.linear_fc1": "gate_up_proj"},
        ),
        # Written as the Llama that it is.
        Family("baichuan", "BaiChuanForCausalLM", _read_baichuan, None, fused={"self_attention.linear_qkv": "W_pack"}),
    )
}


def _family_of(model: ModelConfig) -> Family:
    if model.geglu:
        return FAMILIES["gemma2"]
    if model.position_embedding_type == "longrope":
        return FAMILIES["phi3"]
    if model.rotary_interleaved:
        return FAMILIES["glm"]
    if model.no_rope_freq is not None:
        return FAMILIES["smollm3"]
    if model.post_norm:
        return FAMILIES["olmo2"]
    if model.qk_layernorm:
        return FAMILIES["qwen3"]
    factors = (model.embedding_multiplier_scale, model.residual_multiplier, model.logits_scaling)
    if model.softmax_scale is not None or factors != (1.0, 1.0, 1.0):
        return FAMILIES["granite"]
    if model.add_qkv_bias and not model.add_bias_linear:
        return FAMILIES["qwen2"]
    if model.rotary_percent != 1.0 and write_rotary(model)["rope_scaling"] is None:
        return FAMILIES["phi3"]
    return FAMILIES["llama" if model.window is None else "mistral"]


def _maths(model: ModelConfig) -> dict[str, Any]:
    """Returns the fields that determine the model's outputs; sizes as derived, independently of how they were given."""
    without = {*RUNTIME_FIELDS, *PADDING_FIELDS, "init_method_xavier_uniform", "apply_output_scale_init"}
    found = {
        each.name: getattr(model, each.name)
        for each in dataclasses.fields(ModelConfig)
        if each.name not in without and _has_a_part(model, each.name)
    }
    derived: dict[str, Any] = {
        "group_query_attention": True,
        "num_query_groups": model.num_kv_heads,
        "kv_channels": model.head_dim,
        "ffn_hidden_size": model.ffn_dim,
        "window_size": model.window,
        "window_attn_skip_freq": model.windows,
        "no_rope_freq": model.layers_with_rotary,
        "add_qkv_bias": model.qkv_bias,
        "softmax_scale": model.attention_scale,
    }
    if model.position_embedding_type == "yarn":
        derived["yarn_mscale"] = attention_factor(model)
    if model.position_embedding_type == "longrope":
        derived["short_factor"], derived["long_factor"] = model.longrope_factors
    return {**found, **derived}


def _has_a_part(model: ModelConfig, field: str) -> bool:
    """Returns False for parameters of a disabled rotary scaling."""
    yarn, longrope = (model.position_embedding_type == kind for kind in ("yarn", "longrope"))
    if field.startswith("yarn_"):
        return yarn
    if field == "rope_scaling_factor":
        return yarn or model.use_rope_scaling
    if field == "rope_scaling_original_max_position_embeddings":
        return yarn or longrope or model.use_rope_scaling
    return model.use_rope_scaling or not field.startswith("rope_scaling_")
