"""Models with experts train the same under every layout: losses, gradients, choices, biases and balance losses."""

import dataclasses
import functools

import pytest
import torch

from megatron.config.context_parallel import inner_size
from megatron.config.data import DataConfig
from megatron.config.data_parallel import data_parallel_settings
from megatron.config.rules.check import check
from megatron.tooling.layout_parity import Layout, RankMeasurement, assemble, compare, measure, reduced, under
from megatron.training.batch import make_batch
from megatron.training.setup import build
from tests import pool
from tests.parallel.test_layout_parity import MODELS as DENSE
from tests.unit.config.runs import make_run

LIMIT, SAMPLES, STEPS, MANY_STEPS = 1e-5, 8, 4, 20
LLAMA = {**DENSE["llama"], "num_experts": 8}
MODELS = {
    "mixtral": {**LLAMA, "moe_router_topk": 2, "moe_aux_loss_coeff": (0.02,)},
    "qwen2-moe": {
        **LLAMA,
        "add_qkv_bias": True,
        "moe_router_topk": 4,
        "moe_router_pre_softmax": True,
        "moe_layer_freq": "[0,1]",
        "moe_shared_expert_intermediate_size": 40,
        "moe_shared_expert_gate": True,
        "moe_router_load_balancing_type": ("seq_aux_loss", "aux_loss"),
        "moe_aux_loss_coeff": (0.02, 0.01),
        "moe_z_loss_coeff": 1e-2,
    },
    "olmoe": {
        **LLAMA,
        "group_query_attention": False,
        "num_query_groups": None,
        "qk_layernorm": True,
        "qk_layernorm_across_heads": True,
        "moe_router_topk": 4,
        "moe_router_pre_softmax": True,
        "moe_router_load_balancing_type": ("global_aux_loss",),
        "moe_aux_loss_coeff": (0.02,),
    },
    "deepseek": {
        **LLAMA,
        "moe_router_topk": 4,
        "moe_router_score_function": "sigmoid",
        "moe_router_num_groups": 4,
        "moe_router_group_topk": 2,
        "moe_router_topk_scaling_factor": 2.5,
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.01,
        "moe_shared_expert_intermediate_size": 40,
        "moe_router_load_balancing_type": ("seq_aux_loss",),
        "moe_aux_loss_coeff": (1e-3,),
    },
}
ZERO_1 = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
ZERO_2 = {**ZERO_1, "data_parallel_sharding_strategy": "optim_grads"}
ZERO_3 = {"use_distributed_optimizer": True, "data_parallel_sharding_strategy": "optim_grads_params"}
SELECTIVE = {"recompute_granularity": "selective"}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
CASES = {
    "ep 2": ("mixtral", Layout(1, 2, ep=2), {}),
    "ep 2 over tp": ("qwen2-moe", Layout(2, 1, True, ep=2, etp=1), {}),
    "etp 2": ("deepseek", Layout(1, 2, etp=2), {}),
    "etp 2 over tp": ("olmoe", Layout(2, 1, True), {}),
    "ep 2 over cp": ("deepseek", Layout(1, 1, cp=2, ep=2), {}),
    "all-gather": ("mixtral", Layout(1, 2, ep=2), {"moe_token_dispatcher_type": "allgather"}),
    "ep 4, ZeRO-1": ("deepseek", Layout(1, 4, ep=4), ZERO_1),
    "ep 2 x etp 2": ("qwen2-moe", Layout(1, 4, ep=2, etp=2), {}),
    "ep 2, ZeRO-2": ("olmoe", Layout(1, 4, ep=2), ZERO_2),
    "ep 2, ZeRO-3": ("deepseek", Layout(1, 4, ep=2), ZERO_3),
    "ep 4 over tp and dp, moe": (
        "qwen2-moe",
        Layout(2, 2, True, ep=4, etp=1),
        {**SELECTIVE, "recompute_modules": ("moe",)},
    ),
    "ep 4 over tp and cp": ("deepseek", Layout(2, 1, True, cp=2, ep=4, etp=1), {}),
    "ep 2 over cp, capacity": ("mixtral", Layout(1, 2, cp=2, ep=2), {"moe_expert_capacity_factor": 1.0}),
    "pp 2": ("deepseek", Layout(1, 2, pp=2, ep=2), FULL),
    "pp 2, zb-h1": ("qwen2-moe", Layout(1, 2, pp=2, ep=2, schedule="zb-h1"), {}),
    "pp 2, interleaved": ("mixtral", Layout(1, 2, pp=2, ep=2, schedule="interleaved", chunks=2), {}),
    "pp 2 x ep 4 x tp 2": ("deepseek", Layout(2, 2, True, pp=2, ep=4, etp=1), ZERO_1),
    "ep 8": ("mixtral", Layout(1, 8, ep=8), ZERO_3),
    "moe_act, shared experts": (
        "deepseek",
        Layout(1, 2, ep=2),
        {**SELECTIVE, "recompute_modules": ("moe_act", "shared_experts", "norm")},
    ),
    "optimizer offload": ("mixtral", Layout(1, 2, ep=2), {**ZERO_1, "optimizer_cpu_offload": True}),
    "per-token loss, micro batch 2": (
        "qwen2-moe",
        Layout(2, 1, True, etp=1, ep=2),
        {"calculate_per_token_loss": True},
    ),
    "position": (
        "mixtral",
        Layout(2, 1, True),
        {"moe_expert_capacity_factor": 0.8, "moe_token_drop_policy": "position"},
    ),
    "zb-v": ("olmoe", Layout(1, 2, pp=2, ep=2, schedule="zb-v"), {}),
    "gpipe": ("deepseek", Layout(1, 2, pp=2, etp=2, schedule="gpipe"), {}),
    "documents": ("deepseek", Layout(1, 1, cp=2, ep=2), {"reset_attention_mask": True, "reset_position_ids": True}),
    "a2a": ("mixtral", Layout(1, 1, cp=2, ep=2, comm_type="a2a"), {}),
    "gathered keys": ("mixtral", Layout(1, 1, cp=2, ep=2, comm_type="all_gather"), {}),
}
# Each axis, schedule and feature once; the others combine them differently, and train longer.
QUICK = {
    "ep 2 over tp",
    "etp 2",
    "etp 2 over tp",
    "ep 2 over cp",
    "all-gather",
    "ep 2, ZeRO-3",
    "ep 4 over tp and dp, moe",
}
QUICK |= {"ep 2 over cp, capacity", "pp 2", "pp 2, zb-h1", "documents", "moe_act, shared experts", "optimizer offload"}
NUMERIC = ("moe_expert_capacity_factor", "moe_token_drop_policy", "calculate_per_token_loss")
NUMERIC += ("reset_attention_mask", "reset_position_ids")


