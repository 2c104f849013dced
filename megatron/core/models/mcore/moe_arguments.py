"""Megatron-LM's arguments of experts: read as fields of the model, and written.

READ describe the model. OFF change it in a way that is not here, unless they have one of these values. NO_PART are
settings of a run: balance, capacity, dispatch, kernels, logs. Without num_experts none of them has an effect.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from megatron.base.errors import CheckpointError, ConfigError
from megatron.config.model import ModelConfig
from megatron.config.moe import SIGMOID, SOFTMAX
from megatron.config.moe_training import SINKHORN

_DESCRIBE = """
num_experts moe_layer_freq moe_ffn_hidden_size moe_router_topk moe_router_score_function moe_router_pre_softmax
moe_router_num_groups moe_router_group_topk moe_router_topk_scaling_factor moe_router_dtype
moe_router_enable_expert_bias moe_router_load_balancing_type moe_shared_expert_intermediate_size
moe_shared_expert_gate
"""
READ = frozenset(_DESCRIBE.split())
OFF: dict[str, tuple[Any, ...]] = {
    "moe_apply_probs_on_input": (False, None),
    "moe_extended_tp": (False, None),
    "moe_input_jitter_eps": (None, 0.0),
    "moe_latent_size": (None,),
    "moe_mlp_glu_interleave_size": (None,),
    "moe_router_topk_limited_devices": (None,),
    "moe_shared_expert_glu_interleave_size": (None,),
    "moe_single_grouped_bias": (False, None),
    "moe_single_grouped_weight": (False, None),
}
_SETTINGS = """
moe_aux_loss_coeff moe_combine_bwd_dtype moe_deepep_num_sms moe_dispatch_fwd_dtype moe_enable_deepep
moe_enable_routing_replay moe_expert_capacity_factor moe_expert_rank_capacity_factor moe_flex_dispatcher_backend
moe_flex_dispatcher_num_sms moe_grouped_gemm moe_hybridep_num_blocks_permute moe_hybridep_num_blocks_unpermute
moe_hybridep_num_sms moe_hybridep_num_sms_preprocessing moe_hybridep_pad_uneven_dispatch_inputs moe_layer_recompute
moe_ncclep_zero_copy moe_pad_expert_input_to_capacity moe_pad_experts_for_cuda_graph_inference moe_paged_stash
moe_paged_stash_buffer_size_factor_cpu moe_paged_stash_buffer_size_factor_cuda moe_paged_stash_page_size
moe_per_layer_logging moe_permute_fusion moe_permute_fusion_into_hybridep moe_router_bias_update_rate
moe_router_force_biased moe_router_force_load_balancing moe_router_fusion moe_router_padding_for_fp8
moe_router_padding_for_quantization moe_router_quantile_balancing_ema moe_routing_trace_capture_hidden_states
moe_routing_trace_capture_logits moe_routing_trace_dump_weights moe_routing_trace_max_training_iters
moe_routing_trace_path moe_shared_expert_overlap moe_token_dispatcher_type moe_token_drop_policy moe_token_dropping
moe_upcycling_granularity moe_use_grouped_tensor moe_use_legacy_grouped_gemm moe_use_upcycling moe_z_loss_coeff
"""
NO_PART = frozenset(_SETTINGS.split())
_SIZES = (
    "num_experts",
    "moe_router_topk",
    "moe_ffn_hidden_size",
    "moe_shared_expert_intermediate_size",
    "moe_router_num_groups",
    "moe_router_group_topk",
)
_SWITCHES = ("moe_router_pre_softmax", "moe_router_enable_expert_bias", "moe_shared_expert_gate")
_CHOICES = {"moe_router_score_function": (SOFTMAX, SIGMOID), "moe_router_dtype": ("fp32", "fp64")}
QUANTILES = "quantile_balancing"  # another choice of experts


def experts_of(settings: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Returns the fields of a model with experts; none if num_experts is not among the arguments.

    settings: the arguments in READ that are not None. Without moe_router_dtype the logits there have the model's dtype;
    here they are fp32, which is another choice only where two experts are equal but for rounding. Raises
    CheckpointError naming the argument and the reason.
    """
    if "num_experts" not in settings:
        return {}

    def refuse(name: str, reason: str) -> CheckpointError:
        return CheckpointError(f"{where}: argument {name} is {settings.get(name)!r}, {reason}")

    for name in sorted(READ & settings.keys()):
        value = settings[name]
        is_size = isinstance(value, int) and not isinstance(value, bool) and value > 0
        fits = (name not in _SIZES or is_size) and (name not in _SWITCHES or isinstance(value, bool))
        if not fits or value not in _CHOICES.get(name, (value,)):
            raise refuse(name, "which is not supported")
    experts, topk = settings["num_experts"], settings.get("moe_router_topk", 2)
    groups, group_topk = settings.get("moe_router_num_groups"), settings.get("moe_router_group_topk")
    scaling = settings.get("moe_router_topk_scaling_factor") or None
    if topk > experts:
        raise refuse("moe_router_topk", f"and there are {experts} experts")
    if (groups is None) != (group_topk is None):
        raise refuse("moe_router_num_groups", f"and moe_router_group_topk is {group_topk}: one needs the other")
    if groups is not None and (experts % groups or group_topk > groups or topk > group_topk * (experts // groups)):
        raise refuse(
            "moe_router_num_groups", f"which does not fit {experts} experts, {topk} per token from {group_topk} groups"
        )
    if scaling is not None and not (isinstance(scaling, int | float) and scaling > 0):
        raise refuse("moe_router_topk_scaling_factor", "which is not supported")
    if settings.get("moe_router_enable_expert_bias") and settings.get("moe_router_score_function") != SIGMOID:
        raise refuse("moe_router_enable_expert_bias", "which is not supported with softmax scores")
    if settings.get("moe_shared_expert_gate") and "moe_shared_expert_intermediate_size" not in settings:
        raise refuse("moe_shared_expert_gate", "and there is no shared expert")
    balancing = _listed(settings.get("moe_router_load_balancing_type"))
    if QUANTILES in balancing:
        raise refuse("moe_router_load_balancing_type", f"and {QUANTILES} chooses experts in a way that is not here")
    fields = {name: settings[name] for name in (*_SIZES, *_SWITCHES, "moe_router_score_function") if name in settings}
    if SINKHORN in balancing:  # which decides about the scores, whatever the other arguments are
        fields |= {
            "moe_router_score_function": SIGMOID if topk == 1 else SOFTMAX,
            "moe_router_pre_softmax": topk > 1,
            "moe_router_num_groups": None,
            "moe_router_group_topk": None,
        }
        scaling = None
    dtype, frequency = settings.get("moe_router_dtype", "fp32"), settings.get("moe_layer_freq", 1)
    if isinstance(frequency, bool) or not isinstance(frequency, int | list | tuple):
        raise refuse("moe_layer_freq", "which is not supported")
    return fields | {
        "moe_layer_freq": None if frequency == 1 else str(frequency if isinstance(frequency, int) else list(frequency)),
        "moe_router_dtype": dtype,
        "moe_router_topk_scaling_factor": None if scaling is None else float(scaling),
    }


def expert_arguments(model: ModelConfig) -> dict[str, Any]:
    """Returns the arguments of the experts of a model in which `without_argument` finds nothing."""
    if model.num_experts is None:
        return {}
    names = (*_SIZES, *_SWITCHES, "moe_router_score_function", "moe_router_topk_scaling_factor")
    return {name: getattr(model, name) for name in names} | {
        "moe_ffn_hidden_size": model.moe_ffn_dim,
        "moe_layer_freq": 1 if all(model.moe_layers) else [int(has) for has in model.moe_layers],
        "moe_router_dtype": model.moe_router_dtype,
    }


def expert_flags(model: ModelConfig) -> list[str]:
    """Returns flags needed in addition to --use-checkpoint-args, which does not take these from the file."""
    if model.num_experts is None:
        return []
    values = {
        "--moe-router-num-groups": model.moe_router_num_groups,
        "--moe-router-group-topk": model.moe_router_group_topk,
        "--moe-router-dtype": model.moe_router_dtype,
    }
    gate = ["--moe-shared-expert-gate"] if model.moe_shared_expert_gate else []
    return [*gate, *(word for flag, value in values.items() if value is not None for word in (flag, str(value)))]


def without_argument(model: ModelConfig) -> list[str]:
    """Returns the flags of the experts, with their reasons, for which Megatron-LM has no argument."""
    if model.num_experts is None:
        return []
    flags, normalization = [], model.moe_router_topk_normalization
    theirs = dataclasses.replace(model, moe_router_topk_normalization="auto").normalizes_topk
    if model.normalizes_topk != theirs:
        flags.append(f"--moe-router-topk-normalization {normalization} (Megatron-LM's follows from its other flags)")
    has_single_expert_groups = model.moe_router_topk // (model.moe_router_group_topk or 1) == 1
    if (
        model.moe_router_num_groups is not None
        and model.moe_router_group_score == "max"
        and not has_single_expert_groups
    ):
        flags.append("--moe-router-group-score max (Megatron-LM scores a group by the sum of its best experts)")
    return flags


def check_expert_shards(model: ModelConfig, *, tp: int, ep: int, etp: int) -> None:
    """Raises ConfigError unless the experts of a model can be cut for files of these sizes."""
    if model.num_experts is None:
        sizes = {"--target-expert-parallel-size": ep, "--target-expert-tensor-parallel-size": etp}
        if flags := [f"{flag} {size}" for flag, size in sizes.items() if size > 1]:
            raise ConfigError(f"{' and '.join(flags)}: the model has no experts to share; leave it out")
        return
    if model.num_experts % ep:
        raise ConfigError(f"--target-expert-parallel-size {ep} does not divide the model's {model.num_experts} experts")
    if tp % etp:
        raise ConfigError(
            f"--target-expert-tensor-parallel-size {etp} does not divide --target-tensor-parallel-size {tp}, and files "
            "are named by the ranks of the latter; give --format torch_dist"
        )
    if model.moe_ffn_dim % etp:
        raise ConfigError(
            f"{etp} tensor-parallel ranks of experts cannot share their width {model.moe_ffn_dim} equally"
        )
    shared = model.moe_shared_expert_intermediate_size
    if shared is not None and shared % tp:
        raise ConfigError(f"{tp} tensor-parallel ranks cannot share the width {shared} of the shared experts equally")


def check_shares(arguments: Mapping[str, Any], ep: int, where: str) -> None:
    """Raises CheckpointError unless the ranks of ep can share the experts of these arguments equally."""
    experts = arguments.get("num_experts")
    if isinstance(experts, int) and experts % ep:
        raise CheckpointError(f"{where}: argument num_experts is {experts}, which ep {ep} cannot share equally")


def _listed(kinds: Any) -> tuple[Any, ...]:
    return tuple(kinds) if isinstance(kinds, list | tuple) else (kinds,)
