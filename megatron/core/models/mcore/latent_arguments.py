"""Megatron-LM's arguments of latent attention: read as fields of the model, and written.

Its layers rotate by an embedding of their own: `rope_type`, YaRN if it is not given, with the scaling factor of
`rotary_scaling_factor` and constants that no argument sets. What position_embedding_type says is without effect, but
for a table of positions, which would be added to the embeddings.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.base.errors import CheckpointError
from megatron.config.model import ModelConfig
from megatron.core.models.mcore.known_arguments import listed

WHOLE = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
READ = frozenset({"multi_latent_attention", "rope_type", *WHOLE})
_DEFAULTS = {"kv_lora_rank": 32, "qk_head_dim": 128, "qk_pos_emb_head_dim": 64, "v_head_dim": 128}
_ROPE, _YARN = "rope", "yarn"
# The values that are built into its YaRN; until core 0.13 the original context was max_position_embeddings.
_BUILT_IN: dict[str, Any] = {
    "rope_scaling_original_max_position_embeddings": 4096,
    "yarn_beta_fast": 32.0,
    "yarn_beta_slow": 1.0,
    "yarn_correction_range_round_to_int": True,
    "yarn_mscale": None,
}
# Fields whose arguments have no effect on its latent attention.
_WITHOUT_EFFECT: dict[str, Any] = {"kv_channels": None, "num_query_groups": None, "add_qkv_bias": False}


def latents_of(settings: Mapping[str, Any], where: str, *, has_biases: bool, has_rope_type: bool) -> dict[str, Any]:
    """Returns the fields of a model with latent attention; none without it.

    settings: the arguments that are not None. has_biases: linear layers have biases. has_rope_type: rope_type is among
    the arguments, as since core 0.14. Raises CheckpointError naming the argument and the reason.
    """
    if not settings.get("multi_latent_attention"):
        return {}

    def refuse(*names: str) -> CheckpointError:
        values = {name: settings.get(name) for name in names}
        return CheckpointError(f"{where}: {listed(values)} beside latent attention, which is not supported")

    kind, scale = settings.get("rope_type", _YARN), float(settings.get("rotary_scaling_factor", 1.0))
    positions = settings.get("position_embedding_type", "learned_absolute")
    if kind not in (_ROPE, _YARN):
        raise refuse("rope_type")
    if positions == "learned_absolute" and not settings.get("use_rotary_position_embeddings"):
        raise refuse("position_embedding_type")
    for name in ("no_rope_freq", "rotary_interleaved", "group_query_attention"):
        if settings.get(name):
            raise refuse(name)
    if has_biases:
        raise refuse("add_bias_linear")
    if kind == _ROPE and float(settings.get("rotary_percent", 1.0)) != 1:
        raise refuse("rope_type", "rotary_percent")
    mscale, all_dim = float(settings.get("mscale", 1.0)), float(settings.get("mscale_all_dim", 0.0))
    if kind == _ROPE and scale > 1 and all_dim:
        raise refuse("rope_type", "rotary_scaling_factor", "mscale_all_dim")
    if scale > 1 and not has_rope_type and mscale != all_dim:  # core 0.13 scaled the softmax by mscale
        raise refuse("mscale", "mscale_all_dim")
    fields = {
        "multi_latent_attention": True,
        **{name: settings.get(name, _DEFAULTS.get(name)) for name in WHOLE},
        "position_embedding_type": _ROPE,
        "rotary_base": float(settings.get("rotary_base", 10000)),
        **_WITHOUT_EFFECT,
    }
    if kind == _ROPE or scale == 1:
        return fields
    original = {} if has_rope_type else {"max_position_embeddings": settings.get("max_position_embeddings")}
    return fields | {
        **_BUILT_IN,
        **{f"rope_scaling_original_{name}": value for name, value in original.items()},
        "position_embedding_type": _YARN,
        "rope_scaling_factor": scale,
        "mscale": mscale,
        "mscale_all_dim": all_dim,
    }


def latent_arguments(model: ModelConfig) -> dict[str, Any]:
    """Returns the arguments of latent attention of a model in which `without_latent_argument` finds nothing.

    kv_channels, which its attention in plain torch takes for the channels of values, has no other effect.
    """
    if not model.multi_latent_attention:
        return {}
    stretched = model.position_embedding_type == _YARN
    return {
        "multi_latent_attention": True,
        **{name: getattr(model, name) for name in WHOLE},
        "kv_channels": model.v_head_dim,
        "position_embedding_type": _ROPE,
        "rope_type": _YARN if stretched else _ROPE,
        "rotary_percent": 1.0,
        "rotary_interleaved": False,
        "rotary_scaling_factor": model.rope_scaling_factor if stretched else 1.0,
        "mscale": model.mscale,
        "mscale_all_dim": model.mscale_all_dim if stretched else 0.0,
    }


def latent_flags(model: ModelConfig) -> list[str]:
    """Returns flags needed in addition to --use-checkpoint-args, without those that scale positions."""
    arguments = latent_arguments(model)
    flags = ["--multi-latent-attention"] if arguments else []
    for name in (*WHOLE, "rope_type") if arguments else ():
        value = arguments[name]
        flags += [] if value is None else [f"--{name.replace('_', '-')}", str(value)]
    return flags


def without_latent_argument(model: ModelConfig) -> list[str]:
    """Returns the flags of a model with latent attention, with their reasons, for which Megatron-LM has no argument."""
    if not model.multi_latent_attention:
        return []
    flags = []
    if model.qk_layernorm and model.latent_epsilon != model.norm_epsilon:
        flags.append(
            f"--latent-norm-epsilon {model.latent_epsilon} (Megatron-LM's norms have one epsilon, here "
            f"{model.norm_epsilon})"
        )
    if model.position_embedding_type not in (_ROPE, _YARN):
        flags.append(f"--position-embedding-type {model.position_embedding_type} (Megatron-LM rotates latent keys)")
    if model.position_embedding_type == _YARN:
        flags += [
            f"--{name.replace('_', '-')} {getattr(model, name)} (Megatron-LM's YaRN of latent attention has "
            f"{built_in} built in)"
            for name, built_in in _BUILT_IN.items()
            if getattr(model, name) != built_in
        ]
    if model.use_rope_scaling:
        flags.append("--use-rope-scaling (Megatron-LM does not scale the rotation of latent attention so)")
    if model.rotary_seq_len_interpolation_factor is not None:
        flags.append("--rotary-seq-len-interpolation-factor (Megatron-LM does not apply it to latent attention)")
    if not all(model.layers_with_rotary):
        flags.append(f"--no-rope-freq {model.no_rope_freq} (Megatron-LM rotates in every layer of latent attention)")
    return flags
