"""A learning rate of their own for the word embeddings and the output layer, from the flags to the weights."""

import dataclasses
import functools

import numpy as np
import pytest
import torch

from megatron.config.data_parallel import data_parallel_settings
from megatron.config.rules.check import check
from megatron.tooling.layout_parity import reduced
from megatron.tooling.layouts import ParityLayout, under
from megatron.training.setup import build
from tests import pool
from tests.parallel.strategies import boxes_of, whole
from tests.parallel.test_layout_parity import LIMIT, MODELS
from tests.unit.config.runs import make_run

STEPS = 8
SCHEDULE = {
    "lr": 1e-3, "min_lr": 1e-4, "lr_decay_style": "cosine", "lr_warmup_iters": 2,
    "decoupled_lr": 1e-2, "decoupled_min_lr": 4e-3,
}  # fmt: skip
ENDS = {
    "llama": {"embedding.word_embeddings.weight", "output_layer.weight"},
    # Tied, but for a bias; its position embeddings are not among them.
    "gpt": {"embedding.word_embeddings.weight", "output_layer.bias"},
}


def small(model, schedule=(), parallel=()):
    run = reduced(make_run(**MODELS[model], **dict(parallel)), STEPS)
    return dataclasses.replace(
        run,
        model=dataclasses.replace(run.model, hidden_size=32, kv_channels=8, ffn_hidden_size=32),
        schedule=dataclasses.replace(run.schedule, **{**SCHEDULE, **dict(schedule)}),
        train=dataclasses.replace(run.train, global_batch_size=4),
    )


def trained(rank, size, run, layout):
    """(losses, this rank's pieces of the weights before, and after)"""
    instances = data_parallel_settings(run.parallel).optimizer_instances
    groups = pool.groups(tp=layout.tp, pp=layout.pp, instances=instances)
    trainer = build(under(run, layout), groups, torch.device("cpu"))
    before = boxes_of(trainer.data_parallel)
    losses = [trainer.train_step().loss for _ in range(STEPS)]
    trainer.data_parallel.synchronize()
    return losses, before, boxes_of(trainer.data_parallel)


def result(run, layout):
    """(losses, whole weights before, and after)"""
    check(under(run, layout), layout.world_size)
    ranks = pool.run(layout.world_size, trained, run, layout)
    assert all(losses == ranks[0][0] for losses, _, _ in ranks)
    return ranks[0][0], whole([before for _, before, _ in ranks]), whole([after for _, _, after in ranks])


@functools.cache
def alone(model, schedule=()):
    return result(small(model, schedule), ParityLayout(1, 1))


def changed(model, **schedule):
    _, before, after = alone(model, tuple(schedule.items()))
    return {name for name, tensor in after.items() if not tensor.equal(before[name])}, set(after)


@pytest.mark.parametrize("model", ENDS)
def test_which_parameters_have_it(model):
    moved, _ = changed(model, lr=0.0, min_lr=0.0)
    assert moved == ENDS[model]
    moved, every = changed(model, decoupled_lr=0.0, decoupled_min_lr=0.0)
    assert moved == every - ENDS[model]


SHARDED = {
    "zero 1": {"use_distributed_optimizer": True},
    "zero 2": {"data_parallel_sharding_strategy": "optim_grads", "use_distributed_optimizer": True},
    "zero 3": {"data_parallel_sharding_strategy": "optim_grads_params", "use_distributed_optimizer": True},
}
CASES = [
    ("llama", ParityLayout(2, 1, True), {}),
    ("gpt", ParityLayout(2, 1), {}),
    ("gpt", ParityLayout(1, 1, pp=2), {}),
    ("llama", ParityLayout(1, 2), SHARDED["zero 2"]),
    ("gpt", ParityLayout(1, 2), SHARDED["zero 1"]),
    ("gpt", ParityLayout(1, 2), SHARDED["zero 3"]),
]


@pytest.mark.parametrize(("model", "layout", "parallel"), CASES, ids=str)
def test_every_layout_trains_alike(model, layout, parallel):
    losses, before, after = alone(model)
    found, _, weights = result(small(model, parallel=tuple(parallel.items())), layout)
    assert found == pytest.approx(losses, rel=LIMIT)
    for name in ENDS[model]:
        # Adam divides by the gradient's size: an element whose gradient is rounding moves at random.
        difference = (weights[name] - after[name]).norm() / (after[name] - before[name]).norm()
        assert difference <= 1e-3, f"{name}: {difference:.1e}"


@pytest.mark.parametrize("model", ENDS)
def test_it_moves_the_losses(model):
    """Without it they are far from the ones that every layout has to give."""
    losses, ordinary = alone(model)[0], alone(model, (("decoupled_lr", None), ("decoupled_min_lr", None)))[0]
    assert np.abs(np.array(losses) - ordinary)[3:].min() > 1000 * LIMIT
