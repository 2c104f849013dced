"""Converts Megatron-LM's arguments to the model that they describe, and a model of this program to such arguments.

Names and defaults are those of core 0.12 to d98e8a6 (2026-08-22). The later versions have `layernorm_epsilon` and
`layernorm_zero_centered_gamma` instead of `norm_epsilon` and `apply_layernorm_1p`, and the flags of YaRN.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from megatron.base.errors import CheckpointError, ConfigError
from megatron.config.layer_forms import ALL, LEARNABLE, OFF_BY_ONE, VANILLA
from megatron.config.model import ModelConfig
from megatron.config.moe import SIGMOID
from megatron.config.positions import ALIBI
from megatron.config.stored import check_fields
from megatron.core.models.mcore import delta_arguments, form_arguments, latent_arguments, moe_arguments
from megatron.core.models.mcore.known_arguments import listed, refuse_what_is_not_here
from megatron.core.models.mcore.latent_arguments import latent_flags, latents_of, without_latent_argument
from megatron.core.models.mcore.moe_arguments import expert_arguments, expert_flags, experts_of, without_argument

# The arguments that describe the model, by their type.
_WHOLE = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "ffn_hidden_size",
    "kv_channels",
    "num_query_groups",
    "max_position_embeddings",
    "make_vocab_size_divisible_by",
    "vocab_size",
    "padded_vocab_size",
    "yarn_original_max_position_embeddings",
    "mtp_num_layers",
    *latent_arguments.WHOLE,
    *delta_arguments.WHOLE,
)
_NUMBERS = (
    "rotary_base",
    "rotary_percent",
    "rotary_seq_len_interpolation_factor",
    "rope_scaling_factor",
    "rotary_scaling_factor",
    "yarn_beta_fast",
    "yarn_beta_slow",
    "mscale",
    "mscale_all_dim",
    "norm_epsilon",
    "layernorm_epsilon",
    "hidden_dropout",
    "attention_dropout",
    "init_method_std",
    *form_arguments.NUMBERS,
)
_SWITCHES = (
    "group_query_attention",
    "use_rotary_position_embeddings",
    "rotary_interleaved",
    "use_rope_scaling",
    "apply_layernorm_1p",
    "layernorm_zero_centered_gamma",
    "swiglu",
    "squared_relu",
    "bias_gelu_fusion",
    "use_te_activation_func",
    "use_transformer_engine_op_fuser",
    "add_bias_linear",
    "disable_bias_linear",
    "add_qkv_bias",
    "qk_layernorm",
    "multi_latent_attention",
    "untie_embeddings_and_output_weights",
    "init_method_xavier_uniform",
    "yarn_correction_range_round_to_int",
    *form_arguments.SWITCHES,
    delta_arguments.GATE,
    "mask_padded_vocabulary",  # written by this program only: Megatron-LM has no such mask
)
_FURTHER = (
    "position_embedding_type",
    "no_rope_freq",
    "normalization",
    "window_size",
    "window_attn_skip_freq",
    "tokenizer_type",
    form_arguments.SOFTMAX_TYPE,
    delta_arguments.VARIANT,
    delta_arguments.FREQUENCY,
)
_MAY_BE_ZERO = (
    *("mtp_num_layers", "mscale", "mscale_all_dim", "hidden_dropout", "attention_dropout", "init_method_std"),
    "glu_linear_offset",
)
_READ = moe_arguments.READ.union(latent_arguments.READ, _WHOLE, _NUMBERS, _SWITCHES, _FURTHER)
_POSITIONS, _NORMS = ("learned_absolute", "rope", "yarn", "none"), ("LayerNorm", "RMSNorm")
# The Llama-3.1 rope of Megatron-LM has these values built in; only the factor is an argument.
_LLAMA3 = {
    "rope_scaling_low_freq_factor": 1.0,
    "rope_scaling_high_freq_factor": 4.0,
    "rope_scaling_original_max_position_embeddings": 8192,
}
_YARN_CONTEXT = 4096  # the original context without --yarn-original-max-position-embeddings
_EPSILON = 1e-5


def model_of(
    arguments: Mapping[str, Any], where: str, vocab_size: int | None = None, ignored: Collection[str] = ()
) -> ModelConfig:
    """Returns the model that the arguments describe.

    `vocab_size` is the size without padding, if the arguments do not contain it. `ignored` are names of unknown
    arguments, which may have any value. Raises CheckpointError naming every unsupported argument, and ConfigError for a
    name that cannot be ignored.
    """
    refuse_what_is_not_here(arguments, _READ, where, ignored)
    settings = {name: value for name, value in arguments.items() if value is not None and name in _READ}
    _check_types(settings, where)
    sizes = {name: settings[name] for name in ("num_layers", "hidden_size", "num_attention_heads") if name in settings}
    if len(sizes) < 3:
        raise CheckpointError(f"{where}: its arguments do not contain the size of the model, only {sizes}")
    same = (
        *("ffn_hidden_size", "kv_channels", "group_query_attention", "num_query_groups", "max_position_embeddings"),
        *("normalization", "swiglu", "squared_relu", "add_qkv_bias", "qk_layernorm", "make_vocab_size_divisible_by"),
        *("untie_embeddings_and_output_weights", "init_method_std", "init_method_xavier_uniform", "mtp_num_layers"),
    )
    gated_or_squared = any(settings.get(name, False) for name in ("swiglu", "quick_geglu", "squared_relu"))
    has_biases = not settings.get("disable_bias_linear", not settings.get("add_bias_linear", True))
    latents = latents_of(settings, where, has_biases=has_biases, has_rope_type="rope_type" in arguments)
    fields = latents or _rotary(settings, where)
    model = ModelConfig(
        **sizes,
        **{name: settings[name] for name in same if name in settings and name not in fields},
        **fields,
        **_windows(settings, where),
        **experts_of(settings, where),
        **form_arguments.forms_of(settings),
        **delta_arguments.delta_nets_of(settings, where),
        norm_epsilon=float(settings.get("layernorm_epsilon", settings.get("norm_epsilon", _EPSILON))),
        apply_layernorm_1p=settings.get("layernorm_zero_centered_gamma", settings.get("apply_layernorm_1p", False)),
        add_bias_linear=has_biases,
        bias_gelu_fusion=gated_or_squared or _fuses_gelu(settings, has_biases, where),
        hidden_dropout=float(settings.get("hidden_dropout", 0.0)),
        attention_dropout=float(settings.get("attention_dropout", 0.0)),
        mask_padded_vocabulary=settings.get("mask_padded_vocabulary", False),
        vocab_size=vocab_size or _vocabulary(settings, where, counts_end="null_tokenizer_eod_id" in arguments),
    )
    try:
        check_fields(model)
    except ValueError as error:
        raise CheckpointError(f"{where}: of its arguments, {error}") from error
    _check_shape(model, where)
    return model


def arguments_of(model: ModelConfig) -> dict[str, Any]:
    """Returns the arguments of the model, without its vocabulary and layout, for any of these versions of Megatron-LM.

    Raises ConfigError naming the settings for which they have no argument.
    """
    refuse_what_has_no_argument(model)
    window = model.window
    fields = {
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "ffn_hidden_size": model.ffn_dim,
        "kv_channels": model.head_dim,
        "group_query_attention": model.group_query_attention,
        "num_query_groups": model.num_kv_heads,
        "seq_length": model.max_position_embeddings,
        "max_position_embeddings": model.max_position_embeddings,
        "position_embedding_type": model.position_embedding_type,
        "use_rotary_position_embeddings": False,  # an old flag; the type replaces it
        "add_position_embedding": True,
        "rotary_base": int(model.rotary_base) if float(model.rotary_base).is_integer() else model.rotary_base,
        "rotary_percent": model.rotary_percent,
        "rotary_interleaved": model.rotary_interleaved,
        "rotary_seq_len_interpolation_factor": _interpolation(model),
        "use_rope_scaling": model.use_rope_scaling,
        "rope_scaling_factor": model.rope_scaling_factor,
        "normalization": model.normalization,
        "norm_epsilon": model.norm_epsilon,
        "layernorm_epsilon": model.norm_epsilon,
        "apply_layernorm_1p": model.apply_layernorm_1p,
        "layernorm_zero_centered_gamma": model.apply_layernorm_1p,
        "swiglu": model.swiglu,
        "squared_relu": model.squared_relu,
        "openai_gelu": False,
        # Megatron-LM cannot fuse the last and says so.
        "bias_gelu_fusion": model.tanh_gelu and not (model.quick_geglu or model.squared_relu),
        "add_bias_linear": model.add_bias_linear,
        "add_qkv_bias": model.qkv_bias,
        "qk_layernorm": model.qk_layernorm,
        "window_size": None if window is None else (window - 1, 0),
        "window_attn_skip_freq": None
        if window is None
        else [int(window_size is not None) for window_size in model.windows],
        "untie_embeddings_and_output_weights": model.untie_embeddings_and_output_weights,
        "hidden_dropout": model.hidden_dropout,
        "attention_dropout": model.attention_dropout,
        "init_method_std": model.init_method_std,
        "init_method_xavier_uniform": model.init_method_xavier_uniform,
        "make_vocab_size_divisible_by": model.make_vocab_size_divisible_by,
        "vocab_size": model.vocab_size,
        "mtp_num_layers": model.mtp_num_layers or None,
    }
    if model.no_rope_freq is not None:
        fields["no_rope_freq"] = [int(not rotates) for rotates in model.layers_with_rotary]
    yarn = model.position_embedding_type == "yarn" and not model.multi_latent_attention
    return (
        fields
        | expert_arguments(model)
        | (_yarn_arguments(model) if yarn else {})
        | latent_arguments.latent_arguments(model)
        | form_arguments.form_arguments(model)
        | delta_arguments.delta_arguments(model)
    )


def flags_beside(model: ModelConfig) -> list[str]:
    """Returns flags needed in addition to --use-checkpoint-args, which does not take these from the file."""
    fields = arguments_of(model)
    flags = [] if model.norm_epsilon == _EPSILON else ["--norm-epsilon", f"{model.norm_epsilon!r}"]
    switches = {
        "--apply-layernorm-1p": model.apply_layernorm_1p,
        "--qk-layernorm": model.qk_layernorm,
        "--no-bias-gelu-fusion": model.add_bias_linear and not (model.swiglu or fields["bias_gelu_fusion"]),
    }
    flags += [flag for flag, is_on in switches.items() if is_on]
    values = {
        "--rotary-seq-len-interpolation-factor": fields["rotary_seq_len_interpolation_factor"],
        "--no-rope-freq": fields.get("no_rope_freq"),
        "--window-size": fields["window_size"],
        "--window-attn-skip-freq": fields["window_attn_skip_freq"],
        "--rotary-scaling-factor": fields.get("rotary_scaling_factor"),
        "--yarn-original-max-position-embeddings": fields.get("yarn_original_max_position_embeddings"),
        "--yarn-beta-fast": fields.get("yarn_beta_fast"),
        "--yarn-beta-slow": fields.get("yarn_beta_slow"),
        "--mscale": fields.get("mscale"),
        "--mscale-all-dim": fields.get("mscale_all_dim"),
        "--mtp-num-layers": fields["mtp_num_layers"],
    }
    if model.use_rope_scaling:
        flags += ["--use-rope-scaling", "--rope-scaling-factor", f"{model.rope_scaling_factor!r}"]
    for flag, value in values.items():
        flags += [] if value is None else [flag, str(value).replace(" ", "").strip("()")]
    flags += latent_flags(model) + expert_flags(model) + form_arguments.form_flags(model)
    return flags + delta_arguments.delta_flags(model)


def refuse_what_has_no_argument(model: ModelConfig) -> None:
    """Raises ConfigError naming the fields whose values Megatron-LM has no argument for."""
    wrong = without_argument(model) + without_latent_argument(model) + delta_arguments.without_delta_argument(model)
    if model.use_rope_scaling:
        wrong += [
            f"--{name.replace('_', '-')} {getattr(model, name)} (Megatron-LM's Llama-3.1 rope has {built_in} built in)"
            for name, built_in in _LLAMA3.items()
            if getattr(model, name) != built_in
        ]
    if model.position_embedding_type == "yarn" and not model.multi_latent_attention:
        if model.mtp_num_layers:
            wrong.append(f"--mtp-num-layers {model.mtp_num_layers} (Megatron-LM has none with YaRN)")
        if model.rotary_percent != 1:
            wrong.append(f"--rotary-percent {model.rotary_percent} (Megatron-LM's YaRN rotates whole heads)")
        if model.rope_scaling_factor <= 1 and model.yarn_mscale not in (None, 1):
            wrong.append(f"--yarn-mscale {model.yarn_mscale} (Megatron-LM's is 1 for a scaling factor up to 1)")
    wrong += [
        f"--{name.replace('_', '-')}"
        for name in ("add_attn_proj_bias", "add_mlp_bias")
        if getattr(model, name) and not model.add_bias_linear
    ]
    if not model.pre_norm:
        wrong.append("--no-pre-norm")
    if model.post_norm:
        wrong.append("--post-norm")
    if model.add_output_layer_bias:
        wrong.append("--add-output-layer-bias")
    if model.parallel_residual:
        wrong.append("--parallel-residual")
    if model.shared_norm:
        wrong.append("--shared-norm")
    if model.norm_parameters != ALL:
        wrong.append(f"--norm-parameters {model.norm_parameters}")
    if model.qk_layernorm_weight_per_head:
        wrong.append("--qk-layernorm-weight-per-head")
    if model.qk_layernorm_across_heads:
        wrong.append("--qk-layernorm-across-heads")
    if model.embed_layernorm:
        wrong.append("--embed-layernorm")
    if model.position_embedding_type in ("longrope", ALIBI):
        wrong.append(f"--position-embedding-type {model.position_embedding_type}")
    if model.moe_router_enable_expert_bias and model.moe_router_score_function != SIGMOID:
        wrong.append("--moe-router-enable-expert-bias (Megatron-LM has none with the scores of a softmax)")
    if model.qk_layernorm_after_rope:
        wrong.append("--qk-layernorm-after-rope")
    if model.llama_4_scaling_beta is not None:
        wrong.append(f"--llama-4-scaling-beta {model.llama_4_scaling_beta}")
    if model.dynamic_ntk_factor is not None:
        wrong.append(f"--dynamic-ntk-factor {model.dynamic_ntk_factor}")
    if model.rotary_base_local is not None:
        wrong.append(f"--rotary-base-local {model.rotary_base_local}")
    factor = model.rotary_seq_len_interpolation_factor
    if factor is not None and not float(factor).is_integer():
        wrong.append(f"--rotary-seq-len-interpolation-factor {factor} (Megatron-LM's is a whole number)")
    plain: dict[str, float | None] = {"embedding_multiplier_scale": 1, "residual_multiplier": 1, "logits_scaling": 1}
    plain |= dict.fromkeys(("clip_qkv", "softmax_scale", "attn_logit_softcapping", "final_logit_softcapping"))
    wrong += [
        f"--{name.replace('_', '-')} {getattr(model, name)}"
        for name, value in plain.items()
        if getattr(model, name) != value
    ]
    if _rotates_an_odd_number(model):
        wrong.append(
            f"--rotary-percent {model.rotary_percent} of head size {model.head_dim} (an odd number of channels)"
        )
    if model.geglu:
        wrong.append("--geglu")
    if model.xielu:
        wrong.append("--xielu")
    is_gelu = not (model.gated or model.squared_relu or model.xielu)
    if is_gelu and model.tanh_gelu and not model.add_bias_linear:
        wrong.append("--openai-gelu (without biases Megatron-LM's GELU is exact)")
    if wrong:
        raise ConfigError(f"--saver mcore: Megatron-LM has no argument for {', '.join(wrong)}; nothing is written")


def _check_types(settings: Mapping[str, Any], where: str) -> None:
    choices = {"position_embedding_type": _POSITIONS, "normalization": _NORMS}
    choices[form_arguments.SOFTMAX_TYPE] = VANILLA, OFF_BY_ONE, LEARNABLE
    for name, value in settings.items():
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        is_number = is_whole or (isinstance(value, float) and math.isfinite(value))
        fits = (
            (name not in _WHOLE or is_whole)
            and (name not in _NUMBERS or is_number)
            and (name not in (*_WHOLE, *_NUMBERS) or value > 0 or (name in _MAY_BE_ZERO and value == 0))
            and (name not in _SWITCHES or isinstance(value, bool))
            and (name not in choices or value in choices[name])
        )
        if not fits:
            raise CheckpointError(f"{where}: {listed({name: value})}, which is not supported")


def _check_shape(model: ModelConfig, where: str) -> None:
    assert model.num_attention_heads and model.hidden_size
    if model.num_attention_heads % model.num_kv_heads:
        raise CheckpointError(
            f"{where}: {model.num_attention_heads} heads cannot share {model.num_kv_heads} key/value heads"
        )
    is_sized = model.kv_channels is not None or model.multi_latent_attention
    if not is_sized and model.hidden_size % model.num_attention_heads:
        raise CheckpointError(
            f"{where}: hidden size {model.hidden_size} is not a multiple of {model.num_attention_heads} heads"
        )
    if model.mtp_num_layers and model.position_embedding_type == "learned_absolute":
        raise CheckpointError(
            f"{where}: argument mtp_num_layers is {model.mtp_num_layers} beside a table of positions, which is not "
            "supported"
        )
    if _rotates_an_odd_number(model):
        raise CheckpointError(
            f"{where}: argument rotary_percent is {model.rotary_percent}: of head size {model.head_dim} an odd number "
            "of channels, which is not supported"
        )
    try:
        _ = model.windows, model.moe_layers
    except ConfigError as error:
        raise CheckpointError(f"{where}: {error}") from None
    delta_arguments.check_delta_nets(model, where)


def _rotates_an_odd_number(model: ModelConfig) -> bool:
    if model.position_embedding_type not in ("rope", "yarn"):
        return False
    latent = model.multi_latent_attention
    channels = model.qk_pos_emb_head_dim if latent else int(model.head_dim * model.rotary_percent)
    return channels % 2 == 1


def _rotary(settings: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Returns the fields of the position embedding. Each type reads its own arguments."""
    kind = settings.get("position_embedding_type", "learned_absolute")
    if settings.get("use_rotary_position_embeddings"):
        kind = "rope"
    fields: dict[str, Any] = {"position_embedding_type": kind}
    if kind in ("rope", "yarn"):
        fields["rotary_base"] = float(settings.get("rotary_base", 10000))
        fields["rotary_percent"] = float(settings.get("rotary_percent", 1.0))
        fields["rotary_interleaved"] = settings.get("rotary_interleaved", False)
        if settings.get("no_rope_freq") is not None:
            fields["no_rope_freq"] = str(settings["no_rope_freq"])
    if kind == "yarn":
        if fields["rotary_percent"] != 1:
            raise CheckpointError(
                f"{where}: argument rotary_percent is {fields['rotary_percent']} beside YaRN, which rotates whole "
                "heads there; that is not supported"
            )
        return fields | _yarn(settings)
    if kind == "rope" and settings.get("rotary_seq_len_interpolation_factor") is not None:
        if settings.get("use_rope_scaling"):
            raise CheckpointError(
                f"{where}: arguments use_rope_scaling and rotary_seq_len_interpolation_factor are both given, which is "
                "not supported"
            )
        fields["rotary_seq_len_interpolation_factor"] = float(settings["rotary_seq_len_interpolation_factor"])
    if kind == "rope" and settings.get("use_rope_scaling"):
        fields |= {
            "use_rope_scaling": True,
            "rope_scaling_factor": float(settings.get("rope_scaling_factor", 8.0)),
            **_LLAMA3,
        }
    return fields


