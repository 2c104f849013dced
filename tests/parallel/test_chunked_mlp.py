"""MLPs of some tokens at a time train as whole ones on one process do, under every layout and with every recompute."""

import dataclasses

import pytest

from megatron.config.activation_offload import ActivationOffloadConfig
from megatron.config.recompute import RecomputeConfig
from megatron.config.rules.check import check
from megatron.tooling.layout_parity import assemble, compare
from megatron.tooling.layouts import ParityLayout, under
from tests import pool
from tests.parallel.test_layout_parity import LIMIT
from tests.parallel.test_layout_parity_pp_cp import LAYERS, measured, reference, small

SAMPLES, STEPS = 4, 3
MLP = {"recompute_granularity": "selective", "recompute_modules": ("mlp",)}
GEMM_LAST = {"recompute_granularity": "selective", "recompute_modules": ("mlp", "norm")}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
ZERO3 = {"data_parallel_sharding_strategy": "optim_grads_params"}
OVERLAPPED = {"overlapped_distributed_optimizer": True}
CASES = [
    ("llama", ParityLayout(1, 1), MLP, {}),
    ("gpt", ParityLayout(1, 1), GEMM_LAST, {}),
    ("llama", ParityLayout(1, 1), FULL, {}),
    ("olmo2", ParityLayout(2, 1, True), FULL, {}),
    ("llama", ParityLayout(2, 1), GEMM_LAST, {}),
    ("gpt", ParityLayout(2, 1, True), GEMM_LAST, {}),
    ("llama", ParityLayout(4, 1, True), MLP, {"tp_comm_overlap": True}),
    ("gpt", ParityLayout(1, 2), MLP, ZERO3),
    ("llama", ParityLayout(2, 2, True), FULL, ZERO3),
    ("llama", ParityLayout(1, 2), MLP, OVERLAPPED),
    ("llama", ParityLayout(1, 1, cp=2, comm_type="all_gather"), MLP, {}),
    ("gpt", ParityLayout(2, 1, True, cp=2, comm_type="a2a"), FULL, {}),
    ("gpt", ParityLayout(1, 2, False, 2, "interleaved", 2), FULL, OVERLAPPED),
    ("llama", ParityLayout(1, 1, False, 2, "zb-h1"), MLP, {}),
    ("gpt", ParityLayout(2, 2, True, 2, "zb-v"), GEMM_LAST, OVERLAPPED),
    ("xielu", ParityLayout(2, 1), GEMM_LAST, {}),
    ("xielu", ParityLayout(1, 2), MLP, ZERO3),
    ("xielu", ParityLayout(1, 1, False, 2, "zb-h1"), MLP, OVERLAPPED),
]
OFFLOADS = [
    {"pipeline_offload_ratio": "0.5"},
    {"cpu_offloading": True, "cpu_offloading_num_layers": 1},
]


def trained(model, layout, recompute, parallel, offload=None):
    """The difference from one process without recompute. Chunks of 7 tokens."""
    layers = LAYERS[layout.pp > 1]
    run = dataclasses.replace(
        small(model, SAMPLES, STEPS, layers, parallel),
        recompute=RecomputeConfig(**recompute, mlp_chunk_size=7),
        activation_offload=ActivationOffloadConfig(**offload or {}),
    )
    check(under(run, layout), layout.world_size)
    return compare(
        reference(model, SAMPLES, STEPS, layers), assemble(pool.run(layout.world_size, measured, run, layout))
    )


@pytest.mark.parametrize(("model", "layout", "recompute", "parallel"), CASES, ids=str)
def test_training_is_that_of_whole_layers(model, layout, recompute, parallel):
    difference = trained(model, layout, recompute, parallel)
    assert difference.loss <= LIMIT, f"losses differ by {difference.loss:.1e}"
    assert difference.gradient <= LIMIT, f"{difference.parameter} differs by {difference.gradient:.1e}"


@pytest.mark.parametrize("recompute", [MLP, FULL], ids=["mlp", "full"])
@pytest.mark.parametrize("offload", OFFLOADS, ids=lambda offload: next(iter(offload)))
def test_with_activation_offload(offload, recompute):
    difference = trained("llama", ParityLayout(1, 1), recompute, {}, offload)
    assert difference.loss <= LIMIT and difference.gradient <= LIMIT
