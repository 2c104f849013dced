"""The search returns what planning every candidate returns: of each mesh the layout that ranks first."""

import dataclasses
import itertools

import numpy as np
import pytest

from megatron.planner.search.confidence import Confidence, confidence_of
from megatron.planner.search.layout import Candidates, Layout, default_choices
from megatron.planner.search.search import MESH, Planner, rounded, search
from megatron.planner.search.space import space_of
from megatron.planner.time.constants import blind_errors, fitted
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


class Trusting(Planner):
    """Ranks layouts by their predicted time alone."""

    def confidence(self, candidates):
        return Confidence(np.zeros(len(candidates)), np.zeros(len(candidates)))


def planner_and_space(name, memory=None, free=0.0, kind=Planner, **fixed):
    model, world, batch, seq, cluster, gib, values = SPACES[name]
    run = run_of(model, seq, batch)
    cluster = with_device(built_in(cluster), memory=(memory or gib) * GIB)
    clock = DataSheetClock(fitted(), cluster)
    space = space_of(run, world, {**default_choices(run, world), **values, **fixed})
    return kind(run, world, cluster, Software(), clock, free), space


def tried_completely(planner, candidates, keep):
    """The numbers of the first of each mesh that fit, from the exact time and memory of all, and their penalties."""
    seconds = np.array([planner.seconds(candidates.layout(number)) for number in range(len(candidates))])
    ranking = [rounded(float(each)) for each in seconds * (1 + planner.confidence(candidates).penalties)]
    by_mesh = {}
    for number in np.argsort(ranking, kind="stable").tolist():
        mesh = tuple(getattr(candidates.layout(number), axis) for axis in MESH)
        if mesh not in by_mesh and planner.fits(planner.plan(candidates, [number])[0]):
            by_mesh[mesh] = number
        if len(by_mesh) == keep:
            break
    return list(by_mesh.values())


def check(name, **fixed):
    planner, candidates = planner_and_space(name, **fixed)
    found = search(planner, candidates, 5)
    assert [planned.number for planned in found.best] == tried_completely(planner, candidates, 5)
    assert found.out_of_memory + found.bounded_out + found.simulated == len(candidates)
    assert all(planner.fits(planned) and planned.memory <= planner.limit for planned in found.best)
    assert len({planned.mesh for planned in found.best}) == len(found.best)
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


class TestConfidence:
    def errors_of(self, *layouts, model=LLAMA, world=256, node=8):
        run = run_of(model, 4096, 256)
        confidence = confidence_of(Candidates.of(list(layouts)), run, world, node)
        return confidence.errors.tolist(), confidence.penalties.tolist()

    def test_ordinary_layouts_have_the_error_of_published_runs(self):
        errors, penalties = self.errors_of(Layout(tp=8, sharding="optim"), Layout(pp=4, sharding="optim_grads"))
        assert errors == [blind_errors()["dense"].median] * 2 and penalties == [0.0, 0.0]

    def test_parameters_that_are_sharded_over_many_nodes(self):
        zero_3 = Layout(sharding="optim_grads_params")
        few = dataclasses.replace(zero_3, instances=2), dataclasses.replace(zero_3, pp=2)
        errors, penalties = self.errors_of(zero_3, *few)
        assert errors[0] == penalties[0] == pytest.approx(blind_errors()["ZeRO-3 over many nodes"].median)
        assert penalties[1:] == [0.0, 0.0], "over 16 nodes"

    def test_copies_to_the_host(self):
        errors, penalties = self.errors_of(Layout(offload=0.5), Layout(optimizer_offload=1.0))
        assert errors == penalties == pytest.approx([blind_errors()["dense"].p90] * 2)

    def test_errors_add_up(self):
        layouts = Layout(sharding="optim_grads_params"), Layout(sharding="optim_grads_params", offload=0.5)
        (one, both), penalties = self.errors_of(*layouts)
        assert one < both < 2 * one and penalties == [one, both]

    def test_experts_widen_the_error_of_all(self):
        errors, penalties = self.errors_of(Layout(), Layout(offload=1.0), model=EXPERTS)
        assert errors[0] == blind_errors()["experts"].median < errors[1] and penalties == [0.0, errors[1]]


def test_an_unconfirmed_layout_is_first_only_if_it_is_ahead_by_its_error():
    """Devices on which copies of activations are a little faster than all that fits without them."""
    fixed = {"tp": (1,), "pp": (4,), "offload": (0.0, 0.5, 1.0)}
    planner, candidates = planner_and_space("small memory", memory=5.5, **fixed)
    trusting, _ = planner_and_space("small memory", memory=5.5, kind=Trusting, **fixed)
    fastest, first = search(trusting, candidates, 1).best[0], search(planner, candidates, 1).best[0]
    assert fastest.layout.offload and not first.layout.offload
    assert fastest.seconds < first.seconds < fastest.seconds * (1 + blind_errors()["dense"].p90)
    smaller, candidates = planner_and_space("small memory", memory=5, **fixed)
    assert search(smaller, candidates, 1).best[0].layout.offload, "nothing else fits"


def test_a_part_of_the_device_stays_free():
    few = {"recompute": ("none", "full"), "offload": (0.0,), "optimizer_offload": (0.0,), "tp": (2,), "pp": (1, 2)}
    planner, candidates = planner_and_space("one node", memory=12, free=0.3, **few)
    assert planner.limit == pytest.approx(0.7 * 12 * GIB)
    assert (
        search(planner, candidates).best == search(planner_and_space("one node", memory=8.4, **few)[0], candidates).best
    )
