"""The computations of a schedule as arrays, by which memory counts them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron.schedule.schedule import COMPUTE, Action, Kind
from megatron.schedule.spec import ScheduleSizes, ScheduleSpec

_Flags = NDArray[np.bool_]
_CODES = {kind: number for number, kind in enumerate(sorted(COMPUTE))}


@dataclass(frozen=True)
class Computations:
    """The [n] computations of a rank. Of each, whether it is a forward, a gradient of an input, the first or the second
    half of a split backward; and its stage and microbatch."""

    forward: _Flags
    input_grad: _Flags
    first_half: _Flags
    second_half: _Flags
    stage: NDArray[np.int64]
    microbatch: NDArray[np.int64]

    @classmethod
    def of(cls, actions: Sequence[Action]) -> Computations:
        """Returns those of a rank's list."""
        kinds, stages, microbatches = zip(*actions, strict=True)
        kind = np.fromiter(map(_CODES.__getitem__, kinds), np.int8, len(kinds))
        half = kind == _CODES[Kind.INPUT_GRAD]
        return cls(
            kind == _CODES[Kind.FORWARD],
            half | (kind == _CODES[Kind.BACKWARD]),
            half,
            kind == _CODES[Kind.WEIGHT_GRAD],
            np.array(stages),
            np.array(microbatches),
        )


@functools.lru_cache(maxsize=1024)
def computations_of(spec: ScheduleSpec, sizes: ScheduleSizes) -> tuple[NDArray[np.int64], tuple[Computations, ...]]:
    """Returns the rank of each stage, and the computations of each rank."""
    schedule = spec.schedule(sizes)
    return np.array(schedule.placement.rank_of), tuple(map(Computations.of, schedule.actions))
