"""Rules about the offload of activations and weights."""

from __future__ import annotations

from functools import partial

from megatron.config.activation_offload import AUTO, OFFLOAD_MODULES, ActivationOffloadConfig
from megatron.config.model import ModelConfig
from megatron.config.parallel import ParallelConfig
from megatron.config.pipeline import pipeline_settings
from megatron.config.recompute import MLP_ACT, NORM, WHOLE_MLP, RecomputeConfig
from megatron.config.rules.rule import ConfigRule
from megatron.config.rules.sources import shape_is_pending
from megatron.config.run import RunConfig

_OF_MLP = {"mlp_fc1", "mlp_act", "mlp_fc2"}
# Recomputed part -> parts of --offload-modules that then save nothing.
_DROPPED = {NORM: {"attn_norm", "mlp_norm"}, MLP_ACT: {"mlp_act"}, WHOLE_MLP: _OF_MLP}


def offload_ratio_is_a_share(activation_offload: ActivationOffloadConfig) -> str | None:
    """--pipeline-offload-ratio is a number from 0 to 1, or auto."""
    ratio = activation_offload.pipeline_offload_ratio
    if ratio in (None, AUTO):
        return None
    try:
        fits = 0.0 <= float(ratio or "") <= 1.0
    except ValueError:
        fits = False
    return None if fits else f"--pipeline-offload-ratio {ratio} is no share; give a number from 0 to 1, or auto"


def one_way_of_activation_offload(activation_offload: ActivationOffloadConfig) -> str | None:
    """Only one flag selects the offloaded activations."""
    flags = [
        name
        for name, on in (
            ("--pipeline-offload-ratio", activation_offload.pipeline_offload_ratio is not None),
            ("--cpu-offloading", activation_offload.cpu_offloading),
            ("--fine-grained-activation-offloading", activation_offload.fine_grained_activation_offloading),
        )
        if on
    ]
    if len(flags) < 2:
        return None
    return f"{' and '.join(flags)} each say which activations move; give one of them"


def offloaded_inputs_have_one_reader(activation_offload: ActivationOffloadConfig, model: ModelConfig) -> str | None:
    """In a parallel layer two norms save the same residual stream."""
    offloads = (
        activation_offload.pipeline_offload_ratio is not None,
        activation_offload.cpu_offloading,
        activation_offload.fine_grained_activation_offloading,
    )
    if model.parallel_residual and any(offloads):
        return (
            "--parallel-residual does not go with the offload of activations, because two norms save the same tensor; "
            "recompute them instead (--kaimm-recompute-norm)"
        )
    return None


def offloaded_layers_exist(
    activation_offload: ActivationOffloadConfig, parallel: ParallelConfig, model: ModelConfig
) -> str | None:
    """--cpu-offloading offloads some layers of every stage except the last, whose backward comes first."""
    number = activation_offload.cpu_offloading_num_layers
    if not activation_offload.cpu_offloading:
        return None
    layers = _layers_of_stages(parallel, model)
    fewest = min(count for count in layers if count)
    if 0 < number < fewest:
        return None
    if fewest == 1:
        return (
            f"--cpu-offloading-num-layers {number} moves nothing of a stage with one layer, which its backward needs "
            "at once; remove --cpu-offloading, or use fewer pipeline stages"
        )
    return (
        f"--cpu-offloading-num-layers {number} must be 1 to {fewest - 1}: a pipeline stage has {fewest} layers, and "
        f"the last one stays; {max(1, fewest - 2)} needs the least memory"
    )


def offloaded_modules_are_given(
    activation_offload: ActivationOffloadConfig, parallel: ParallelConfig, model: ModelConfig
) -> str | None:
    """--fine-grained-activation-offloading offloads something."""
    if not activation_offload.fine_grained_activation_offloading:
        return None
    if not activation_offload.offload_modules:
        return "--fine-grained-activation-offloading moves no part of a layer; give --offload-modules, say core_attn"
    layers = _layers_of_stages(parallel, model)
    if max(layers) < 3:
        return (
            f"--fine-grained-activation-offloading moves nothing: a pipeline stage has {max(layers)} layers at most, "
            "and the last two stay; remove it, or use fewer pipeline stages"
        )
    return None


