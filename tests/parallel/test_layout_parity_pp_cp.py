"""Training is the same however layers and sequences are cut: every schedule, every way of context parallelism."""

import dataclasses
import functools

import pytest
import torch

from megatron.config.context_parallel import inner_size
from megatron.config.data_parallel import data_parallel_settings
from megatron.config.rules.check import check
from megatron.tooling.layout_parity import assemble, compare, measure, reduced
from megatron.tooling.layouts import ParityLayout, under
from tests import pool
from tests.parallel.test_layout_parity import LIMIT, MODELS
from tests.unit.config.runs import make_run
from tests.unit.models.builds import LONGROPE

# Two updates, each read by a step. The first gradients are compared themselves, and tools/layout_parity.py runs as many
# steps as it is asked for.
STEPS = 3
LAYERS = {True: 8, False: 2}  # of a pipeline, enough for every layout; of one stage
SCHEDULES = [("gpipe", None), ("1f1b", None), ("interleaved", 2), ("zb-h1", None), ("zb-v", None)]
LAYOUTS = [ParityLayout(1, 1, False, pp, schedule, v) for pp in (2, 4) for schedule, v in SCHEDULES]
LAYOUTS += [ParityLayout(1, 1, False, 2, "interleaved", 4)]
CONTEXTS = [ParityLayout(1, 1, cp=cp, comm_type=kind) for cp in (2, 4) for kind in ("p2p", "all_gather", "a2a")]
CONTEXTS += [ParityLayout(1, 1, cp=4, comm_type="a2a+p2p"), ParityLayout(1, 1, cp=3, comm_type="p2p")]
MIXED = [
    ParityLayout(2, 2, True, 2, "1f1b"),
    ParityLayout(2, 2, True, 2, "zb-v"),
    ParityLayout(2, 1, False, 4, "interleaved", 2),
    ParityLayout(1, 2, False, 4, "zb-h1"),
    ParityLayout(2, 2, True, cp=2, comm_type="p2p"),
    ParityLayout(1, 2, pp=2, schedule="1f1b", cp=2, comm_type="a2a"),
    ParityLayout(2, 1, True, 2, "zb-v", cp=2, comm_type="all_gather"),
    ParityLayout(1, 1, pp=2, schedule="interleaved", chunks=2, cp=4, comm_type="p2p a2a all_gather a2a+p2p " * 2),
]
OVERLAPPED = {"overlapped_distributed_optimizer": True}


def small(model, samples, steps, layers, parallel=()):
    """`samples` a step, each a microbatch."""
    run = reduced(make_run(**MODELS[model], **dict(parallel)), steps)
    return dataclasses.replace(
        run,
        model=dataclasses.replace(run.model, num_layers=layers, hidden_size=32, kv_channels=8, ffn_hidden_size=32),
        train=dataclasses.replace(run.train, global_batch_size=samples),
    )


def measured(rank, size, run, layout):
    instances = data_parallel_settings(run.parallel).optimizer_instances
    inner = inner_size(under(run, layout).parallel)
    groups = pool.groups(tp=layout.tp, cp=layout.cp, pp=layout.pp, instances=instances, inner=inner)
    return measure(under(run, layout), groups, torch.device("cpu")).as_arrays()


@functools.cache
def reference(model, samples, steps, layers):
    return assemble(pool.run(1, measured, small(model, samples, steps, layers), ParityLayout(1, 1)))


def assert_same(model, layout, samples, parallel=()):
    layers = LAYERS[layout.pp > 1]
    run = small(model, samples, STEPS, layers, parallel)
    check(under(run, layout), layout.world_size)
    found = assemble(pool.run(layout.world_size, measured, run, layout))
    difference = compare(reference(model, samples, STEPS, layers), found)
    assert difference.loss <= LIMIT, f"losses differ by {difference.loss:.1e}"
    assert difference.gradient <= LIMIT, f"{difference.parameter} differs by {difference.gradient:.1e}"


def cases(layouts, for_gpt, slow):
    """All layouts with one model; with the other those in which its tied ends and its masks meet something new."""
    found = [("llama", layout) for layout in layouts] + [("gpt", layout) for layout in layouts if for_gpt(layout)]
    return [pytest.param(*case, marks=[pytest.mark.slow] if slow(*case) else []) for case in found]


def another_schedule(model, layout):
    """What pp 4, or another model, adds to a schedule is little but for the two most involved ones."""
    if model == "gpt":
        return layout.schedule != "zb-v"
    return layout.pp == 4 and layout.schedule not in ("interleaved", "zb-v")


def tied_ends(layout):
    return layout.pp == 2 and layout.schedule in ("1f1b", "interleaved", "zb-v")


def documents(layout):
    return (layout.cp, layout.comm_type) in ((2, "p2p"), (2, "all_gather"), (2, "a2a"), (4, "a2a+p2p"))


