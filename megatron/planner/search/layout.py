"""A layout: what a search chooses about a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.config.activation_offload import AUTO as MEASURED
from megatron.config.data_parallel import AUTO, LAST
from megatron.config.optimizer_offload import policy_of
from megatron.config.recompute import BLOCK, CORE_ATTN, FULL, SELECTIVE, UNIFORM
from megatron.config.run import RunConfig, flag_fields
from megatron.config.update_rules import HYBRID
from megatron.schedule.registry import SCHEDULES, schedule_or_default

KEEP_ALL = "none"
HIERARCHICAL = "a2a+p2p"
SHARDED_GRADS = ("optim_grads", "optim_grads_params")
# The parts of a step that an axis affects: the time of a layer, the mesh, the stages and their schedule, its groups of
# microbatches, the modules that backward recomputes, the communication of replicas, the update, and copies of
# activations.
LAYER, MESH, STAGES, GROUPS, RECOMPUTE = "layer", "mesh", "stages", "groups", "recompute"
SHARDING, UPDATE, COPIES = "sharding", "update", "copies"


def _axis(neutral: Any, *affects: str) -> Any:
    """Returns the field of an axis. neutral: its value in a plain run. affects: the parts of a step that depend on
    it."""
    return dataclasses.field(default=neutral, metadata={"affects": frozenset(affects)})


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

    tp: int = _axis(1, LAYER, MESH)
    sequence_parallel: bool = _axis(False, LAYER)
    tp_overlap: bool = _axis(False, LAYER)
    cp: int = _axis(1, LAYER, MESH)
    cp_kind: str = _axis("p2p", LAYER)
    cp_inner: int = _axis(1, LAYER)
    pp: int = _axis(1, MESH, STAGES)
    schedule: str = _axis("1f1b", STAGES)
    virtual_stages: int = _axis(1, STAGES)
    group: int = _axis(0, GROUPS)
    uneven_ends: bool = _axis(False, STAGES)
    micro_batch: int = _axis(1, LAYER)
    ep: int = _axis(1, LAYER, MESH)
    etp: int = _axis(1, LAYER, MESH)
    sharding: str = _axis("no_shard", SHARDING)
    reduce_mode: str = _axis(LAST, SHARDING)
    dp_overlap: bool = _axis(False, SHARDING)
    instances: int = _axis(1, SHARDING)
    recompute: str = _axis(KEEP_ALL, RECOMPUTE)
    offload: float = _axis(0.0, COPIES)
    optimizer_offload: float = _axis(0.0, UPDATE)

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


AXES = tuple(field.name for field in dataclasses.fields(Layout))


def axes_of(*parts: str) -> tuple[str, ...]:
    """Returns the axes that affect at least one of these parts of a step."""
    return tuple(field.name for field in dataclasses.fields(Layout) if field.metadata["affects"].intersection(parts))


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


# The fields of a run that a layout sets, with their values.
FIELDS: Mapping[str, Callable[[Layout, RunConfig], Any]] = {
    "tensor_model_parallel_size": lambda layout, run: layout.tp,
    "sequence_parallel": lambda layout, run: layout.sequence_parallel,
    "tp_comm_overlap": lambda layout, run: layout.tp_overlap,
    "context_parallel_size": lambda layout, run: layout.cp,
    "cp_comm_type": lambda layout, run: (layout.cp_kind,),
    "hierarchical_context_parallel_sizes": lambda layout, run: (
        (layout.cp_inner, layout.cp // layout.cp_inner) if layout.cp_kind == HIERARCHICAL else None
    ),
    "pipeline_model_parallel_size": lambda layout, run: layout.pp,
    "pipeline_schedule": _schedule,
    "num_layers_per_virtual_pipeline_stage": lambda layout, run: None,
    "num_virtual_stages_per_pipeline_rank": lambda layout, run: _virtual_stages(layout),
    "microbatch_group_size_per_virtual_pipeline_stage": lambda layout, run: layout.group or None,
    "account_for_embedding_in_pipeline_split": lambda layout, run: (
        layout.uneven_ends or run.parallel.account_for_embedding_in_pipeline_split
    ),
    "account_for_loss_in_pipeline_split": lambda layout, run: (
        layout.uneven_ends or run.parallel.account_for_loss_in_pipeline_split
    ),
    "micro_batch_size": lambda layout, run: layout.micro_batch,
    "expert_model_parallel_size": lambda layout, run: layout.ep,
    "expert_tensor_parallel_size": lambda layout, run: (
        None if layout.etp == (1 if run.model.num_experts is None else layout.tp) else layout.etp
    ),
    "use_distributed_optimizer": lambda layout, run: layout.sharding == "optim",
    "overlapped_distributed_optimizer": lambda layout, run: False,
    "data_parallel_sharding_strategy": lambda layout, run: (
        layout.sharding if layout.sharding in SHARDED_GRADS else None
    ),
    "grad_reduce_mode": lambda layout, run: AUTO if layout.reduce_mode == AUTO else None,
    # Gradients that are not kept are reduced at once anyway.
    "overlap_grad_reduce": lambda layout, run: (
        layout.dp_overlap and layout.sharding not in SHARDED_GRADS and layout.reduce_mode != AUTO
    ),
    "overlap_param_gather": lambda layout, run: layout.dp_overlap and layout.sharding in ("optim", "optim_grads"),
    "num_distributed_optimizer_instances": lambda layout, run: layout.instances,
    "recompute_granularity": lambda layout, run: _recompute(layout.recompute)[0],
    "recompute_method": lambda layout, run: _recompute(layout.recompute)[1],
    "recompute_num_layers": lambda layout, run: _recompute(layout.recompute)[2],
    "recompute_modules": lambda layout, run: _recompute(layout.recompute)[3],
    "recompute_activations": lambda layout, run: False,
    "kaimm_recompute_norm": lambda layout, run: False,
    "kaimm_recompute_mlp_activation_func": lambda layout, run: False,
    "pipeline_offload_ratio": _offload_ratio,
    "optimizer_cpu_offload": lambda layout, run: (
        layout.optimizer_offload > 0 or (offload_is_fixed(run) and run.optimizer_offload.optimizer_cpu_offload)
    ),
    "optimizer_offload_fraction": lambda layout, run: (
        run.optimizer_offload.optimizer_offload_fraction if offload_is_fixed(run) else layout.optimizer_offload or 1.0
    ),
}


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
