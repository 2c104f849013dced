"""The space of a search: all layouts of a run that the rules accept, none of them twice under another name."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.base.errors import ConfigError
from megatron.config.rules.ranges import numbers_are_in_range, values_are_known
from megatron.config.run import RunConfig
from megatron.planner.search.conditions import AskedLayout, AxisValues, Condition, conditions
from megatron.planner.search.layout import AXES, Candidates

# The order in which axes join the product: those that exclude most come first.
_ORDER = (
    *("tp", "cp", "pp", "ep", "etp", "micro_batch"),
    *("schedule", "virtual_stages", "uneven_ends", "group", "sequence_parallel", "tp_overlap", "cp_kind", "cp_inner"),
    *("sharding", "reduce_mode", "dp_overlap", "instances", "recompute", "offload", "optimizer_offload"),
)


def space_of(run: RunConfig, world_size: int, choices: AxisValues) -> Candidates:
    """Returns the layouts of the run on `world_size` processes that have chosen values and that the rules accept.

    choices: the values of each axis. An axis that has no effect in a layout has its neutral value there, whatever is
    chosen: that is the value in `Layout()`. Layouts with fewer axes off that value come first, then those with earlier
    values. None for choices that exclude everything. Raises ConfigError for a run that no layout mends.
    """
    for rule in (values_are_known, numbers_are_in_range):
        if problem := rule(run):
            raise ConfigError(problem)
    values = {axis: _values(axis, choices) for axis in AXES}
    asked = AskedLayout()
    waiting = [_Waiting(condition, asked) for condition in conditions(run, world_size, choices, asked)]
    codes: dict[str, NDArray[np.int16]] = {}
    for axis in _ORDER:
        codes = _with_axis(codes, axis, len(values[axis]))
        still = []
        for condition in waiting:
            met = condition.met(codes, values)
            if met is None:
                still.append(condition)
            elif not met.all():
                codes = {name: column[met] for name, column in codes.items()}
        waiting = still
    assert not waiting
    candidates = Candidates(values, codes)
    return candidates.take(np.argsort(_complexity(candidates), kind="stable"))


def _values(axis: str, choices: AxisValues) -> tuple[Any, ...]:
    """All values that an axis may have."""
    neutral = AXES[axis].neutral
    idle = (neutral,) if AXES[axis].sometimes and neutral not in choices[axis] else ()
    return (*idle, *choices[axis])


def _with_axis(codes: dict[str, NDArray[np.int16]], axis: str, count: int) -> dict[str, NDArray[np.int16]]:
    """Each row once for every value of a further axis."""
    rows = len(next(iter(codes.values()))) if codes else 1
    new = np.tile(np.arange(count, dtype=np.int16), rows)
    return {**{name: np.repeat(column, count) for name, column in codes.items()}, axis: new}


def _complexity(candidates: Candidates) -> NDArray[np.int8]:
    """[N] axes that are off their neutral value."""
    counts = np.zeros(len(candidates), dtype=np.int8)
    for axis, codes in candidates.codes.items():
        neutral = AXES[axis].neutral
        counts += np.array([value != neutral for value in candidates.values[axis]])[codes]
    return counts


class _Waiting:
    """A condition that is asked as soon as all axes that it reads have joined."""

    def __init__(self, condition: Condition, asked: AskedLayout) -> None:
        self._condition, self._asked = condition, asked
        self._axes: list[str] = []

    def met(self, codes: dict[str, NDArray[np.int16]], values: AxisValues) -> NDArray[np.bool_] | None:
        """Returns for each row whether it meets the condition, or None while an axis that it reads has yet to join."""
        while all(axis in codes for axis in self._axes):
            sizes = [len(values[axis]) for axis in self._axes]
            place = np.zeros(len(next(iter(codes.values()))), dtype=np.int64)
            for axis, size in zip(self._axes, sizes, strict=True):
                place = place * size + codes[axis]
            table = self._answers(place, sizes, values)
            if table is not None:
                met: NDArray[np.bool_] = table[place]
                return met
        return None

    def _answers(self, place: NDArray[np.int64], sizes: Sequence[int], values: AxisValues) -> NDArray[np.bool_] | None:
        """The answer for each combination of the axes' values that occurs; None if it has read another axis."""
        table = np.zeros(math.prod(sizes), dtype=np.bool_)
        table[place] = True
        for number in np.flatnonzero(table):
            for axis, code in zip(self._axes, np.unravel_index(number, sizes) if sizes else (), strict=True):
                self._asked.values[axis] = values[axis][code]
            self._asked.read.clear()
            problem = self._condition()
            if axes := self._asked.read.difference(self._axes):
                self._axes += sorted(axes)
                return None
            if problem is not None and not self._axes:
                raise ConfigError(problem)
            table[number] = problem is None
        return table
