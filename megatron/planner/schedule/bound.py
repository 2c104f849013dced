"""A lower bound of the step time of a schedule in closed form, for many costs at once.

Playing a schedule visits every action. The bound follows chains of work that hardly depend on the order of actions:

- A rank begins when the first microbatch has passed all stages before its first stage.
- The last gradient of this stage comes after all forwards and gradients of the rank, because every microbatch passes
  the rank's later stages between its forward and its gradient there. Then it passes all stages before.
- A rank does all of its work, and buckets of gradients are reduced behind the last backward of their stage, one after
  the other. The rank's last stage is the first to fill a bucket.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from megatron.config.pipeline import PipelineSettings
from megatron.schedule.costs import Costs
from megatron.schedule.schedules.interleaved import group_sizes

_Array = NDArray[np.float64]
_Counts = NDArray[np.int64]


def least_makespans(pipeline: PipelineSettings, m: _Counts, costs: Costs, num_buckets: _Counts) -> _Array:
    """Returns [K] seconds that the schedule takes at least, for K costs.

    m: [K] microbatches. num_buckets: [K] of each stage, 1 or more.
    """
    rank_of, splits_backward = np.array(pipeline.placement.rank_of), pipeline.schedule.splits_backward
    stages = np.arange(len(rank_of))
    held = rank_of == np.arange(pipeline.placement.num_ranks)[:, None]  # [ranks, stages]
    first, last = np.where(held, stages, len(stages)).min(axis=1), np.where(held, stages, -1).max(axis=1)
    hop = (rank_of[1:] != rank_of[:-1])[:, None] * (costs.transfer + costs.latency)
    gradient, fills = costs.backward, costs.backward  # fills: the action that fills buckets
    if splits_backward:
        gradient, fills = costs.input_grad, costs.weight_grad
    # Until the first forward of each stage; and from the end of its last gradient to that of the first stage.
    path_up, path_down = _sums_before(costs.forward[:-1] + hop), _sums_before(gradient[:-1] + hop)
    sums = held.astype(float)
    worked = path_up[first] + m * (sums @ (costs.forward + gradient))
    # The last forward of a stage is followed by the passage through all later stages, there and back.
    turned = path_up[-1] + costs.forward[-1] + path_down[-1] + gradient[-1]
    passed = turned + (m - 1) * costs.forward[first] - path_down[first]
    ended = np.maximum(worked, passed)
    ended = np.maximum.accumulate((ended + path_down[first])[::-1])[::-1] - path_down[first]
    # From the end of the action that fills them, the last bucket is reduced, or all buckets are since the first was
    # full.
    tail = np.maximum(costs.bucket, num_buckets * costs.bucket - (1 - 1 / num_buckets) * fills)
    if splits_backward:
        ended = ended + fills[first]
        worked += m * (sums @ costs.weight_grad)
        worked += np.stack([tail[mask].min(axis=0) for mask in held])  # the last action fills the buckets of a stage
    else:
        worked -= _last_group(pipeline, m) * (sums @ gradient - gradient[last]) + (1 - 1 / num_buckets) * fills[last]
        worked += num_buckets * (sums @ costs.bucket)
    least: _Array = np.maximum(worked, ended + tail[first]).max(axis=0)
    return least


def _last_group(pipeline: PipelineSettings, m: _Counts) -> _Counts:
    """Returns [K] gradients of each stage of a rank that at most follow the last gradient of its last stage."""
    if not pipeline.schedule.takes_groups:
        return m
    p = pipeline.placement.num_ranks
    counts, place = np.unique(m, return_inverse=True)
    return np.array([group_sizes(p, count, pipeline.group or p)[-1] for count in counts.tolist()])[place]


def _sums_before(steps: _Array) -> _Array:
    """Returns [n + 1, K], the sums of the first 0 to n of n rows."""
    return np.concatenate([np.zeros((1, steps.shape[1])), np.cumsum(steps, axis=0)])
