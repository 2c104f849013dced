"""The space of layouts: what the rules accept and nothing else, and no run twice."""

import dataclasses
import itertools
import random

import pytest

from megatron.base.errors import ConfigError
from megatron.command_line.read import parse
from megatron.config.data_parallel import AUTO
from megatron.config.mesh import mesh_of
from megatron.config.rules.check import problems
from megatron.config.run import RunConfig
from megatron.config.settings import RunSettings, resolve
from megatron.planner.search.layout import AXES, Candidates, Layout, choices_of
from megatron.planner.search.space import space_of
from megatron.schedule.schedules.interleaved import group_sizes
from tests.unit.planner.search.runs import RUNS, WORLD, run_of, some_choices


def copies_in(run: RunConfig, settings: RunSettings) -> int:
    """The most copies of a parameter."""
    mesh = settings.mesh
    return max(mesh.dp * mesh.cp, mesh.edp if run.model.num_experts is not None else 1)


def meaning(run: RunConfig) -> tuple:
    """What a run does, so that two runs that do the same have one value. Independent of the space's own conditions."""
    settings = resolve(run, mesh_of(run.parallel, WORLD))
    mesh, pipeline, replicas = settings.mesh, settings.pipeline, settings.data_parallel
    parallel, experts = run.parallel, run.model.num_experts is not None
    m = settings.batches.final_num_microbatches
    group = pipeline.schedule.takes_groups and group_sizes(mesh.pp, m, pipeline.group or mesh.pp)
    copies = copies_in(run, settings)
    kinds, inner = set(settings.attention_comm_types), settings.context_inner
    if mesh.cp == 1:
        kinds = set()
    elif kinds == {"a2a+p2p"} and inner in (1, mesh.cp):
        kinds = {"p2p" if inner == 1 else "a2a"}
    shards = "no_shard" if replicas.instances == copies else replicas.shards
    recompute = [
        [(list(layers), again) for layers, again in run.recompute.groups(stage.layers) if layers]
        for stage in pipeline.stages
    ]
    return (
        (mesh.tp, mesh.cp, mesh.pp, mesh.ep, mesh.etp if experts else 1),
        settings.sequence_parallel,
        parallel.tp_comm_overlap and mesh.tp > 1,
        (str(sorted(kinds)), inner if kinds == {"a2a+p2p"} else 1),
        (pipeline.schedule.name, str(pipeline.stages), str(group)),
        run.train.micro_batch_size,
        None if copies == 1 else (shards, replicas.mode, replicas.overlap_reduce),
        None if copies == 1 or shards == "no_shard" else (replicas.overlap_gather, replicas.instances),
        (str(recompute), str(sorted(run.recompute.modules)), run.recompute.recompute_policy),
        (run.activation_offload.kind, run.activation_offload.pipeline_offload_ratio or "0"),
        str(settings.optimizer_offload),
    )


def shares_nothing(run: RunConfig) -> bool:
    """Whether each instance of the optimizer is one rank: such layouts are left out where one instance may be
    chosen."""
    settings = resolve(run, mesh_of(run.parallel, WORLD))
    instances = settings.data_parallel.instances
    return instances > 1 and instances == copies_in(run, settings)


def overlaps_nothing(run: RunConfig) -> bool:
    """Whether nothing is left to overlap with products: such layouts are left out."""
    parallel, settings = run.parallel, resolve(run, mesh_of(run.parallel, WORLD))
    left = parallel.tp_comm_overlap_rs or settings.sequence_parallel
    return parallel.tp_comm_overlap and settings.mesh.tp > 1 and not left


def reduces_as_said(layout: Layout, run: RunConfig) -> bool:
    """Whether gradients are reduced in the layout's own mode: another one that the sharding needs must be chosen,
    too."""
    settings = resolve(run, mesh_of(run.parallel, WORLD))
    return copies_in(run, settings) == 1 or layout.reduce_mode in (AUTO, settings.data_parallel.mode)


def compare(run: RunConfig, draw: random.Random, most: int) -> int:
    """Compares the space of some choices with all of their product; returns the number of its layouts."""
    choices = some_choices(draw, most)
    accepted = {}
    for values in itertools.product(*(choices[axis] for axis in AXES)):
        layout = Layout(**dict(zip(AXES, values, strict=True)))
        applied = layout.apply(run)
        if problems(applied, WORLD) or (1 in choices["instances"] and shares_nothing(applied)):
            continue
        if overlaps_nothing(applied):
            continue
        if reduces_as_said(layout, applied):
            accepted[meaning(applied)] = layout
    try:
        found = space_of(run, WORLD, choices)
    except ConfigError:
        assert not accepted, f"refused whatever the layout, but {next(iter(accepted.values()))} passes"
        return 0
    seen = {}
    for number in range(len(found)):
        layout = found.layout(number)
        applied = layout.apply(run)
        assert problems(applied, WORLD) == [], layout
        what = meaning(applied)
        assert what not in seen, f"{layout} is {seen[what]}"
        seen[what] = layout
    missing = [layout for what, layout in accepted.items() if what not in seen]
    assert not missing, f"{len(missing)} of {len(accepted)} are missing, as {missing[0]}"
    assert not [layout for what, layout in seen.items() if what not in accepted]
    return len(found)


@pytest.mark.parametrize("name", RUNS)
def test_space_is_what_the_rules_accept(name):
    draw, run = random.Random(name), run_of(RUNS[name])
    for _ in range(2):
        compare(run, draw, 200)


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_many_spaces_are_what_the_rules_accept(name):
    draw, run = random.Random(f"many {name}"), run_of(RUNS[name])
    found = 0
    for number in range(200):  # of some runs most choices leave nothing
        found += compare(run, draw, 1000)
        if number >= 20 and found > 20:
            return
    raise AssertionError(f"{found} layouts in all spaces")


LARGE = {
    "70B": ("--preset llama3.1-70b --seq-length 8192 --global-batch-size 512", 256),
    "405B": ("--preset llama3.1-405b --seq-length 8192 --global-batch-size 1024", 1024),
}
OTHERS = "--bf16 --vocab-size 128256 --train-iters 10 --lr 1e-4 --mock-data --tokenizer-type NullTokenizer"


def large_space(name: str) -> tuple[RunConfig, int, Candidates]:
    flags, world_size = LARGE[name]
    run = parse(f"{flags} {OTHERS}".split(), description="")
    return run, world_size, space_of(run, world_size, choices_of(run, world_size))


def test_a_large_space_is_ordered_and_passes():
    run, world_size, found = large_space("70B")
    assert len(found) >= 300_000
    plain = dataclasses.asdict(Layout())
    off = sum((found.column(axis) != value).astype(int) for axis, value in plain.items())
    assert off[0] < off[-1] and (off[1:] >= off[:-1]).all()
    for number in random.Random(0).sample(range(len(found)), 100):
        assert problems(found.layout(number).apply(run), world_size) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE)
def test_layouts_of_a_large_space_pass(name):
    run, world_size, found = large_space(name)
    assert len(found) >= 300_000
    for number in random.Random(1).sample(range(len(found)), 2000):
        assert problems(found.layout(number).apply(run), world_size) == []


def test_a_fixed_flag_may_leave_nothing():
    run = run_of("--preset llama-tiny --tensor-model-parallel-size 3")
    assert len(space_of(run, WORLD, choices_of(run, WORLD))) == 0


def test_a_run_that_no_layout_mends_is_refused():
    run = run_of("--preset llama-tiny --lora-rank 4")
    with pytest.raises(ConfigError, match="adapts a model that is trained already"):
        space_of(run, WORLD, choices_of(run, WORLD))
