"""The moments of a schedule: a few microbatches have those of many."""

import itertools

import numpy as np
import pytest

from megatron.config.mesh import mesh_of
from megatron.config.settings import resolve
from megatron.planner.memory import moments, step
from megatron.planner.memory.moments import KEPT, MESSAGES, counts_per_class, enough_microbatches, moments_of
from megatron.planner.memory.plan import plan_memory
from megatron.schedule.registry import SCHEDULES
from megatron.schedule.spec import ScheduleSizes
from megatron.schedule.validate import memory_in_flight
from megatron.spec.sizes import Target
from tests.unit.config.runs import make_run

STAGES = {"interleaved": (2, 3), "zb-v": (2,)}


def sizes_of(spec, ranks, microbatches):
    """All sizes with so many ranks and microbatches."""
    for p, m in itertools.product(ranks, microbatches):
        for v in STAGES.get(spec.name, (1,)):
            for group in (p, p + 1, 2 * p) if spec.takes_groups else (p,):
                yield ScheduleSizes(p, v, m, group)


def same_as_with_all(spec, sizes, monkeypatch, **how):
    """Whether the moments of each rank are those of all microbatches."""
    for rank in range(sizes.p):
        found = moments_of(spec, sizes, (rank,), range(sizes.v), **how)
        with monkeypatch.context() as patch:
            patch.setattr(moments, "_few_microbatches", lambda spec, sizes: sizes)
            everything = moments_of(spec, sizes, (rank,), range(sizes.v), **how)
        np.testing.assert_array_equal(found, everything, err_msg=f"{spec.name} {sizes} rank {rank}")


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_few_microbatches_are_enough(name, monkeypatch):
    spec = SCHEDULES[name]
    for sizes in sizes_of(spec, (2, 3), (7, 13, 32)):
        same_as_with_all(spec, sizes, monkeypatch, offload=False, overlap=True, cpu=False)
    enough = enough_microbatches(spec, ScheduleSizes(2, STAGES.get(name, (1,))[0], 64, 2)).m
    assert enough == 64 if name == "gpipe" else enough <= 16


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_few_microbatches_are_enough_in_all_sizes(name, monkeypatch):
    spec = SCHEDULES[name]
    for sizes in sizes_of(spec, range(2, 9), (1, 2, 5, 16, 31, 47, 64)):
        for offload, overlap in ((False, True), (True, True), (False, False)):
            same_as_with_all(spec, sizes, monkeypatch, offload=offload, overlap=overlap, cpu=False)


@pytest.mark.parametrize("name", SCHEDULES)
def test_microbatches_in_flight(name):
    """During a computation one microbatch less is kept than in flight, or as many in a backward."""
    spec = SCHEDULES[name]
    sizes = ScheduleSizes(4, STAGES.get(name, (1,))[0], 9, 4)
    schedule = spec.build(4, 9, v=sizes.v, group=4 if spec.takes_groups else None)
    for rank, in_flight in enumerate(memory_in_flight(schedule)):
        counts = moments_of(spec, sizes, (rank,), (0,) * sizes.v, offload=False, overlap=True, cpu=False)
        kept = counts[:, KEPT : counts_per_class(offload=False) : 1]
        most = (kept[:, 0] + kept[:, 1] + kept[:, 2]).max()  # KEPT, DEFERRED and a running FORWARD
        assert most == in_flight.activations
        assert counts[:, MESSAGES].max() <= 4 or name == "gpipe"


def plans_with_few_and_all(monkeypatch, name, p, m, **fields):
    """The plans of all ranks by a few microbatches, and by all."""
    v = STAGES.get(name, (1,))[0]
    parallel = {"pipeline_model_parallel_size": p, "pipeline_schedule": name, **fields}
    if name == "interleaved":
        parallel["num_virtual_stages_per_pipeline_rank"] = v
    run = make_run(num_layers=p * v * 3, global_batch_size=2 * m, **parallel)
    settings = resolve(run, mesh_of(run.parallel, p))
    found = plan_memory(run, settings, Target(cpu=False))
    with monkeypatch.context() as patch:
        patch.setattr(step, "enough_microbatches", lambda spec, sizes: sizes)
        return found, plan_memory(run, settings, Target(cpu=False))


@pytest.mark.parametrize("fields", [{}, {"pipeline_offload_ratio": "0.5"}], ids=["kept", "offloaded"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_plans_of_a_few_microbatches_are_those_of_all(name, fields, monkeypatch):
    few, everything = plans_with_few_and_all(monkeypatch, name, 3, 31, **fields)
    assert few == everything, "and so are their moments"


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{}, {"pipeline_offload_ratio": "0.5"}], ids=["kept", "offloaded"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_plans_of_all_sizes(name, fields, monkeypatch):
    for p, m in itertools.product((2, 4, 5, 8), (1, 4, 17, 64)):
        few, everything = plans_with_few_and_all(monkeypatch, name, p, m, **fields)
        assert few == everything, (p, m)