def offloaded_modules_keep_something(
    activation_offload: ActivationOffloadConfig, recompute: RecomputeConfig, model: ModelConfig
) -> str | None:
    """Recomputed activations are not saved, so they cannot be offloaded."""
    if not activation_offload.fine_grained_activation_offloading:
        return None
    gone = set(OFFLOAD_MODULES) if recompute.is_full else set[str]()
    for name in recompute.modules:
        # A norm behind attention or MLP is not recomputed, and belongs to the same part.
        gone |= set() if name == NORM and model.post_norm else _DROPPED.get(name, set())
    if unsaved := [part for part in activation_offload.offload_modules or () if part in gone]:
        return (
            f"--offload-modules {' '.join(unsaved)} names parts that recompute ({recompute}) does not save; remove one"
        )
    return None


def offloaded_modules_exist(activation_offload: ActivationOffloadConfig, model: ModelConfig) -> str | None:
    """Parts of the MLP are in layers without experts. Experts keep all that they need in one step, so they have no
    parts."""
    parts = [part for part in activation_offload.offload_modules or () if part in _OF_MLP]
    if not (activation_offload.fine_grained_activation_offloading and parts and all(model.moe_layers)):
        return None
    return (
        f"--offload-modules {' '.join(parts)} names parts of an MLP, and all layers have experts, whose activations "
        "move only with --pipeline-offload-ratio or --cpu-offloading; remove them, or give one of these"
    )


def offloaded_weights_exist(
    activation_offload: ActivationOffloadConfig, parallel: ParallelConfig, model: ModelConfig
) -> str | None:
    """--cpu-offloading-weights offloads some layers of every stage, possibly all of them."""
    number = activation_offload.cpu_offloading_num_layers
    if not activation_offload.cpu_offloading_weights or activation_offload.cpu_offloading:
        return None
    layers = _layers_of_stages(parallel, model)
    fewest = min(count for count in layers if count)
    if 0 < number <= fewest:
        return None
    return (
        f"--cpu-offloading-num-layers {number} must be 1 to {fewest}, the layers of a pipeline stage, for "
        "--cpu-offloading-weights to move any"
    )


def offloaded_weights_are_trained(activation_offload: ActivationOffloadConfig, model: ModelConfig) -> str | None:
    """Only buckets can be offloaded, and frozen weights are in none."""
    if not (activation_offload.cpu_offloading_weights and model.lora_rank):
        return None
    return (
        f"--cpu-offloading-weights moves weights that are trained, and --lora-rank {model.lora_rank} freezes those of "
        "layers, which no bucket holds; remove it, and offload activations or recompute instead"
    )


def _layers_of_stages(parallel: ParallelConfig, model: ModelConfig) -> list[int]:
    """Returns the number of layers of each pipeline stage."""
    assert model.num_layers
    return [len(stage.layers) for stage in pipeline_settings(parallel, model.num_layers).stages]


def rules(run: RunConfig) -> list[ConfigRule]:
    """Returns the rules about the offload of activations and weights: those about layers once their number is known."""
    flag_rules = [
        partial(offload_ratio_is_a_share, run.activation_offload),
        partial(one_way_of_activation_offload, run.activation_offload),
        partial(offloaded_inputs_have_one_reader, run.activation_offload, run.model),
        partial(offloaded_modules_keep_something, run.activation_offload, run.recompute, run.model),
        partial(offloaded_weights_are_trained, run.activation_offload, run.model),
    ]
    if shape_is_pending(run.model, run.checkpoint):
        return flag_rules
    return [
        *flag_rules,
        partial(offloaded_layers_exist, run.activation_offload, run.parallel, run.model),
        partial(offloaded_weights_exist, run.activation_offload, run.parallel, run.model),
        partial(offloaded_modules_exist, run.activation_offload, run.model),
        partial(offloaded_modules_are_given, run.activation_offload, run.parallel, run.model),
    ]
