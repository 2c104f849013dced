"""The values that a search tries on each axis: those of typed flags, those of --space, and the rest by default."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from megatron.base.errors import ConfigError
from megatron.config.activation_offload import AUTO as MEASURED
from megatron.config.data_parallel import AUTO, EVERY, LAST
from megatron.config.recompute import (
    BLOCK,
    CORE_ATTN,
    FULL,
    MLP_ACT,
    MOE_ACT,
    NORM,
    RECOMPUTE_MODULES,
    WHOLE_MLP,
    WHOLE_MOE,
    RecomputeConfig,
)
from megatron.config.run import RunConfig
from megatron.planner.search.layout import HIERARCHICAL, KEEP_ALL, SHARDED_GRADS
from megatron.schedule.registry import SCHEDULES
from megatron.schedule.schedules.one_f_one_b import ONE_F_ONE_B

MOST_TP = 8
MOST_VIRTUAL_STAGES = 8
MOST_TOKENS = 32768  # of a microbatch
FEWEST_TOKENS = 4096  # of a sample that a context-parallel rank holds
OPTIMIZER_OFFLOADS = (0.0, 0.5, 1.0)
SHARDINGS = ("no_shard", "optim", *SHARDED_GRADS)
KINDS = ("p2p", "all_gather", "a2a", HIERARCHICAL)


def choices_of(run: RunConfig, world_size: int) -> dict[str, tuple[Any, ...]]:
    """Returns the values of each axis: those of typed flags, which are fixed, and default values of the others.

    Raises ConfigError for flags that no layout has.
    """
    return {**default_choices(run, world_size), **fixed_choices(run)}


def default_choices(run: RunConfig, world_size: int) -> dict[str, tuple[Any, ...]]:
    """Returns the values of each axis for a run without flags of a layout. docs/planner.md explains them."""
    model = run.model
    assert model.num_layers and model.num_attention_heads and run.data.seq_length
    divisors = _divisors(world_size)
    ends = 2  # places of the embedding and the loss, if they count
    tp = tuple(size for size in _divisors(model.num_attention_heads) if world_size % size == 0 and size <= MOST_TP)
    cp = tuple(size for size in divisors if size == 1 or run.data.seq_length // size >= FEWEST_TOKENS)
    pp = tuple(size for size in divisors if not (model.num_layers % size and (model.num_layers + ends) % size))
    pp = tuple(size for size in pp if size <= model.num_layers)
    return {
        "tp": tp,
        "sequence_parallel": (True,),
        "tp_overlap": (False, True),
        "cp": cp,
        "cp_kind": KINDS,
        "cp_inner": cp,
        "pp": pp,
        "schedule": tuple(sorted(SCHEDULES, key=lambda name: name != ONE_F_ONE_B.name)),
        "virtual_stages": tuple(range(1, MOST_VIRTUAL_STAGES + 1)),
        "group": (0,),
        "uneven_ends": (False, True),
        "micro_batch": tuple(2**power for power in range(max(1, (MOST_TOKENS // run.data.seq_length).bit_length()))),
        "ep": tuple(size for size in divisors if model.num_experts and model.num_experts % size == 0) or (1,),
        "etp": (1,),
        "sharding": SHARDINGS,
        "reduce_mode": (LAST, EVERY),
        "dp_overlap": (True,),
        "instances": (1, 2),
        "recompute": _recompute_choices(run),
        "offload": (0.0, 0.25, 0.5, 0.75, 1.0),
        "optimizer_offload": OPTIMIZER_OFFLOADS,
    }


def fixed_choices(run: RunConfig) -> dict[str, tuple[Any, ...]]:
    """Returns the axes whose flags are typed, with their values. Raises ConfigError for flags that no layout has."""
    choices = {}
    for names, axis, values in TYPED:
        if run.given.intersection(names):
            choices[axis] = values(run)
    return choices


def _several_kinds(run: RunConfig) -> tuple[str, ...]:
    kinds = set(run.parallel.cp_comm_type)
    if len(kinds) > 1:
        raise ConfigError(
            f"--cp-comm-type {' '.join(run.parallel.cp_comm_type)} differs between layers, and a search has one way "
            "for all of them; give one value, or leave it out"
        )
    return tuple("all_gather" if kind == "allgather" else kind for kind in kinds)


def _typed_virtual_stages(run: RunConfig) -> tuple[int, ...]:
    """The stages of a rank, also where the layers of a stage are typed instead."""
    per_stage, layers = run.parallel.num_layers_per_virtual_pipeline_stage, run.model.num_layers
    if per_stage is None:
        return (run.parallel.num_virtual_stages_per_pipeline_rank or 1,)
    assert layers
    p = run.parallel.pipeline_model_parallel_size
    if "pipeline_model_parallel_size" not in run.given:
        raise ConfigError(
            f"--num-layers-per-virtual-pipeline-stage {per_stage} makes as many virtual stages as the pipeline leaves; "
            "give --pipeline-model-parallel-size with it, or --num-virtual-stages-per-pipeline-rank instead"
        )
    return (max(1, layers // p // per_stage),)


def _typed_sharding(run: RunConfig) -> tuple[str, ...]:
    """A strategy that keeps shards of gradients may be written as a mode of the reduction."""
    settings = run.data_parallel_settings()
    return ("optim_grads" if settings.shards == "optim" and settings.mode == EVERY else settings.shards,)


def _typed_reduce_mode(run: RunConfig) -> tuple[str, ...]:
    mode = run.parallel.grad_reduce_mode
    if mode is None:  # --overlapped-distributed-optimizer
        return (AUTO,) if run.parallel.data_parallel_sharding_strategy is None else (LAST, EVERY)
    return (mode,)


def _typed_recompute(run: RunConfig) -> tuple[str, ...]:
    recompute = run.recompute
    if recompute.is_full:
        number = recompute.recompute_num_layers or 1
        if recompute.recompute_method == BLOCK:
            return (f"{FULL}:{number}",)
        return (FULL if number == 1 else f"{FULL}/{number}",)
    return ("+".join(name for name in RECOMPUTE_MODULES if name in recompute.modules) or KEEP_ALL,)


def _typed_offload(run: RunConfig) -> tuple[float, ...]:
    ratio = run.activation_offload.pipeline_offload_ratio
    try:
        return (0.0 if ratio in (None, MEASURED) else float(ratio or 0),)
    except ValueError:
        return (0.0,)


def _typed_optimizer_offload(run: RunConfig) -> tuple[float, ...]:
    fraction = run.optimizer_offload.optimizer_offload_fraction
    if "optimizer_cpu_offload" not in run.given:
        return (0.0, fraction)
    return (fraction,) if "optimizer_offload_fraction" in run.given else OPTIMIZER_OFFLOADS[1:]


def _value(name: str) -> Callable[[RunConfig], tuple[Any, ...]]:
    return lambda run: (run.value(name),)


# Typed flags (their fields), the axis that they fix, and its values in the run of the flags.
TYPED: tuple[tuple[tuple[str, ...], str, Callable[[RunConfig], tuple[Any, ...]]], ...] = (
    (("tensor_model_parallel_size",), "tp", _value("tensor_model_parallel_size")),
    (("sequence_parallel",), "sequence_parallel", _value("sequence_parallel")),
    (("tp_comm_overlap",), "tp_overlap", _value("tp_comm_overlap")),
    (("context_parallel_size",), "cp", _value("context_parallel_size")),
    (("cp_comm_type",), "cp_kind", _several_kinds),
    (
        ("hierarchical_context_parallel_sizes",),
        "cp_inner",
        lambda run: (run.parallel.hierarchical_context_parallel_sizes or (1,))[:1],
    ),
    (("pipeline_model_parallel_size",), "pp", _value("pipeline_model_parallel_size")),
    (("pipeline_schedule",), "schedule", _value("pipeline_schedule")),
    (
        ("num_virtual_stages_per_pipeline_rank", "num_layers_per_virtual_pipeline_stage"),
        "virtual_stages",
        _typed_virtual_stages,
    ),
    (
        ("microbatch_group_size_per_virtual_pipeline_stage",),
        "group",
        _value("microbatch_group_size_per_virtual_pipeline_stage"),
    ),
    # Where the layers go is typed then: these flags stay as they are.
    (
        (
            "pipeline_model_parallel_layout",
            "decoder_first_pipeline_num_layers",
            "decoder_last_pipeline_num_layers",
            "account_for_embedding_in_pipeline_split",
            "account_for_loss_in_pipeline_split",
        ),
        "uneven_ends",
        lambda run: (False,),
    ),
    (("micro_batch_size",), "micro_batch", _value("micro_batch_size")),
    (("expert_model_parallel_size",), "ep", _value("expert_model_parallel_size")),
    (("expert_tensor_parallel_size",), "etp", _value("expert_tensor_parallel_size")),
    (
        ("data_parallel_sharding_strategy", "use_distributed_optimizer", "overlapped_distributed_optimizer"),
        "sharding",
        _typed_sharding,
    ),
    (("grad_reduce_mode", "overlapped_distributed_optimizer"), "reduce_mode", _typed_reduce_mode),
    (
        ("overlap_grad_reduce", "overlap_param_gather", "overlapped_distributed_optimizer"),
        "dp_overlap",
        lambda run: (True,),
    ),
    (("num_distributed_optimizer_instances",), "instances", _value("num_distributed_optimizer_instances")),
    (
        (*(field.name for field in dataclasses.fields(RecomputeConfig)),),
        "recompute",
        _typed_recompute,
    ),
    (
        ("pipeline_offload_ratio", "cpu_offloading", "fine_grained_activation_offloading"),
        "offload",
        _typed_offload,
    ),
    (("optimizer_cpu_offload", "optimizer_offload_fraction"), "optimizer_offload", _typed_optimizer_offload),
)


def _recompute_choices(run: RunConfig) -> tuple[str, ...]:
    """Useful sets of parts that the layers have, all layers, and the first layers of each stage."""
    assert run.model.num_layers
    with_experts = run.model.moe_layers
    act, mlp = (MOE_ACT, WHOLE_MOE) if all(with_experts) else (MLP_ACT, WHOLE_MLP)
    parts = ((NORM, act), (CORE_ATTN, NORM, act), (NORM, mlp))
    ordered = (("+".join(name for name in RECOMPUTE_MODULES if name in names)) for names in parts)
    first = tuple(4**power for power in range(1, 4))
    return (KEEP_ALL, *ordered, FULL, *(f"{FULL}:{number}" for number in first))


def _divisors(number: int) -> tuple[int, ...]:
    return tuple(size for size in range(1, number + 1) if number % size == 0)
