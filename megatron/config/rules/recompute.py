"""Rules about activation recompute."""

from __future__ import annotations

from functools import partial

from megatron.config.activation_offload import ActivationOffloadConfig
from megatron.config.model import ModelConfig
from megatron.config.recompute import (
    BALANCED,
    DENSE_MODULES,
    MLA_UP_PROJ,
    MLP_ACT,
    MOE_ACT,
    MOE_MODULES,
    NORM,
    SHARED_EXPERTS,
    WHOLE_MLP,
    WHOLE_MOE,
    RecomputeConfig,
)
from megatron.config.rules.rule import ConfigRule
from megatron.config.rules.sources import shape_is_pending
from megatron.config.run import RunConfig


def full_recompute_is_complete(recompute: RecomputeConfig) -> str | None:
    """The grouping of whole layers has no default."""
    wanted = {
        "--recompute-method": recompute.recompute_method,
        "--recompute-num-layers": recompute.recompute_num_layers,
    }
    missing = [name for name, value in wanted.items() if value is None]
    if recompute.is_full and missing:
        return (
            f"--recompute-granularity full needs {' and '.join(missing)}; give --recompute-method uniform "
            "--recompute-num-layers 1 to keep the input of every layer"
        )
    return None


def full_recompute_is_alone(recompute: RecomputeConfig) -> str | None:
    """A layer that is recomputed as a whole keeps no parts."""
    parts = {
        "--recompute-activations": recompute.recompute_activations,
        "--kaimm-recompute-norm": recompute.kaimm_recompute_norm,
        "--kaimm-recompute-mlp-activation-func": recompute.kaimm_recompute_mlp_activation_func,
    }
    flags = [name for name, on in parts.items() if on]
    if recompute.is_full and flags:
        return (
            f"{', '.join(flags)} asks for parts of layers that --recompute-granularity full recomputes whole; "
            "remove one"
        )
    return None


def recomputed_parts_are_apart(recompute: RecomputeConfig) -> str | None:
    """A part is recomputed by itself or with the whole that contains it."""
    for whole, parts in ((WHOLE_MLP, (MLP_ACT,)), (WHOLE_MOE, (SHARED_EXPERTS, MOE_ACT))):
        if whole in recompute.modules and (nested := [part for part in parts if part in recompute.modules]):
            return f"--recompute-modules {whole} recomputes {' and '.join(nested)}, too; remove one of them"
    return None


def projections_up_exist(recompute: RecomputeConfig, model: ModelConfig) -> str | None:
    """Only latents are projected up."""
    if MLA_UP_PROJ in recompute.modules and not model.multi_latent_attention:
        return (
            f"--recompute-modules {MLA_UP_PROJ} recomputes the projections from latents, and there are none; remove it, "
            "or give --multi-latent-attention"
        )
    return None


def shared_norm_is_computed_once(recompute: RecomputeConfig, model: ModelConfig) -> str | None:
    """A norm that is computed again belongs to the one part of the layer behind it."""
    if model.shared_norm and NORM in recompute.modules:
        return (
            "--shared-norm does not go with the recompute of norms, because attention and MLP read its output; leave "
            "out norm of --recompute-modules (--kaimm-recompute-norm, --recompute-activations)"
        )
    return None


def projections_up_are_not_offloaded(recompute: RecomputeConfig, offload: ActivationOffloadConfig) -> str | None:
    """The offload does not see what attention keeps."""
    if MLA_UP_PROJ in recompute.modules and offload.kind is not None:
        return (
            f"--recompute-modules {MLA_UP_PROJ} keeps little that could be offloaded, and does not go with offload of "
            "activations; remove one of them"
        )
    return None


def recomputed_parts_exist(recompute: RecomputeConfig, model: ModelConfig) -> str | None:
    """Some layer has each of the recomputed parts."""
    dense, moe = ([part for part in parts if part in recompute.modules] for parts in (DENSE_MODULES, MOE_MODULES))
    if moe and not any(model.moe_layers):
        return (
            f"--recompute-modules {' '.join(moe)} names parts of layers with experts; remove it, or give --num-experts"
        )
    if SHARED_EXPERTS in moe and model.moe_shared_expert_intermediate_size is None:
        return (
            f"--recompute-modules {SHARED_EXPERTS} recomputes shared experts, and there are none; remove it, or give "
            "--moe-shared-expert-intermediate-size"
        )
    if dense and all(model.moe_layers):
        instead = {MLP_ACT: MOE_ACT, WHOLE_MLP: WHOLE_MOE}[dense[0]]
        return (
            f"--recompute-modules {dense[0]} is for layers without experts, and all have experts; give {instead} "
            "instead"
        )
    return None


def balanced_recompute_is_alone(recompute: RecomputeConfig, activation_offload: ActivationOffloadConfig) -> str | None:
    """Balanced recompute excludes the manual recompute flags."""
    if recompute.recompute_policy != BALANCED:
        return None
    flags = {
        "--recompute-granularity": recompute.recompute_granularity is not None,
        "--recompute-activations": recompute.recompute_activations,
        "--kaimm-recompute-norm": recompute.kaimm_recompute_norm,
        "--kaimm-recompute-mlp-activation-func": recompute.kaimm_recompute_mlp_activation_func,
        "the offload of activations": activation_offload.kind is not None,
    }
    conflicts = [name for name, on in flags.items() if on]
    if conflicts:
        return f"--recompute-policy balanced chooses for itself and has no room for {', '.join(conflicts)}; remove one"
    return None


def balanced_recompute_has_a_budget(recompute: RecomputeConfig) -> str | None:
    """The memory budget has no default."""
    if recompute.recompute_policy == BALANCED and recompute.activation_memory_budget is None:
        return (
            "--recompute-policy balanced needs --activation-memory-budget, bytes or a share; give 0.5 for half of all"
        )
    return None


def rules(run: RunConfig) -> list[ConfigRule]:
    """Returns the rules about activation recompute: that about parts of layers once the layers are known."""
    flag_rules = [
        partial(balanced_recompute_is_alone, run.recompute, run.activation_offload),
        partial(balanced_recompute_has_a_budget, run.recompute),
        partial(full_recompute_is_complete, run.recompute),
        partial(full_recompute_is_alone, run.recompute),
        partial(recomputed_parts_are_apart, run.recompute),
        partial(projections_up_are_not_offloaded, run.recompute, run.activation_offload),
    ]
    if shape_is_pending(run.model, run.checkpoint):
        return flag_rules
    return [
        *flag_rules,
        partial(recomputed_parts_exist, run.recompute, run.model),
        partial(projections_up_exist, run.recompute, run.model),
        partial(shared_norm_is_computed_once, run.recompute, run.model),
    ]
