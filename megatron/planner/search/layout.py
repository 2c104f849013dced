"""A layout: what a search chooses about a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.config.data_parallel import LAST
from megatron.config.recompute import BLOCK, FULL, SELECTIVE, UNIFORM
from megatron.config.run import RunConfig

KEEP_ALL = "none"
HIERARCHICAL = "a2a+p2p"


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The choices of a search. Each field is an axis of the space of layouts.

    cp_inner: neighbours that exchange heads, with cp_kind a2a+p2p; else 1. schedule: its name. virtual_stages: of each
    pipeline rank. group: microbatches that a virtual stage processes before the next one, 0 for the default. sharding,
    reduce_mode: values of --data-parallel-sharding-strategy and --grad-reduce-mode. dp_overlap: reductions of gradients
    and gathers of parameters are overlapped. recompute: "none"; modules joined by "+"; "full", every layer; or "full:N",
    the first N layers of each stage. offload: fraction of the activations in host memory. optimizer_offload: fraction of
    the optimizer's state in host memory, which the CPU updates.
    """

    tp: int = 1
    sequence_parallel: bool = False
    tp_overlap: bool = False
    cp: int = 1
    cp_kind: str = "p2p"
    cp_inner: int = 1
    pp: int = 1
    schedule: str = "1f1b"
    virtual_stages: int = 1
    group: int = 0
    micro_batch: int = 1
    ep: int = 1
    etp: int = 1
    sharding: str = "no_shard"
    reduce_mode: str = LAST
    dp_overlap: bool = False
    instances: int = 1
    recompute: str = KEEP_ALL
    offload: float = 0.0
    optimizer_offload: float = 0.0

    def apply(self, run: RunConfig) -> RunConfig:
        """Returns the run in this layout. All other flags stay."""
        parallel = dataclasses.replace(
            run.parallel,
            tensor_model_parallel_size=self.tp,
            sequence_parallel=self.sequence_parallel,
            tp_comm_overlap=self.tp_overlap,
            context_parallel_size=self.cp,
            cp_comm_type=(self.cp_kind,),
            hierarchical_context_parallel_sizes=(self.cp_inner, self.cp // self.cp_inner)
            if self.cp_kind == HIERARCHICAL
            else None,
            pipeline_model_parallel_size=self.pp,
            pipeline_schedule=self.schedule if self.pp > 1 else None,
            num_virtual_stages_per_pipeline_rank=self.virtual_stages if self.virtual_stages > 1 else None,
            microbatch_group_size_per_virtual_pipeline_stage=self.group or None,
            expert_model_parallel_size=self.ep,
            expert_tensor_parallel_size=self.etp if run.model.num_experts is not None else None,
            data_parallel_sharding_strategy=self.sharding,
            grad_reduce_mode=self.reduce_mode if self.sharding != "no_shard" else None,
            overlap_grad_reduce=self.dp_overlap,
            overlap_param_gather=self.dp_overlap and self.sharding != "no_shard",
            num_distributed_optimizer_instances=self.instances,
        )
        return dataclasses.replace(
            run,
            parallel=parallel,
            train=dataclasses.replace(run.train, micro_batch_size=self.micro_batch),
            recompute=dataclasses.replace(run.recompute, **_recompute(self.recompute)),
            activation_offload=dataclasses.replace(
                run.activation_offload, pipeline_offload_ratio=f"{self.offload:g}" if self.offload else None
            ),
            optimizer_offload=dataclasses.replace(
                run.optimizer_offload,
                optimizer_cpu_offload=self.optimizer_offload > 0,
                optimizer_offload_fraction=self.optimizer_offload or 1.0,
            ),
        )


AXES = tuple(field.name for field in dataclasses.fields(Layout))


def _recompute(text: str) -> Mapping[str, Any]:
    """The fields of RecomputeConfig for a value of the axis."""
    kind, _, number = text.partition(":")
    whole = kind == FULL
    parts = not whole and kind != KEEP_ALL
    return {
        "recompute_granularity": FULL if whole else SELECTIVE if parts else None,
        "recompute_method": (BLOCK if number else UNIFORM) if whole else None,
        "recompute_num_layers": int(number or 1) if whole else None,
        "recompute_modules": tuple(kind.split("+")) if parts else None,
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

    def take(self, which: NDArray[Any]) -> Candidates:
        """Returns those of a mask, or of numbers."""
        return Candidates(self.values, {axis: codes[which] for axis, codes in self.codes.items()})

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