@pytest.mark.parametrize(("model", "layout"), cases(LAYOUTS, tied_ends, another_schedule), ids=str)
def test_schedules(model, layout):
    assert_same(model, layout, 5)


@pytest.mark.parametrize(("model", "layout"), cases(CONTEXTS, documents, lambda model, layout: model == "gpt"), ids=str)
def test_contexts(model, layout):
    assert_same(model, layout, 2)


@pytest.mark.parametrize(
    "layout",
    [
        ParityLayout(1, 1, pp=2, schedule="zb-h1", cp=2, comm_type="p2p"),
        pytest.param(ParityLayout(2, 1, True, 2, "zb-v"), marks=pytest.mark.slow),
        pytest.param(ParityLayout(2, 1, cp=2, comm_type="a2a"), marks=pytest.mark.slow),
        pytest.param(ParityLayout(1, 1, cp=4, comm_type="a2a+p2p"), marks=pytest.mark.slow),
        pytest.param(ParityLayout(1, 1, cp=2, comm_type="all_gather"), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_biases_of_scores_and_the_norm_of_embeddings(layout):
    """ALiBi with documents, and tied ends of which one has the norm."""
    assert_same("alibi", layout, 4)


@pytest.mark.parametrize(("original", "is_long"), [(10**5, False), (6, True)])
def test_longrope_goes_by_the_length_of_a_sample(original, is_long):
    """Not by that of a rank's part, 22 tokens, nor by the padded one: three ranks pad 64 tokens to 66."""
    fields = {**LONGROPE, "kv_channels": 4, "rope_scaling_original_max_position_embeddings": original}
    run = reduced(make_run(**{**MODELS["llama"], **fields}), 3)
    assert run.model.rope_scaling_original_max_position_embeddings == (32 if is_long else 64)
    run = dataclasses.replace(run, train=dataclasses.replace(run.train, global_batch_size=2))
    layouts = ParityLayout(1, 1), ParityLayout(1, 1, cp=3, comm_type="p2p")
    expected, found = (assemble(pool.run(each.world_size, measured, run, each)) for each in layouts)
    difference = compare(expected, found)
    assert difference.loss <= LIMIT and difference.gradient <= LIMIT, difference


def test_dynamic_ntk_scaling_goes_by_the_length_of_a_sample():
    """With the norms of queries and keys behind the rotation, whose keys are exchanged."""
    fields = {"dynamic_ntk_factor": 8.0, "max_position_embeddings": 6}
    fields |= {"qk_layernorm": True, "qk_layernorm_after_rope": True}
    run = reduced(make_run(**{**MODELS["llama"], **fields}), 3)
    assert run.model.max_position_embeddings == 32
    run = dataclasses.replace(run, train=dataclasses.replace(run.train, global_batch_size=2))
    plain = dataclasses.replace(run, model=dataclasses.replace(run.model, dynamic_ntk_factor=1e-9))
    cp3 = ParityLayout(1, 1, cp=3, comm_type="p2p")
    expected, found = (assemble(pool.run(each.world_size, measured, run, each)) for each in (ParityLayout(1, 1), cp3))
    difference = compare(expected, found)
    assert difference.loss <= LIMIT and difference.gradient <= LIMIT, difference
    unstretched = compare(assemble(pool.run(1, measured, plain, ParityLayout(1, 1))), expected)
    assert unstretched.gradient > 100 * LIMIT, "the samples are longer than the context"


def test_queries_are_scaled_by_their_place_in_the_sample():
    fields = {
        "position_embedding_type": "yarn",
        "rope_scaling_original_max_position_embeddings": 10,
        "llama_4_scaling_beta": 1.0,
    }
    run = reduced(make_run(**{**MODELS["llama"], **fields}), 3)
    run = dataclasses.replace(run, train=dataclasses.replace(run.train, global_batch_size=2))
    plain = dataclasses.replace(run, model=dataclasses.replace(run.model, llama_4_scaling_beta=None))
    cp3 = ParityLayout(1, 1, cp=3, comm_type="p2p")
    expected, found = (assemble(pool.run(each.world_size, measured, run, each)) for each in (ParityLayout(1, 1), cp3))
    difference = compare(expected, found)
    assert difference.loss <= LIMIT and difference.gradient <= LIMIT, difference
    unscaled = compare(assemble(pool.run(1, measured, plain, ParityLayout(1, 1))), expected)
    assert unscaled.gradient > 100 * LIMIT, "the samples are longer than the original context"


def another_mixture(model, layout):
    return model == "gpt" or layout not in (MIXED[1], MIXED[6])


def all_at_once(layout):
    return layout.tp > 1 and layout.pp > 1 and layout.schedule == "zb-v"


@pytest.mark.parametrize(("model", "layout"), cases(MIXED, all_at_once, another_mixture), ids=str)
def test_with_other_axes_and_the_overlapped_optimizer(model, layout):
    assert_same(model, layout, 6, tuple(OVERLAPPED.items()))
