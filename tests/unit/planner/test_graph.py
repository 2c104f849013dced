"""The step times of many costs at once equal those of the simulator, to the last bit."""

import numpy as np
import pytest

from megatron.planner.schedule.graph import ManyCosts, ScheduleGraph
from megatron.schedule.offload_pass import with_offload
from megatron.schedule.passes import with_transfers
from megatron.schedule.registry import SCHEDULES
from megatron.schedule.simulate import Costs, simulate

PER_STAGE = ("forward", "input_grad", "weight_grad", "backward", "offload", "reload", "bucket")
BUCKETS, COLUMNS = 3, 4


def random_costs(stages, seed):
    rng = np.random.default_rng(seed)
    found = {name: rng.random((stages, COLUMNS)) for name in PER_STAGE}
    return ManyCosts(
        **found, transfer=rng.random((stages - 1, COLUMNS)), latency=0.1 * rng.random((stages - 1, COLUMNS))
    )


def one_of(costs, column, *, buckets, blocking):
    names = (*PER_STAGE[:-1], "transfer", "latency")
    each = tuple((seconds,) * buckets for seconds in costs.bucket[:, column])
    return Costs(
        **{name: tuple(getattr(costs, name)[:, column]) for name in names},
        buckets=each if buckets else (),
        blocking=blocking,
    )


@pytest.mark.parametrize("name", list(SCHEDULES))
@pytest.mark.parametrize(("p", "v", "m"), [(2, 2, 3), (4, 3, 8), (3, 2, 7)])
@pytest.mark.parametrize(("overlap", "blocking"), [(True, False), (False, False), (False, True)])
def test_equal_to_the_simulator(name, p, v, m, overlap, blocking):
    spec = SCHEDULES[name]
    built = spec.build(p, m, v=v if spec.virtual_stages is None else None)
    schedule = with_transfers(built, overlap=overlap)
    costs = random_costs(schedule.placement.num_stages, p * m)
    for buckets in (0, BUCKETS):
        found = ScheduleGraph(schedule, num_buckets=buckets, blocking=blocking).makespans(costs)
        for column in range(COLUMNS):
            one = simulate(schedule, one_of(costs, column, buckets=buckets, blocking=blocking))
            assert one.makespan == found[column]


@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
def test_with_copies(name):
    schedule = with_offload(with_transfers(SCHEDULES[name].build(4, 6), overlap=True))
    costs = random_costs(schedule.placement.num_stages, 1)
    found = ScheduleGraph(schedule).makespans(costs)
    for column in range(COLUMNS):
        assert simulate(schedule, one_of(costs, column, buckets=0, blocking=False)).makespan == found[column]


def test_joined_costs():
    schedule = SCHEDULES["1f1b"].build(2, 2)
    first, second = random_costs(2, 0), random_costs(2, 1)
    graph = ScheduleGraph(schedule)
    joined = graph.makespans(ManyCosts.joined([first, second]))
    assert np.array_equal(joined, np.concatenate([graph.makespans(first), graph.makespans(second)]))
