"""The bounds of the step time: never above the exact time, close to it, and the exact time without a model per
layout."""

import dataclasses

import numpy as np
import pytest

from megatron.command_line.read import parse
from megatron.config.mesh import mesh_of
from megatron.config.settings import resolve
from megatron.planner.search.axis import COPIES, GROUPS, LAYER, MESH, RECOMPUTE, SHARDING, STAGES, UPDATE
from megatron.planner.search.layout import AXES, axes_of, default_choices
from megatron.planner.search.space import space_of
from megatron.planner.search.time_bounds import TimeBounds
from megatron.planner.time.constants import Constants, fitted
from megatron.planner.time.hardware import built_in
from megatron.planner.time.profiled import ProfiledClock, cluster_of
from megatron.planner.time.software import Software
from megatron.planner.time.step_time import StepModel
from tests.unit.planner.models import EXPERTS, LLAMA, run_of
from tests.unit.planner.profiles import RUN, profile_of

TIED = dataclasses.replace(LLAMA, untie_embeddings_and_output_weights=False, swiglu=False, num_layers=6)
LARGE = dataclasses.replace(
    LLAMA, num_layers=80, hidden_size=8192, ffn_hidden_size=28672, num_attention_heads=64, num_query_groups=8
)
PREDICTIONS = dataclasses.replace(EXPERTS, mtp_num_layers=2)
UNFUSED = Software(unfused_attention=True)
# Model, world size, cluster, software, constants, samples of a step, sequence length.
CASES = {
    "small": (LLAMA, 16, "h100:2x8", Software(), fitted(), 64, 4096),
    "tied": (TIED, 12, "a100:3x4", UNFUSED, Constants(), 48, 2048),
    "experts": (EXPERTS, 16, "h100:4x4", Software(), fitted(), 32, 4096),
    "predictions": (PREDICTIONS, 16, "h100:4x4", Software(), fitted(), 32, 4096),
    "large": (LARGE, 256, "h100:32x8", Software(), fitted(), 256, 8192),
}
# Where ranks wait for every transfer, the bound counts less of the waits.
MEDIAN_GAP = {"small": 0.05, "tied": 0.1, "experts": 0.02, "predictions": 0.02, "large": 0.02}


def sampled(name, count, seed=0, **fixed):
    """(candidates, bounds, exact times by a model each)."""
    model, world, cluster_name, software, constants, batch, seq = CASES[name]
    cluster = built_in(cluster_name)
    run = run_of(model, seq, batch)
    if name == "tied":
        run = dataclasses.replace(run, parallel=dataclasses.replace(run.parallel, overlap_p2p_communication=False))
    choices = {**default_choices(run, world), "sequence_parallel": (False, True), **fixed}
    choices["pp"] = tuple(size for size in choices["pp"] if size <= 8)
    space = space_of(run, world, choices)
    rng = np.random.default_rng(seed)
    candidates = space.take(np.sort(rng.choice(len(space), min(count, len(space)), replace=False)))
    exact = []
    for number in range(len(candidates)):
        chosen = candidates.layout(number).apply(run)
        step = StepModel(chosen, resolve(chosen, mesh_of(chosen.parallel, world)), cluster, software)
        exact.append(float(np.squeeze(step.seconds(step.clock(constants)))))
    bounds = TimeBounds(run, world, cluster, software, step.clock(constants))
    return candidates, bounds, np.array(exact)


def check(name, count, **fixed):
    candidates, bounds, exact = sampled(name, count, **fixed)
    least = bounds.seconds(candidates)
    above = np.flatnonzero(least > exact)
    assert not len(above), (candidates.layout(above[0]), least[above[0]], exact[above[0]])
    played, stays = bounds.played_seconds(candidates), candidates.column("offload") == 0
    assert played[stays] == pytest.approx(exact[stays], rel=1e-9)
    assert (played <= exact * (1 + 1e-9)).all()
    return 1 - least / exact


@pytest.mark.parametrize("name", list(CASES))
def test_bounds_are_below_the_exact_time_and_close(name):
    gaps = check(name, 60)
    assert np.median(gaps) < MEDIAN_GAP[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", list(CASES))
def test_bounds_of_many_layouts(name):
    gaps = check(name, 1300)
    assert np.median(gaps) < MEDIAN_GAP[name]


def test_bounds_with_a_profile():
    """Layers and ends come from different rows of it."""
    run = parse([*RUN, "--global-batch-size", "8"], description="")
    machine = profile_of()
    space = space_of(run, 4, {**default_choices(run, 4), "offload": (0.0,), "optimizer_offload": (0.0,)})
    candidates = space.take(np.arange(0, len(space), max(1, len(space) // 40)))
    cluster, clock = cluster_of(machine), ProfiledClock(machine, run, Software(), "p.json")
    exact = []
    for number in range(len(candidates)):
        chosen = candidates.layout(number).apply(run)
        step = StepModel(chosen, resolve(chosen, mesh_of(chosen.parallel, 4)), cluster, Software())
        exact.append(float(step.time(clock).seconds))
    bounds = TimeBounds(run, 4, cluster, Software(), ProfiledClock(machine, run, Software(), "p.json"))
    least = bounds.seconds(candidates)
    assert (least <= np.array(exact) * (1 + 1e-9)).all()
    assert np.median(1 - least / exact) < 0.1 and len(set(candidates.column("recompute").tolist())) > 3


def test_every_axis_is_part_of_something():
    parts = LAYER, MESH, STAGES, GROUPS, RECOMPUTE, SHARDING, UPDATE, COPIES
    assert axes_of(*parts) == tuple(AXES)
    assert all(axes_of(part) for part in parts)


def test_nothing_to_bound():
    candidates, bounds, _ = sampled("small", 1)
    nothing = candidates.take(np.array([], dtype=int))
    assert len(bounds.seconds(nothing)) == len(bounds.played_seconds(nothing)) == 0
