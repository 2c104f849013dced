"""How far to trust the predicted time of a layout: errors on published runs with the features that it uses.

Constants are fitted to published runs, most of which are dense, shard the optimizer alone, and copy nothing to the
host. A feature that makes predictions worse, or that no published run has, widens the error of a layout, and the layout
is ranked as if it took longer than predicted by its whole error: so it is first only where it is ahead by more than
that.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron.config.run import RunConfig
from megatron.planner.search.layout import Candidates
from megatron.planner.time.constants import MANY_NODES, blind_errors

_Array = NDArray[np.float64]


@dataclass(frozen=True)
class Confidence:
    """errors: [N] errors of the seconds of a step, in units of them. penalties: [N] the error of layouts with a feature
    of the layout that is not confirmed, 0 for all others."""

    errors: _Array
    penalties: _Array


def confidence_of(candidates: Candidates, run: RunConfig, world_size: int, node: int) -> Confidence:
    """Returns the errors of layouts of a run on `world_size` devices, `node` of which are in a node.

    The squares of the errors that features add to that of ordinary dense runs are summed, because they are independent.
    For copies to the host, which no published run has, the error that one dense run in ten exceeds stands in. Experts
    widen the error of all layouts of their model alike, and have no penalty.
    """
    published = blind_errors()
    ordinary = published["dense"].median
    replicas = world_size // (candidates.column("pp") * candidates.column("instances"))
    many_nodes = (candidates.column("sharding") == "optim_grads_params") & (replicas > MANY_NODES * node)
    copied = (candidates.column("offload") > 0) | (candidates.column("optimizer_offload") > 0)
    excess = np.zeros(len(candidates))
    excess += many_nodes * (published["ZeRO-3 over many nodes"].median ** 2 - ordinary**2)
    excess += copied * (published["dense"].p90 ** 2 - ordinary**2)
    model = published["experts"].median if any(run.model.moe_layers) else ordinary
    errors = np.sqrt(model**2 + excess)
    return Confidence(errors, np.where(many_nodes | copied, errors, 0.0))
