"""The closed-form bound of a schedule's time: never above the played time, and close to it for costs of real models."""

import itertools

import numpy as np
import pytest

from megatron.config.pipeline import PipelineSettings
from megatron.planner.schedule.bound import least_makespans
from megatron.schedule.costs import Costs
from megatron.schedule.events import Events
from megatron.schedule.graph import ScheduleGraph
from megatron.schedule.passes import with_transfers
from megatron.schedule.registry import SCHEDULES

COLUMNS = 30
# p, v, m, group: more and fewer microbatches than stages, and numbers that divide nothing.
SHAPES = [
    (2, 2, 3, None),
    (4, 3, 8, None),
    (3, 2, 7, None),
    (4, 2, 5, None),
    (4, 4, 24, 8),
    (4, 2, 19, 4),
    (4, 2, 1, None),
]
MODES = [(True, False), (False, False), (False, True)]  # overlap, blocking


def wild_costs(stages, rng):
    """Costs that no model has: each stage and boundary its own, over two orders of magnitude."""

    def draw(rows):
        return np.exp(1.5 * rng.normal(size=(rows, COLUMNS)))

    per_stage = (
        "forward",
        "input_grad",
        "weight_grad",
        "backward",
        "offload",
        "reload",
        "bucket",
        "forward_exchange",
        "backward_exchange",
    )
    return Costs(
        **{name: draw(stages) for name in per_stage}, transfer=draw(stages - 1), latency=0.1 * draw(stages - 1)
    )


def real_costs(stages, rng):
    """Equal layers, more work at both ends, transfers of a few percent of a stage."""

    def draw(low, high):
        return np.ones((stages, COLUMNS)) * rng.uniform(low, high, COLUMNS)

    forward, input_grad, weight_grad = draw(0.9, 1.1), draw(0.9, 1.5), draw(0.8, 1.2)
    for seconds in (forward, input_grad, weight_grad):
        seconds[0] *= rng.uniform(1, 1.1, COLUMNS)
        seconds[-1] *= rng.uniform(1, 1.3, COLUMNS)
    boundary = draw(0, 0.1)[1:]
    return Costs(
        forward=forward,
        input_grad=input_grad,
        weight_grad=weight_grad,
        backward=input_grad + weight_grad,
        transfer=boundary,
        latency=0.1 * boundary,
        offload=0 * forward,
        reload=0 * forward,
        bucket=draw(0, 0.5),
        forward_exchange=0 * forward,
        backward_exchange=0 * forward,
    )


def bound_and_time(spec, p, v, m, group, costs_of, *, overlap=True, blocking=False, buckets=1):
    """[K] of each."""
    group = group if spec.takes_groups else None
    asked = v if spec.virtual_stages is None else None
    schedule = with_transfers(spec.build(p, m, v=asked, group=group), overlap=overlap)
    costs = costs_of(schedule.placement.num_stages, np.random.default_rng(m))
    played = ScheduleGraph(Events(schedule, buckets, blocking)).makespans(costs)
    pipeline = PipelineSettings(spec, schedule.placement, (), group, overlap)
    return least_makespans(pipeline, np.full(COLUMNS, m), costs, np.full(COLUMNS, buckets)), played


@pytest.mark.parametrize("name", list(SCHEDULES))
def test_never_above_the_played_time(name):
    for shape, (overlap, blocking), costs in itertools.product(SHAPES, MODES, (wild_costs, real_costs)):
        bound, time = bound_and_time(SCHEDULES[name], *shape, costs, overlap=overlap, blocking=blocking, buckets=3)
        assert (bound > 0).all() and (bound <= time * (1 + 1e-12)).all(), (shape, overlap, blocking)


@pytest.mark.parametrize("name", list(SCHEDULES))
def test_close_to_the_played_time_of_real_models(name):
    gaps = []
    for shape, buckets in itertools.product([(4, 2, 8, None), (4, 2, 32, None), (8, 2, 16, None)], (1, 3)):
        bound, time = bound_and_time(SCHEDULES[name], *shape, real_costs, buckets=buckets)
        gaps.append(1 - bound / time)
    # The bound does not know in which order a schedule splits its backwards.
    assert np.median(gaps) < {"zb-h1": 0.02, "zb-v": 0.05}.get(name, 0.01)
