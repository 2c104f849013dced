"""Models with experts train the same under every layout: losses, gradients, choices, biases and balance losses."""

import dataclasses
import functools

import pytest
import torch

from megatron.config.context_parallel import inner_size
from megatron.config.data import DataConfig
from megatron.config.data_parallel import data_parallel_settings
from megatron.config.rules.check import check
from megatron.tooling.layout_parity import RankMeasurement, assemble, compare, measure, reduced
from megatron.tooling.layouts import EXPERT_GRID, ParityLayout, under
from megatron.training.batch import make_batch
from megatron.training.setup import build
from tests import pool
from tests.parallel.moe_grid import AXES, CASES, MODELS, NUMERIC, QUICK, layers_of, small
from tests.unit.config.runs import make_run

LIMIT, STEPS, MANY_STEPS = 1e-5, 3, 20


def measured(rank, size, run, layout):
    run = under(run, layout)
    instances = data_parallel_settings(run.parallel).optimizer_instances
    sizes = {name: getattr(layout, name) for name in ("tp", "cp", "pp", "ep", "etp")}
    groups = pool.groups(**sizes, instances=instances, inner=inner_size(run.parallel))
    return measure(run, groups, torch.device("cpu")).as_arrays()


@functools.cache
def reference(model, flags, steps, layers):
    return assemble(pool.run(1, measured, small(model, dict(flags), steps, layers), ParityLayout(1, 1)))


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in QUICK else pytest.mark.slow) for case in CASES]
)
def test_the_layout_changes_nothing(case):
    model, layout, flags = CASES[case]
    steps = MANY_STEPS if case not in QUICK and layout.world_size == 2 else STEPS
    layers = layers_of(layout, flags)
    run = small(model, flags, steps, layers)
    check(under(run, layout), layout.world_size)
    numeric = tuple((name, flags[name]) for name in NUMERIC if name in flags)
    expected = reference(model, numeric, steps, layers)
    found = compare(expected, assemble(pool.run(layout.world_size, measured, run, layout)))
    assert found.choice is None, f"step, layer, place {found.choice} goes to other experts"
    assert found.same_biases
    assert found.loss <= LIMIT, f"losses differ by {found.loss:.1e}"
    assert found.gradient <= LIMIT, f"{found.parameter} differs by {found.gradient:.1e}"
    assert found.norm <= LIMIT and found.balance <= LIMIT, (found.norm, found.balance)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("axis", AXES)
def test_every_model_meets_every_axis(model, axis):
    assert any(of == model and AXES[axis](layout) for of, layout, _ in CASES.values())


@pytest.mark.parametrize("model", MODELS)
def test_the_tool_can_reduce_every_model_to_every_layout(model):
    """Its layouts need two to eight layers, and a pattern of layers with experts keeps its rule."""
    for layout in EXPERT_GRID:
        run = reduced(make_run(**MODELS[model]), STEPS, layout.layers)
        check(under(run, layout), layout.world_size)
        alternates = (False, True) * (layout.layers // 2)
        assert run.model.moe_layers == (
            alternates if model in ("qwen2-moe", "deepseek-v3") else (True,) * layout.layers
        )
    assert {layout.layers for layout in EXPERT_GRID} == {2, 4, 8}


def test_two_runs_have_the_same_bits():
    """In bf16, where an order of sums that differs would show."""
    layout, flags = ParityLayout(1, 2, ep=2), {"bf16": True}
    run = small("deepseek", flags, STEPS, 2)
    run = dataclasses.replace(run, model=dataclasses.replace(run.model, bf16=True))
    first, second = (assemble(pool.run(2, measured, run, layout)) for _ in range(2))
    assert (first.losses, first.norms, first.balance) == (second.losses, second.norms, second.balance)
    assert all(gradient.equal(second.gradients[name]) for name, gradient in first.gradients.items())


def skewed(rank, size, run, layout, experts):
    """All tokens choose these experts."""
    free = measured(
        rank, size, dataclasses.replace(run, train=dataclasses.replace(run.train, train_iters=STEPS)), layout
    )
    choice = torch.tensor(experts)
    forced = {
        (step, sample, layer): choice.expand(64, len(experts)).clone()
        for (_, sample, layer) in free.choices
        for step in range(STEPS)
    }
    run = under(run, layout)
    groups = pool.groups(ep=layout.ep, instances=data_parallel_settings(run.parallel).optimizer_instances)
    return measure(run, groups, torch.device("cpu"), forced).as_arrays()


@pytest.mark.parametrize(
    "experts", [(0, 1), pytest.param((7, 0), marks=pytest.mark.slow), pytest.param((3, 2), marks=pytest.mark.slow)]
)
def test_all_tokens_on_one_rank_or_two(experts):
    """The other ranks get nothing to compute, and experts 2 to 6 never a token; gradients and replicas agree."""
    run = small("mixtral", {"use_distributed_optimizer": True}, STEPS, 2)
    expected = assemble(pool.run(1, skewed, run, ParityLayout(1, 1), experts))
    layout = ParityLayout(1, 4, ep=4)
    found = compare(expected, assemble(pool.run(4, skewed, run, layout, experts)))
    assert found.choice is None and found.loss <= LIMIT and found.gradient <= LIMIT and found.norm <= LIMIT
    unused = [expert for expert in range(8) if expert not in experts]
    for name, gradient in expected.gradients.items():
        if ".experts." in name:
            assert not gradient[unused].any() and gradient[experts[0]].any()


def with_padding(rank, size, layout):
    """Gradients of a step in which one of two microbatches is padding."""
    trainer = build(
        under(small("deepseek", {}, 1, 2), layout),
        pool.groups(tp=layout.tp, ep=layout.ep, etp=layout.etp),
        torch.device("cpu"),
    )
    whole = make_batch(torch.arange(2 * 65).view(2, 65) % 500, -1, DataConfig(seq_length=64))
    mask = torch.tensor([[True], [False]]).expand(2, 64)
    rows = [
        dataclasses.replace(
            whole,
            tokens=whole.tokens[i : i + 1],
            labels=whole.labels[i : i + 1],
            loss_mask=mask[i : i + 1],
            routed=mask[i : i + 1],
        )
        for i in range(2)
    ]
    mine = [rows[trainer.groups.dp.rank]] if trainer.groups.dp.size == 2 else rows
    loss = trainer.step.forward_backward(mine).read()
    experts = trainer.step.features.experts
    report = experts.report(experts.update_biases(applied=torch.tensor(True)).flatten().tolist())
    pieces = [
        (name, (offset, trainer.parameters[name].info.spec.shape), gradient.numpy().copy())
        for name, offset, gradient in trainer.data_parallel.gradients()
    ]
    return RankMeasurement([loss], pieces, balance=[report.means])


@pytest.mark.parametrize("layout", [ParityLayout(1, 2, ep=2), ParityLayout(2, 1, True, ep=2, etp=1)], ids=str)
def test_a_microbatch_of_padding(layout):
    """With ep over dp a rank has no token of its own, and still serves its experts."""
    expected = assemble(pool.run(1, with_padding, ParityLayout(1, 1)))
    found = compare(expected, assemble(pool.run(2, with_padding, layout)))
    assert found.loss <= LIMIT and found.gradient <= LIMIT and found.balance <= LIMIT
