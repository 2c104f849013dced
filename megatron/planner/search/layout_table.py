"""What follows from the axes of many layouts at once, as columns, and how columns are grouped."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.base.mesh import Mesh
from megatron.config.batch_schedule import BatchSchedule
from megatron.config.data_parallel import DataParallelSettings
from megatron.config.recompute import RecomputeConfig
from megatron.config.run import RunConfig
from megatron.planner.search.layout import Candidates, Layout
from megatron.schedule.registry import SCHEDULES

Numbers = NDArray[np.int64]


class LayoutTable:
    """N layouts of a run on `world_size` devices.

    recompute: the settings of each value of that axis. microbatches: of a step, [N]. sequence_parallel: in effect, [N].
    split: the schedule splits the backward, [N]. keeps_weights: parameters are not sharded, [N].
    """

    def __init__(self, candidates: Candidates, run: RunConfig, world_size: int) -> None:
        self._candidates, self._run, self._world_size = candidates, run, world_size
        self.codes = candidates.codes
        self.recompute: list[RecomputeConfig] = [
            Layout(recompute=text).apply(run).recompute for text in candidates.values["recompute"]
        ]
        tp, cp, pp = (candidates.column(axis) for axis in ("tp", "cp", "pp"))
        self.dp = world_size // (tp * cp * pp)
        self.sequence_parallel = candidates.column("sequence_parallel") & (tp > 1)
        splits = np.array([SCHEDULES[name].splits_backward for name in candidates.values["schedule"]])
        self.split = splits[self.codes["schedule"]] & (pp > 1)
        self.keeps_weights = candidates.column("sharding") != "optim_grads_params"
        self.microbatches = self._microbatches()

    def value(self, axis: str, number: int) -> Any:
        """Returns the choice of a layout on an axis."""
        return self._candidates.values[axis][self.codes[axis][number]]

    def values(self, axis: str, places: Numbers) -> NDArray[Any]:
        """Returns the choices of some layouts on an axis."""
        return np.array(self._candidates.values[axis])[self.codes[axis][places]]

    def choices(self, axis: str) -> tuple[Any, ...]:
        """Returns all choices on an axis."""
        return self._candidates.values[axis]

    def layout(self, number: int) -> Layout:
        """Returns one of the layouts."""
        return self._candidates.layout(number)

    def mesh(self, number: int) -> Mesh:
        """Returns the mesh of one of the layouts."""
        tp, cp, pp, ep, etp = (self.value(axis, number) for axis in ("tp", "cp", "pp", "ep", "etp"))
        return _mesh(self._world_size, tp, cp, pp, ep, etp if self._run.model.num_experts is not None else None)

    def data_parallel(self, number: int) -> DataParallelSettings:
        """Returns the settings of data parallelism of one of the layouts."""
        return self.layout(number).apply(self._run).data_parallel_settings()

    def columns(self, *axes: str) -> list[NDArray[Any]]:
        """Returns the codes of some axes."""
        return [self.codes[axis] for axis in axes]

    def _microbatches(self) -> Numbers:
        microbatches = np.zeros(len(self._candidates), np.int64)
        sizes = self._candidates.column("micro_batch")
        for places in groups_of([self.codes["micro_batch"], self.dp]):
            run = Layout(micro_batch=int(sizes[places[0]])).apply(self._run)
            microbatches[places] = BatchSchedule(
                run.train, int(self.dp[places[0]]), run.data.seq_length
            ).final_num_microbatches
        return microbatches


def distinct(columns: Sequence[NDArray[Any]]) -> tuple[Numbers, Numbers]:
    """Returns (the place of the first row of each distinct one, the number of each row's distinct one) of rows in
    columns of numbers that are not negative."""
    key = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        key = key * (int(column.max()) + 1) + column
    _, first, inverse = np.unique(key, return_index=True, return_inverse=True)
    return first, inverse


def groups_of(columns: Sequence[NDArray[Any]]) -> list[Numbers]:
    """Returns the places of each distinct row."""
    first, inverse = distinct(columns)
    order = np.argsort(inverse, kind="stable")
    return np.split(order, np.cumsum(np.bincount(inverse, minlength=len(first)))[:-1])


@functools.lru_cache(maxsize=1024)
def _mesh(world_size: int, tp: int, cp: int, pp: int, ep: int, etp: int | None) -> Mesh:
    return Mesh.create(world_size, tp=tp, cp=cp, pp=pp, ep=ep, etp=etp)
