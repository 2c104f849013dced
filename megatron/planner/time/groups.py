"""The parts of a predicted step under the names that --profile-timeline gives to those of a measured one."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from megatron.planner.time.constants import Number
from megatron.planner.time.stage_time import (
    ATTENTION,
    BUBBLE,
    CP,
    DP,
    EP,
    GEMM,
    HOST,
    INTERFERENCE,
    MEMORY,
    OFFLOAD,
    OPTIMIZER,
    PP,
    RECOMPUTE,
    STEP,
    STRAGGLER,
    TP,
)

# A measured step counts recompute and the update as compute, too.
GROUPS: Mapping[str, tuple[str, ...]] = {
    "compute": (GEMM, ATTENTION, MEMORY, INTERFERENCE),
    "recompute": (RECOMPUTE,),
    "tp": (TP,),
    "cp": (CP,),
    "ep": (EP,),
    "dp": (DP,),
    "pp": (PP,),
    "offload": (OFFLOAD,),
    "bubble": (BUBBLE,),
    "optimizer": (OPTIMIZER,),
    "other": (HOST, STEP, STRAGGLER),
}


def grouped(parts: Mapping[str, Number]) -> dict[str, float]:
    """Returns the seconds of each group, which add up to those of the parts."""
    return {
        group: sum(float(np.mean(parts[part])) for part in members if part in parts)
        for group, members in GROUPS.items()
    }
