"""Activation offload changes no bit: losses and parameters of several steps, beside the same run without it."""

import dataclasses
import functools

import pytest
import torch

from megatron.config.activation_offload import ActivationOffloadConfig
from megatron.config.recompute import RecomputeConfig
from megatron.config.rules import check
from megatron.training.layout_parity import Layout, reduced, under
from megatron.training.setup import build
from tests import pool
from tests.parallel.test_layout_parity import MODELS
from tests.unit.config.runs import make_run

OVERLAPPED = {"overlapped_distributed_optimizer": True}
HALF = {"pipeline_offload_ratio": "0.5"}
ALL = {"pipeline_offload_ratio": "1"}
AUTO = {"pipeline_offload_ratio": "auto"}
LAYERS = {"cpu_offloading": True, "cpu_offloading_num_layers": 2}
MODULES = {"fine_grained_activation_offloading": True, "offload_modules": ("core_attn", "mlp_act", "qkv_linear")}
STEPS = 5


def make(model, layers, microbatches, dropout, offload, recompute=None):
    run = reduced(make_run(**MODELS[model], **OVERLAPPED), STEPS)
    return dataclasses.replace(
        run,
        model=dataclasses.replace(
            run.model,
            num_layers=layers,
            hidden_size=32,
            kv_channels=8,
            ffn_hidden_size=32,
            hidden_dropout=dropout,
            attention_dropout=dropout,
        ),
        train=dataclasses.replace(run.train, global_batch_size=microbatches),
        activation_offload=ActivationOffloadConfig(**offload),
        recompute=RecomputeConfig(**recompute or {}),
    )


def trained(rank, size, run):
    """(losses, parameters as bytes, what was offloaded: bytes out, blocks made by the first step and by the last)."""
    parallel = run.parallel
    groups = pool.groups(
        tp=parallel.tensor_model_parallel_size,
        cp=parallel.context_parallel_size,
        pp=parallel.pipeline_model_parallel_size,
        instances=1,
    )
    trainer = build(run, groups, torch.device("cpu"))
    losses, made = [], []
    for _ in range(STEPS):
        losses.append(trainer.train_step().loss)
        if trainer.step.offload is not None:
            made.append(trainer.step.offload.actions.far.made)
    trainer.data_parallel.settle()
    content = [p.detach().numpy().tobytes() for _, p in sorted(trainer.parameters.items())]
    out = 0 if trainer.step.offload is None else trainer.step.offload.actions.bytes_out
    return losses, content, out, made


@functools.cache
def without(model, layers, microbatches, dropout, layout):
    return run_under(make(model, layers, microbatches, dropout, {}), layout)


def run_under(run, layout):
    run = under(run, layout)
    check(run, layout.world_size)
    return pool.run(layout.world_size, trained, run)


# layout, layers, microbatches, dropout, offload, ranks that have something to offload
CASES = [
    (Layout(1, 1), 5, 1, 0.1, HALF, {0}),
    (Layout(1, 1), 5, 1, 0.1, LAYERS, {0}),
    (Layout(1, 1), 5, 1, 0.1, MODULES, {0}),
    (Layout(2, 1, True), 4, 4, 0.1, ALL, {0, 1}),
    (Layout(1, 1, cp=2), 4, 1, 0.0, ALL, {0, 1}),
    (Layout(1, 1, pp=2, schedule="interleaved", chunks=2), 8, 4, 0.1, HALF, {0, 1}),
    pytest.param(Layout(1, 1, pp=2, schedule="1f1b"), 8, 4, 0.0, ALL, {0, 1}, marks=pytest.mark.slow),
    (Layout(1, 1, pp=2, schedule="zb-v"), 8, 4, 0.1, ALL, {0, 1}),
    pytest.param(Layout(2, 1, pp=2, schedule="gpipe"), 8, 4, 0.1, HALF, {0, 1, 2, 3}, marks=pytest.mark.slow),
    (Layout(1, 1, pp=4, schedule="1f1b"), 12, 4, 0.1, HALF, {0, 1, 2, 3}),
    (Layout(1, 1, pp=4, schedule="zb-h1"), 12, 6, 0.0, ALL, {0, 1, 2, 3}),
    pytest.param(Layout(1, 1, pp=4, schedule="zb-h1"), 12, 6, 0.0, MODULES, {0, 1, 2, 3}, marks=pytest.mark.slow),
    pytest.param(Layout(1, 1, pp=4, schedule="1f1b"), 12, 4, 0.1, LAYERS, {0, 1, 2, 3}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("layout", "layers", "microbatches", "dropout", "offload", "moving"), CASES, ids=str)
def test_no_bit_changes(layout, layers, microbatches, dropout, offload, moving):
    model = "gpt" if layout.tp > 1 else "llama"
    expected = without(model, layers, microbatches, dropout, layout)
    found = run_under(make(model, layers, microbatches, dropout, offload), layout)
    for rank, ((losses, content, *_), (other, others, out, made)) in enumerate(zip(expected, found, strict=True)):
        assert other == losses
        assert others == content
        assert (out > 0) == (rank in moving)
        assert made[0] == made[-1], "far memory grows after the first step"


@pytest.mark.parametrize(
    "recompute",
    [
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        {"recompute_granularity": "selective", "recompute_modules": ("core_attn", "norm", "mlp_act")},
    ],
    ids=["full", "selective"],
)
@pytest.mark.parametrize("offload", [ALL, LAYERS], ids=["ratio", "layers"])
def test_beside_recompute(offload, recompute):
    """What a checkpoint keeps, its input, moves; what the second run saves does not."""
    layout = Layout(1, 1, pp=2, schedule="interleaved", chunks=2)
    expected = without("llama", 12, 4, 0.1, layout)
    found = run_under(make("llama", 12, 4, 0.1, offload, recompute), layout)
    everything = run_under(make("llama", 12, 4, 0.1, offload), layout)
    for (losses, content, *_), (other, others, out, _), (_, _, more, _) in zip(
        expected, found, everything, strict=True
    ):
        assert (other, others) == (losses, content)
        assert 0 < out < more


def test_auto_decides_after_the_second_step():
    layout = Layout(1, 1, pp=2, schedule="interleaved", chunks=2)
    expected = without("llama", 8, 4, 0.1, layout)
    found = run_under(make("llama", 8, 4, 0.1, AUTO), layout)
    for (losses, content, *_), (other, others, out, made) in zip(expected, found, strict=True):
        assert (other, others) == (losses, content)
        assert made[1] == 1, "only the probe before"  # which is given back
        assert out >= 0
