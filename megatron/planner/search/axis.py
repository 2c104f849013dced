"""An axis of the space of layouts as data, and the values of axes: those of typed flags, and those that a search
tries by default. The axes themselves are the fields of Layout, in layout.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron.base.errors import ConfigError
from megatron.config.activation_offload import AUTO as MEASURED
from megatron.config.data_parallel import AUTO, EVERY, LAST
from megatron.config.recompute import (
    BLOCK,
    CORE_ATTN,
    FULL,
    MLA_UP_PROJ,
    MLP_ACT,
    MOE_ACT,
    NORM,
    RECOMPUTE_MODULES,
    WHOLE_MLP,
    WHOLE_MOE,
)
from megatron.config.run import RunConfig
from megatron.schedule.registry import SCHEDULES
from megatron.schedule.schedules.one_f_one_b import ONE_F_ONE_B

MOST_TP = 8
MOST_VIRTUAL_STAGES = 8
MOST_TOKENS = 32768  # of a microbatch
FEWEST_TOKENS = 4096  # of a sample that a context-parallel rank holds
KEEP_ALL = "none"
HIERARCHICAL = "a2a+p2p"
SHARDED_GRADS = ("optim_grads", "optim_grads_params")
OPTIMIZER_OFFLOADS = (0.0, 0.5, 1.0)
SHARDINGS = ("no_shard", "optim", *SHARDED_GRADS)
KINDS = ("p2p", "all_gather", "a2a", HIERARCHICAL)
# The parts of a step that an axis affects: the time of a layer, the mesh, the stages and their schedule, its groups of
# microbatches, the modules that backward recomputes, the communication of replicas, the update, and copies of
# activations.
LAYER, MESH, STAGES, GROUPS, RECOMPUTE = "layer", "mesh", "stages", "groups", "recompute"
SHARDING, UPDATE, COPIES = "sharding", "update", "copies"


@dataclass(frozen=True, kw_only=True)
class Axis:
    """An axis of the space of layouts: all that is known about one choice of a search, except for the physics.

    neutral: its value in a plain run. affects: the parts of a step that depend on it. default: (run, devices) -> the
    values that a search tries. flags: fields of the flags that fix it where they are typed; typed: run -> its values
    then. sets: field of a run -> its value, of a layout and the run. effect: of a layout, the number of copies of a
    parameter, and the run: whether the axis has an effect there; None: always, or where another condition says so
    (sometimes). names: the values that --space knows, of an axis with names for values.
    """

    neutral: Any
    affects: tuple[str, ...]
    default: Callable[[RunConfig, int], tuple[Any, ...]]
    flags: tuple[str, ...]
    typed: Callable[[RunConfig], tuple[Any, ...]]
    sets: Mapping[str, Callable[[Any, RunConfig], Any]]
    effect: Callable[[Any, Callable[[], int], RunConfig], bool] | None = None
    sometimes: bool = False
    names: tuple[str, ...] = ()


def typed_kinds(run: RunConfig) -> tuple[str, ...]:
    """Returns the kind of context parallelism of all layers. Raises ConfigError for several."""
    kinds = set(run.parallel.cp_comm_type)
    if len(kinds) > 1:
        raise ConfigError(
            f"--cp-comm-type {' '.join(run.parallel.cp_comm_type)} differs between layers, and a search has one way "
            "for all of them; give one value, or leave it out"
        )
    return tuple("all_gather" if kind == "allgather" else kind for kind in kinds)


def typed_virtual_stages(run: RunConfig) -> tuple[int, ...]:
    """Returns the stages of a rank, also where the layers of a stage are typed instead."""
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


def typed_sharding(run: RunConfig) -> tuple[str, ...]:
    """Returns the strategy: one that keeps shards of gradients may be written as a mode of the reduction."""
    settings = run.data_parallel_settings()
    return ("optim_grads" if settings.shards == "optim" and settings.mode == EVERY else settings.shards,)


def typed_reduce_mode(run: RunConfig) -> tuple[str, ...]:
    """Returns the mode of the flags."""
    mode = run.parallel.grad_reduce_mode
    if mode is None:  # --overlapped-distributed-optimizer
        return (AUTO,) if run.parallel.data_parallel_sharding_strategy is None else (LAST, EVERY)
    return (mode,)


def typed_recompute(run: RunConfig) -> tuple[str, ...]:
    """Returns the value for the recompute of the flags."""
    recompute = run.recompute
    if recompute.is_full:
        number = recompute.recompute_num_layers or 1
        if recompute.recompute_method == BLOCK:
            return (f"{FULL}:{number}",)
        return (FULL if number == 1 else f"{FULL}/{number}",)
    return ("+".join(name for name in RECOMPUTE_MODULES if name in recompute.modules) or KEEP_ALL,)


def typed_offload(run: RunConfig) -> tuple[float, ...]:
    """Returns the fraction of the flags."""
    ratio = run.activation_offload.pipeline_offload_ratio
    try:
        return (0.0 if ratio in (None, MEASURED) else float(ratio or 0),)
    except ValueError:
        return (0.0,)


def typed_optimizer_offload(run: RunConfig) -> tuple[float, ...]:
    """Returns the fractions that the flags leave."""
    fraction = run.optimizer_offload.optimizer_offload_fraction
    if "optimizer_cpu_offload" not in run.given:
        return (0.0, fraction)
    return (fraction,) if "optimizer_offload_fraction" in run.given else OPTIMIZER_OFFLOADS[1:]


def tp_sizes(run: RunConfig, world_size: int) -> tuple[int, ...]:
    """Returns the sizes of tensor parallelism that are tried."""
    heads = run.model.num_attention_heads
    assert heads
    return tuple(size for size in divisors(heads) if world_size % size == 0 and size <= MOST_TP)


def cp_sizes(run: RunConfig, world_size: int) -> tuple[int, ...]:
    """Returns the sizes of context parallelism that are tried."""
    length = run.data.seq_length
    assert length
    return tuple(size for size in divisors(world_size) if size == 1 or length // size >= FEWEST_TOKENS)


def pp_sizes(run: RunConfig, world_size: int) -> tuple[int, ...]:
    """Returns the sizes of pipelines that are tried: stages have equally many layers, also where the embedding and the
    loss count as one each."""
    layers, ends = run.model.num_layers, 2
    assert layers
    return tuple(
        size for size in divisors(world_size) if size <= layers and not (layers % size and (layers + ends) % size)
    )


def ep_sizes(run: RunConfig, world_size: int) -> tuple[int, ...]:
    """Returns the sizes of expert parallelism that are tried."""
    experts = run.model.num_experts
    return tuple(size for size in divisors(world_size) if experts and experts % size == 0) or (1,)


def schedules(run: RunConfig, world_size: int) -> tuple[str, ...]:
    """Returns all schedules, 1F1B first."""
    return tuple(sorted(SCHEDULES, key=lambda name: name != ONE_F_ONE_B.name))


def micro_batch_sizes(run: RunConfig, world_size: int) -> tuple[int, ...]:
    """Returns the powers of two that are tried."""
    assert run.data.seq_length
    return tuple(2**power for power in range(max(1, (MOST_TOKENS // run.data.seq_length).bit_length())))


def recompute_choices(run: RunConfig, world_size: int) -> tuple[str, ...]:
    """Returns useful sets of parts that the layers have, all layers, and the first layers of each stage."""
    assert run.model.num_layers
    with_experts = run.model.moe_layers
    act, mlp = (MOE_ACT, WHOLE_MOE) if all(with_experts) else (MLP_ACT, WHOLE_MLP)
    norms = () if run.model.shared_norm else (NORM,)
    parts = [(*norms, act), (CORE_ATTN, *norms, act), (*norms, mlp)]
    if run.model.multi_latent_attention:
        parts[1:1] = [(MLA_UP_PROJ, *norms, act)]
    ordered = (("+".join(name for name in RECOMPUTE_MODULES if name in names)) for names in parts)
    first = tuple(4**power for power in range(1, 4))
    return (KEEP_ALL, *ordered, FULL, *(f"{FULL}:{number}" for number in first))


def divisors(number: int) -> tuple[int, ...]:
    """Returns the divisors of a number, in rising order."""
    return tuple(size for size in range(1, number + 1) if number % size == 0)
