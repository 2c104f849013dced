"""Models with experts train the same under every layout: losses, gradients, choices, biases and balance losses."""

import dataclasses
import functools

import pytest
import torch

from megatron.config.context_parallel import inner_size
from megatron.config.data_parallel import data_parallel_settings
from megatron.config.rules.check import check
from megatron.tooling.layout_parity import Layout, assemble, compare, measure, reduced, under
from tests import pool
from tests.unit.config.runs import make_run

LIMIT, SAMPLES = 1e-5, 8
LLAMA = {
    "num_attention_heads": 8,
    "group_query_attention": True,
    "num_query_groups": 4,
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
    "num_experts": 8,
}
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
}


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
    )


@functools.cache
def reference(model, flags, steps, layers):
    return assemble(pool.run(1, measured, small(model, dict(flags), steps, layers), Layout(1, 1)))


@pytest.mark.parametrize(("model", "layout", "flags"), CASES.values(), ids=CASES)
def test_the_layout_changes_nothing(model, layout, flags):
    steps, layers = 20 if layout.world_size <= 2 else 3, 4 if layout.chunks else 2
    run = small(model, flags, steps, layers)
    check(under(run, layout), layout.world_size)
    numeric = tuple((name, flags[name]) for name in ("moe_expert_capacity_factor",) if name in flags)
    found = compare(
        reference(model, numeric, steps, layers), assemble(pool.run(layout.world_size, measured, run, layout))
    )
    assert found.choice is None, f"step, layer, place {found.choice} goes to other experts"
    assert found.same_biases
    assert found.loss <= LIMIT, f"losses differ by {found.loss:.1e}"
    assert found.gradient <= LIMIT, f"{found.parameter} differs by {found.gradient:.1e}"
    assert found.norm <= LIMIT and found.balance <= LIMIT, (found.norm, found.balance)