def _yarn(settings: Mapping[str, Any]) -> dict[str, Any]:
    scale = float(settings.get("rotary_scaling_factor", 1.0))
    factor, all_dim = float(settings.get("mscale", 1.0)), float(settings.get("mscale_all_dim", 0.0))
    is_default = (factor, all_dim) == (1.0, 0.0)
    return {
        "rope_scaling_factor": scale,
        "rope_scaling_original_max_position_embeddings": settings.get(
            "yarn_original_max_position_embeddings", _YARN_CONTEXT
        ),
        "yarn_beta_fast": float(settings.get("yarn_beta_fast", 32.0)),
        "yarn_beta_slow": float(settings.get("yarn_beta_slow", 1.0)),
        "yarn_correction_range_round_to_int": settings.get("yarn_correction_range_round_to_int", True),
        "yarn_mscale": None if is_default else _temperature(scale, factor) / _temperature(scale, all_dim),
    }


def _yarn_arguments(model: ModelConfig) -> dict[str, Any]:
    """Returns YaRN's arguments. With mscale_all_dim 0 the factor on cos and sin is 0.1 mscale ln(scaling factor) +
    1."""
    scale, mscale = model.rope_scaling_factor, 1.0
    if model.yarn_mscale is not None and scale > 1:
        mscale = (model.yarn_mscale - 1.0) / (0.1 * math.log(scale))
    return {
        "rotary_scaling_factor": scale,
        "yarn_original_max_position_embeddings": model.rope_scaling_original_max_position_embeddings,
        "yarn_beta_fast": model.yarn_beta_fast,
        "yarn_beta_slow": model.yarn_beta_slow,
        "yarn_correction_range_round_to_int": model.yarn_correction_range_round_to_int,
        "mscale": mscale,
        "mscale_all_dim": 0.0,
    }


