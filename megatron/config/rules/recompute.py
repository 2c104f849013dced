"""Rules about activation recompute. See rules/model.py for the form of a rule."""

from __future__ import annotations

from megatron.config.recompute import BALANCED, MLP_ACT, WHOLE_MLP
from megatron.config.run import RunConfig


def full_recompute_is_complete(run: RunConfig, world_size: int) -> str | None:
    """The grouping of whole layers has no default."""
    r = run.recompute
    wanted = {"--recompute-method": r.recompute_method, "--recompute-num-layers": r.recompute_num_layers}
    missing = [name for name, value in wanted.items() if value is None]
    if r.is_full and missing:
        return (
            f"--recompute-granularity full needs {' and '.join(missing)}; give --recompute-method uniform "
            "--recompute-num-layers 1 to keep the input of every layer"
        )
    return None


def full_recompute_is_alone(run: RunConfig, world_size: int) -> str | None:
    """A layer that is recomputed as a whole keeps no parts."""
    r = run.recompute
    parts = {
        "--recompute-activations": r.recompute_activations,
        "--kaimm-recompute-norm": r.kaimm_recompute_norm,
        "--kaimm-recompute-mlp-activation-func": r.kaimm_recompute_mlp_activation_func,
    }
    given = [name for name, on in parts.items() if on]
    if r.is_full and given:
        return f"{', '.join(given)} asks for parts of layers that --recompute-granularity full recomputes whole; remove one"
    return None


def recomputed_parts_are_apart(run: RunConfig, world_size: int) -> str | None:
    """The activation is a part of the MLP, so only one of the two may be recomputed."""
    if {WHOLE_MLP, MLP_ACT} <= run.recompute.modules:
        return "--recompute-modules mlp recomputes the whole MLP, mlp_act a part of it; remove one of them"
    return None


def balanced_recompute_is_alone(run: RunConfig, world_size: int) -> str | None:
    """Balanced recompute excludes the manual recompute flags."""
    r = run.recompute
    if r.recompute_policy != BALANCED:
        return None
    given = {
        "--recompute-granularity": r.recompute_granularity is not None,
        "--recompute-activations": r.recompute_activations,
        "--kaimm-recompute-norm": r.kaimm_recompute_norm,
        "--kaimm-recompute-mlp-activation-func": r.kaimm_recompute_mlp_activation_func,
        "the offload of activations": run.activation_offload.kind is not None,
    }
    found = [name for name, on in given.items() if on]
    if found:
        return f"--recompute-policy balanced chooses for itself and has no room for {', '.join(found)}; remove one"
    return None


def balanced_recompute_has_a_budget(run: RunConfig, world_size: int) -> str | None:
    """The memory budget has no default."""
    if run.recompute.recompute_policy == BALANCED and run.recompute.activation_memory_budget is None:
        return (
            "--recompute-policy balanced needs --activation-memory-budget, bytes or a share; give 0.5 for half of all"
        )
    return None


RULES = (
    balanced_recompute_is_alone,
    balanced_recompute_has_a_budget,
    full_recompute_is_complete,
    full_recompute_is_alone,
    recomputed_parts_are_apart,
)
