"""A layout: what a search chooses about a run. Each field of Layout is an axis, and declares all about itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.config.activation_offload import AUTO as MEASURED
from megatron.config.data_parallel import AUTO, EVERY, LAST
from megatron.config.optimizer_offload import policy_of
from megatron.config.recompute import BLOCK, CORE_ATTN, FULL, SELECTIVE, UNIFORM, RecomputeConfig
from megatron.config.run import RunConfig, flag_fields
from megatron.config.update_rules import HYBRID
from megatron.planner.search import axis
from megatron.planner.search.axis import (
    COPIES,
    GROUPS,
    HIERARCHICAL,
    KEEP_ALL,
    KINDS,
    LAYER,
    MESH,
    OPTIMIZER_OFFLOADS,
    RECOMPUTE,
    SHARDED_GRADS,
    SHARDING,
    SHARDINGS,
    STAGES,
    UPDATE,
    Axis,
)
from megatron.schedule.registry import SCHEDULES, schedule_or_default


def _recompute(text: str) -> tuple[str | None, str | None, int | None, tuple[str, ...] | None]:
    """Granularity, method, number of layers and modules for a value of the axis."""
    if text == KEEP_ALL:
        return None, None, None, None
    if text == FULL:
        return FULL, UNIFORM, 1, None
    for sign, method in ((":", BLOCK), ("/", UNIFORM)):
        kind, _, number = text.partition(sign)
        if kind == FULL and number:
            return FULL, method, int(number), None
    # Selective recompute is that of core_attn unless modules are named.
    return SELECTIVE, None, None, None if text == CORE_ATTN else tuple(text.split("+"))


def _virtual_stages(layout: Layout) -> int | None:
    """Those that are typed: some schedules need a number of their own."""
    if layout.pp == 1 or SCHEDULES[layout.schedule].virtual_stages is not None:
        return None
    return layout.virtual_stages


def _schedule(layout: Layout, run: RunConfig) -> str | None:
    """The one that is typed. Without one, the stages of --pipeline-model-parallel-layout would choose."""
    if layout.pp == 1:
        return None
    written_out = run.parallel.pipeline_model_parallel_layout is not None
    is_default = schedule_or_default(None, _virtual_stages(layout)).name == layout.schedule
    return None if is_default and not written_out else layout.schedule


def _offload_ratio(layout: Layout, run: RunConfig) -> str | None:
    """A ratio that the run measures stays."""
    measured = run.activation_offload.pipeline_offload_ratio == MEASURED
    return f"{layout.offload:g}" if layout.offload else MEASURED if measured else None


def offload_is_fixed(run: RunConfig) -> bool:
    """Whether flags that no layout has decide which part of the optimizer is offloaded."""
    return run.optimizer.optimizer == HYBRID or policy_of(run.optimizer, run.optimizer_offload) == "auto"


def _axis(
    neutral: Any,
    *affects: str,
    default: tuple[Any, ...] | Callable[[RunConfig, int], tuple[Any, ...]],
    flags: tuple[str, ...],
    sets: Callable[[Layout, RunConfig], Any] | Mapping[str, Callable[[Layout, RunConfig], Any]],
    typed: Callable[[RunConfig], tuple[Any, ...]] | None = None,
    effect: Callable[[Layout, Callable[[], int], RunConfig], bool] | None = None,
    sometimes: bool = False,
    names: tuple[str, ...] = (),
) -> Any:
    """Returns the field of an axis, see Axis. default: a tuple where it depends on nothing. sets: one function where
    the only flag is the field that it sets. typed: default the value of the only flag."""

    def value(run: RunConfig) -> tuple[Any, ...]:
        return (run.value(flags[0]),)

    described = Axis(
        neutral=neutral,
        affects=affects,
        default=default if callable(default) else lambda run, world_size: default,
        flags=flags,
        typed=typed or value,
        sets={flags[0]: sets} if callable(sets) else sets,
        effect=effect,
        sometimes=sometimes or effect is not None,
        names=names,
    )
    return dataclasses.field(default=neutral, metadata={"axis": described})


_OF_RECOMPUTE = tuple(field.name for field in dataclasses.fields(RecomputeConfig))


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The choices of a search. Each field is an axis of the space of layouts.

    cp_inner: neighbours that exchange heads, with cp_kind a2a+p2p; else 1. schedule: its name. virtual_stages: of each
    pipeline rank, also where the schedule says how many. group: microbatches that a virtual stage processes before the
    next one, 0 for the default. uneven_ends: the embedding and the loss take a layer's place each when layers are
    shared between stages. sharding, reduce_mode: values of --data-parallel-sharding-strategy and --grad-reduce-mode.
    dp_overlap: reductions of gradients and gathers of parameters are overlapped. recompute: "none"; modules joined by
    "+"; "full", every layer; "full:N", the first N layers of each stage; or "full/N", every layer, in groups of N that
    keep one input. offload: fraction of the activations in host memory. optimizer_offload: fraction of the optimizer's
    state in host memory, which the CPU updates.
    """

    tp: int = _axis(
        1,
        *(LAYER, MESH),
        default=axis.tp_sizes,
        flags=("tensor_model_parallel_size",),
        sets=lambda layout, run: layout.tp,
    )
    sequence_parallel: bool = _axis(
        False,
        LAYER,
        default=(True,),
        flags=("sequence_parallel",),
        sets=lambda layout, run: layout.sequence_parallel,
        effect=lambda layout, copies, run: layout.tp > 1,
    )
    tp_overlap: bool = _axis(
        False,
        LAYER,
        default=(False, True),
        flags=("tp_comm_overlap",),
        sets=lambda layout, run: layout.tp_overlap,
        effect=lambda layout, copies, run: layout.tp > 1,
    )
    cp: int = _axis(
        1,
        *(LAYER, MESH),
        default=axis.cp_sizes,
        flags=("context_parallel_size",),
        sets=lambda layout, run: layout.cp,
    )
    cp_kind: str = _axis(
        "p2p",
        LAYER,
        default=KINDS,
        flags=("cp_comm_type",),
        typed=axis.typed_kinds,
        sets=lambda layout, run: (layout.cp_kind,),
        effect=lambda layout, copies, run: layout.cp > 1,
        names=KINDS,
    )
    cp_inner: int = _axis(
        1,
        LAYER,
        default=axis.cp_sizes,
        flags=("hierarchical_context_parallel_sizes",),
        typed=lambda run: (run.parallel.hierarchical_context_parallel_sizes or (1,))[:1],
        sets=lambda layout, run: (
            (layout.cp_inner, layout.cp // layout.cp_inner) if layout.cp_kind == HIERARCHICAL else None
        ),
        effect=lambda layout, copies, run: layout.cp_kind == HIERARCHICAL,
    )
    pp: int = _axis(
        1,
        *(MESH, STAGES),
        default=axis.pp_sizes,
        flags=("pipeline_model_parallel_size",),
        sets=lambda layout, run: layout.pp,
    )
    schedule: str = _axis(
        "1f1b",
        STAGES,
        default=axis.schedules,
        flags=("pipeline_schedule",),
        sets=_schedule,
        names=tuple(SCHEDULES),
    )
    virtual_stages: int = _axis(
        1,
        STAGES,
        default=tuple(range(1, axis.MOST_VIRTUAL_STAGES + 1)),
        flags=("num_virtual_stages_per_pipeline_rank", "num_layers_per_virtual_pipeline_stage"),
        typed=axis.typed_virtual_stages,
        sets={
            "num_layers_per_virtual_pipeline_stage": lambda layout, run: None,
            "num_virtual_stages_per_pipeline_rank": lambda layout, run: _virtual_stages(layout),
        },
    )
    group: int = _axis(
        0,
        GROUPS,
        default=(0,),
        flags=("microbatch_group_size_per_virtual_pipeline_stage",),
        sets=lambda layout, run: layout.group or None,
        effect=lambda layout, copies, run: layout.pp > 1,
    )
    uneven_ends: bool = _axis(
        False,
        STAGES,
        default=(False, True),
        # Where the layers go is typed then: these flags stay as they are.
        flags=(
            "pipeline_model_parallel_layout",
            "decoder_first_pipeline_num_layers",
            "decoder_last_pipeline_num_layers",
            "account_for_embedding_in_pipeline_split",
            "account_for_loss_in_pipeline_split",
        ),
        typed=lambda run: (False,),
        sets={
            "account_for_embedding_in_pipeline_split": lambda layout, run: (
                layout.uneven_ends or run.parallel.account_for_embedding_in_pipeline_split
            ),
            "account_for_loss_in_pipeline_split": lambda layout, run: (
                layout.uneven_ends or run.parallel.account_for_loss_in_pipeline_split
            ),
        },
        effect=lambda layout, copies, run: layout.pp > 1,
    )
    micro_batch: int = _axis(
        1,
        LAYER,
        default=axis.micro_batch_sizes,
        flags=("micro_batch_size",),
        sets=lambda layout, run: layout.micro_batch,
    )
    ep: int = _axis(
        1,
        *(LAYER, MESH),
        default=axis.ep_sizes,
        flags=("expert_model_parallel_size",),
        sets=lambda layout, run: layout.ep,
    )
    etp: int = _axis(
        1,
        *(LAYER, MESH),
        default=(1,),
        flags=("expert_tensor_parallel_size",),
        sets=lambda layout, run: (
            None if layout.etp == (1 if run.model.num_experts is None else layout.tp) else layout.etp
        ),
    )
    sharding: str = _axis(
        "no_shard",
        SHARDING,
        default=SHARDINGS,
        flags=("data_parallel_sharding_strategy", "use_distributed_optimizer", "overlapped_distributed_optimizer"),
        typed=axis.typed_sharding,
        sets={
            "use_distributed_optimizer": lambda layout, run: layout.sharding == "optim",
            "overlapped_distributed_optimizer": lambda layout, run: False,
            "data_parallel_sharding_strategy": lambda layout, run: (
                layout.sharding if layout.sharding in SHARDED_GRADS else None
            ),
        },
        effect=lambda layout, copies, run: copies() > 1,
        names=SHARDINGS,
    )
    reduce_mode: str = _axis(
        LAST,
        SHARDING,
        default=(LAST, EVERY),
        flags=("grad_reduce_mode", "overlapped_distributed_optimizer"),
        typed=axis.typed_reduce_mode,
        sets={"grad_reduce_mode": lambda layout, run: AUTO if layout.reduce_mode == AUTO else None},
        sometimes=True,
        names=(LAST, EVERY, AUTO),
    )
    dp_overlap: bool = _axis(
        False,
        SHARDING,
        default=(True,),
        flags=("overlap_grad_reduce", "overlap_param_gather", "overlapped_distributed_optimizer"),
        typed=lambda run: (True,),
        sets={
            # Gradients that are not kept are reduced at once anyway.
            "overlap_grad_reduce": lambda layout, run: (
                layout.dp_overlap and layout.sharding not in SHARDED_GRADS and layout.reduce_mode != AUTO
            ),
            "overlap_param_gather": lambda layout, run: (
                layout.dp_overlap and layout.sharding in ("optim", "optim_grads")
            ),
        },
        effect=lambda layout, copies, run: layout.sharding != "optim_grads_params" and copies() > 1,
    )
    instances: int = _axis(
        1,
        SHARDING,
        default=(1, 2),
        flags=("num_distributed_optimizer_instances",),
        sets=lambda layout, run: layout.instances,
        effect=lambda layout, copies, run: layout.sharding != "no_shard",
    )
    recompute: str = _axis(
        KEEP_ALL,
        RECOMPUTE,
        default=axis.recompute_choices,
        flags=_OF_RECOMPUTE,
        typed=axis.typed_recompute,
        sets={
            "recompute_granularity": lambda layout, run: _recompute(layout.recompute)[0],
            "recompute_method": lambda layout, run: _recompute(layout.recompute)[1],
            "recompute_num_layers": lambda layout, run: _recompute(layout.recompute)[2],
            "recompute_modules": lambda layout, run: _recompute(layout.recompute)[3],
            "recompute_activations": lambda layout, run: False,
            "kaimm_recompute_norm": lambda layout, run: False,
            "kaimm_recompute_mlp_activation_func": lambda layout, run: False,
        },
    )
    offload: float = _axis(
        0.0,
        COPIES,
        default=(0.0, 0.25, 0.5, 0.75, 1.0),
        flags=("pipeline_offload_ratio", "cpu_offloading", "fine_grained_activation_offloading"),
        typed=axis.typed_offload,
        sets={"pipeline_offload_ratio": _offload_ratio},
    )
    optimizer_offload: float = _axis(
        0.0,
        UPDATE,
        default=OPTIMIZER_OFFLOADS,
        flags=("optimizer_cpu_offload", "optimizer_offload_fraction"),
        typed=axis.typed_optimizer_offload,
        sets={
            "optimizer_cpu_offload": lambda layout, run: (
                layout.optimizer_offload > 0 or (offload_is_fixed(run) and run.optimizer_offload.optimizer_cpu_offload)
            ),
            "optimizer_offload_fraction": lambda layout, run: (
                run.optimizer_offload.optimizer_offload_fraction
                if offload_is_fixed(run)
                else layout.optimizer_offload or 1.0
            ),
        },
        effect=lambda layout, copies, run: not offload_is_fixed(run),
    )

    def apply(self, run: RunConfig) -> RunConfig:
        """Returns the run in this layout: the fields of `FIELDS` are set, and count as given where they are typed."""
        values = {name: of(self, run) for name, of in FIELDS.items()}
        parts: dict[str, dict[str, Any]] = {}
        typed = set(run.given - FIELDS.keys())
        for name, value in values.items():
            part, spec = flag_fields()[name]
            parts.setdefault(part, {})[name] = value
            if value != spec.default:
                typed.add(name)
        changed = {part: dataclasses.replace(getattr(run, part), **fields) for part, fields in parts.items()}
        return dataclasses.replace(run, given=frozenset(typed), **changed)


AXES: Mapping[str, Axis] = {field.name: field.metadata["axis"] for field in dataclasses.fields(Layout)}
# The fields of a run that a layout sets, with their values.
FIELDS: Mapping[str, Callable[[Layout, RunConfig], Any]] = {
    name: value for described in AXES.values() for name, value in described.sets.items()
}


def axes_of(*parts: str) -> tuple[str, ...]:
    """Returns the axes that affect at least one of these parts of a step."""
    return tuple(name for name, described in AXES.items() if set(described.affects).intersection(parts))


def choices_of(run: RunConfig, world_size: int) -> dict[str, tuple[Any, ...]]:
    """Returns the values of each axis: those of typed flags, which are fixed, and default values of the others.

    Raises ConfigError for flags that no layout has.
    """
    return {**default_choices(run, world_size), **fixed_choices(run)}


def default_choices(run: RunConfig, world_size: int) -> dict[str, tuple[Any, ...]]:
    """Returns the values of each axis for a run without flags of a layout. docs/planner.md explains them."""
    return {name: described.default(run, world_size) for name, described in AXES.items()}


def fixed_choices(run: RunConfig) -> dict[str, tuple[Any, ...]]:
    """Returns the axes whose flags are typed, with their values. Raises ConfigError for flags that no layout has."""
    return {name: described.typed(run) for name, described in AXES.items() if run.given.intersection(described.flags)}


@dataclass(frozen=True)
class Candidates:
    """N layouts as columns.

    values: of each axis, all that occur. codes: [N] of each axis, the place of the layout's value among them.
    """

    values: Mapping[str, tuple[Any, ...]]
    codes: Mapping[str, NDArray[np.int16]]

    def __len__(self) -> int:
        return len(next(iter(self.codes.values())))

    def column(self, axis: str) -> NDArray[Any]:
        """Returns the [N] values of an axis."""
        column: NDArray[Any] = np.array(self.values[axis])[self.codes[axis]]
        return column

    def layout(self, number: int) -> Layout:
        """Returns one of them."""
        return Layout(**{axis: self.values[axis][self.codes[axis][number]] for axis in AXES})

    def take(self, selection: NDArray[Any]) -> Candidates:
        """Returns the layouts of a mask, or with these numbers."""
        return Candidates(self.values, {axis: codes[selection] for axis, codes in self.codes.items()})

    @classmethod
    def of(cls, layouts: list[Layout]) -> Candidates:
        """Returns these layouts."""
        values = {axis: tuple(dict.fromkeys(getattr(layout, axis) for layout in layouts)) for axis in AXES}
        return cls(
            values,
            {
                axis: np.array([values[axis].index(getattr(layout, axis)) for layout in layouts], dtype=np.int16)
                for axis in AXES
            },
        )
