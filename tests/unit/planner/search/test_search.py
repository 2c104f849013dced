"""The search returns what planning every candidate returns."""

import dataclasses
import itertools

import numpy as np
import pytest

from megatron.planner.search.choices import default_choices
from megatron.planner.search.search import Planner, rounded, search
from megatron.planner.search.space import space_of
from megatron.planner.time.constants import fitted
from megatron.planner.time.data_sheet import DataSheetClock
from megatron.planner.time.hardware import GIB, built_in, used_memory, with_device
from megatron.planner.time.software import Software
from tests.unit.planner.models import EXPERTS, LLAMA, run_of

# Model, world size, samples, sequence length, cluster, GiB of a device, values of some axes.
SPACES = {
    "one node": (LLAMA, 8, 32, 4096, "h100:1x8", 20, {"cp": (1, 2), "offload": (0.0,)}),
    "small memory": (LLAMA, 8, 32, 4096, "h100:1x8", 9, {"cp": (1,), "instances": (1,), "schedule": ("1f1b", "zb-v")}),
    "two nodes": (LLAMA, 16, 64, 8192, "a100:2x8", 24, {"tp": (2, 4), "offload": (0.0,), "optimizer_offload": (0.0,)}),
    "slow network": (LLAMA, 8, 64, 4096, "h100:4x2", 30, {"offload": (0.0,), "micro_batch": (1, 2)}),
    "long sequence": (LLAMA, 8, 16, 32768, "h100:1x8", 80, {"micro_batch": (1,), "offload": (0.0, 0.5)}),
    "experts": (EXPERTS, 8, 32, 4096, "h100:1x8", 40, {"cp": (1,), "offload": (0.0,), "instances": (1,)}),
}


def planner_and_space(name, memory=None, **fixed):
    model, world, batch, seq, cluster, gib, values = SPACES[name]
    run = run_of(model, seq, batch)
    cluster = with_device(built_in(cluster), memory=(memory or gib) * GIB)
    clock = DataSheetClock(fitted(), cluster)
    space = space_of(run, world, {**default_choices(run, world), **values, **fixed})
    return Planner(run, world, cluster, Software(), clock), space


def tried_completely(planner, candidates, keep):
    """The numbers of the fastest that fit, from the exact time and memory of all."""
    times = np.array([rounded(planner.seconds(candidates.layout(number))) for number in range(len(candidates))])
    found = []
    for number in np.argsort(times, kind="stable").tolist():
        (planned,) = planner.plan(candidates, [number])
        if planner.fits(planned):
            found.append(number)
        if len(found) == keep:
            break
    return found


def check(name, **fixed):
    planner, candidates = planner_and_space(name, **fixed)
    found = search(planner, candidates, 5)
    assert [planned.number for planned in found.best] == tried_completely(planner, candidates, 5)
    assert found.out_of_memory + found.bounded_out + found.simulated == len(candidates)
    assert all(planner.fits(planned) and planned.memory <= planner.limit for planned in found.best)
    return len(candidates), found


def test_the_same_as_trying_everything():
    few = {"recompute": ("none", "full"), "offload": (0.0,), "optimizer_offload": (0.0,), "tp": (1, 2), "cp": (1,)}
    number, found = check("one node", micro_batch=(1, 2), instances=(1,), schedule=("1f1b", "zb-h1"), **few)
    assert number > 100 > found.simulated


@pytest.mark.slow
@pytest.mark.parametrize("name", list(SPACES))
def test_the_same_as_trying_everything_in_larger_spaces(name):
    number, _ = check(name)
    assert number > 3000


def test_more_copies_are_never_faster():
    parts = (0.0, 0.25, 0.5, 0.75, 1.0)
    planner, candidates = planner_and_space("small memory", memory=80, offload=parts)
    some = np.random.default_rng(0).choice(len(candidates), 30, replace=False).tolist()
    for layout in map(candidates.layout, some):
        times = [planner.seconds(dataclasses.replace(layout, offload=part)) for part in parts]
        assert all(less <= more * (1 + 1e-12) for less, more in itertools.pairwise(times)), layout


def test_nothing_fits():
    planner, candidates = planner_and_space("one node", memory=3.1, recompute=("none", "full"), micro_batch=(1, 8))
    found = search(planner, candidates)
    assert not found.best and not any(map(planner.fits, found.exact.values()))
    assert found.least is not None and found.least.memory > planner.limit
    some = np.random.default_rng(0).choice(len(candidates), 20, replace=False).tolist()
    assert all(found.least.memory <= planned.memory for planned in planner.plan(candidates, some))


def test_memory_of_the_host_counts():
    few = {
        "tp": (1,),
        "pp": (4,),
        "schedule": ("1f1b",),
        "sharding": ("optim",),
        "instances": (1,),
        "micro_batch": (1,),
    }
    planner, candidates = planner_and_space("one node", offload=(1.0,), recompute=("none",), **few)
    assert search(planner, candidates).best
    planner.cluster = dataclasses.replace(planner.cluster, host_memory=1 * GIB)
    assert not search(planner, candidates).best


def test_used_memory_is_more_than_requested():
    assert used_memory(10 * GIB) > 10 * GIB