def _temperature(scale: float, factor: float) -> float:
    return 0.1 * factor * math.log(scale) + 1.0 if scale > 1 else 1.0


def _interpolation(model: ModelConfig) -> int | None:
    factor = model.rotary_seq_len_interpolation_factor
    return None if factor is None or model.position_embedding_type != "rope" else int(factor)


def _windows(settings: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Returns the window in the format of this program's flags."""
    size, skip = settings.get("window_size"), settings.get("window_attn_skip_freq")
    if size is None:
        return {}
    if not (isinstance(size, tuple | list) and len(size) == 2 and all(isinstance(side, int) for side in size)):
        raise CheckpointError(f"{where}: {listed({'window_size': size})}, which is not supported")
    if tuple(size) == (-1, -1):  # no limit on either side; attention is causal anyway
        return {}
    return {"window_size": ",".join(map(str, size)), "window_attn_skip_freq": None if skip is None else str(skip)}


def _fuses_gelu(settings: Mapping[str, Any], has_biases: bool, where: str) -> bool:
    """Returns whether GELU is fused with its bias, which makes it the tanh form. Without biases it is never fused."""
    on = {name: True for name in ("use_te_activation_func", "use_transformer_engine_op_fuser") if settings.get(name)}
    if on:
        raise CheckpointError(f"{where}: {listed(on)}, which is not supported with GELU")
    if has_biases and "bias_gelu_fusion" not in settings:
        raise CheckpointError(
            f"{where}: its arguments do not contain bias_gelu_fusion, which selects the form of its GELU"
        )
    return has_biases and bool(settings["bias_gelu_fusion"])


def _vocabulary(settings: Mapping[str, Any], where: str, *, counts_end: bool) -> int:
    """Returns the vocabulary size without padding.

    `counts_end` means that a NullTokenizer's --vocab-size includes the end-of-document id, as since core 0.18.
    """
    if "vocab_size" in settings:
        return int(settings["vocab_size"]) + (settings.get("tokenizer_type") == "NullTokenizer" and not counts_end)
    if "padded_vocab_size" not in settings:
        raise CheckpointError(f"{where}: its arguments do not contain the vocabulary size; give --true-vocab-size")
    return int(settings["padded_vocab_size"])