def measured(rank, size, run, layout):
    run = under(run, layout)
    instances = data_parallel_settings(run.parallel).optimizer_instances
    sizes = {name: getattr(layout, name) for name in ("tp", "cp", "pp", "ep", "etp")}
    groups = pool.groups(**sizes, instances=instances, inner=inner_size(run.parallel))
    return measure(run, groups, torch.device("cpu")).as_arrays()


def small(model, flags, steps, layers):
    made = make_run(**{**MODELS[model], **flags})
    run = reduced(made, steps)
    shape = {"num_layers": layers, "hidden_size": 32, "kv_channels": 8, "ffn_hidden_size": 32}
    return dataclasses.replace(
        run,
        model=dataclasses.replace(run.model, **shape),
        train=dataclasses.replace(run.train, global_batch_size=SAMPLES),
        recompute=made.recompute,
        optimizer_offload=made.optimizer_offload,
        activation_offload=made.activation_offload,
    )


@functools.cache
def reference(model, flags, steps, layers):
    return assemble(pool.run(1, measured, small(model, dict(flags), steps, layers), Layout(1, 1)))


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in QUICK else pytest.mark.slow) for case in CASES]
)
def test_the_layout_changes_nothing(case):
    model, layout, flags = CASES[case]
    steps = MANY_STEPS if case not in QUICK and layout.world_size == 2 else STEPS
    layers = 4 if layout.chunks or layout.schedule == "zb-v" else 2
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


def test_two_runs_have_the_same_bits():
    """In bf16, where an order of sums that differs would show."""
    layout, flags = Layout(1, 2, ep=2), {"bf16": True}
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
    expected = assemble(pool.run(1, skewed, run, Layout(1, 1), experts))
    layout = Layout(1, 4, ep=4)
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
    loss = trainer.step.forward_backward(mine)
    report = trainer.step.end_step(applied=True)
    pieces = [
        (name, (offset, trainer.parameters[name].info.spec.shape), gradient.numpy().copy())
        for name, offset, gradient in trainer.data_parallel.gradients()
    ]
    return RankMeasurement([loss], pieces, balance=[report.means])


@pytest.mark.parametrize("layout", [Layout(1, 2, ep=2), Layout(2, 1, True, ep=2, etp=1)], ids=str)
def test_a_microbatch_of_padding(layout):
    """With ep over dp a rank has no token of its own, and still serves its experts."""
    expected = assemble(pool.run(1, with_padding, Layout(1, 1)))
    found = compare(expected, assemble(pool.run(2, with_padding, layout)))
    assert found.loss <= LIMIT and found.gradient <= LIMIT and found.balance <= LIMIT
