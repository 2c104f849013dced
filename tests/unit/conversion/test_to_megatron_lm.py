"""Where a run of ours is, in Megatron-LM's terms: it counts samples where we count iterations, and compares every
flag."""

from pathlib import Path

import pytest
import torch

from megatron.base.box import Box
from megatron.base.errors import ConfigError
from megatron.config.model import ModelConfig
from megatron.config.optimizer import OptimizerConfig, ScheduleConfig
from megatron.config.run import RunConfig
from megatron.config.train import TrainConfig
from megatron.conversion.to_megatron_lm import training_state_of
from megatron.core.dist_checkpointing.whole import WholeTensor, write_whole
from megatron.core.optimizer.lr_schedule import ParamSchedule
from megatron.training.export import CheckpointSource
from tools.checkpoint import convert

WEIGHT, MASTER, MOMENT = torch.full((2, 3), 1.0), torch.full((2, 3), 1.001), torch.full((2, 3), 0.5)
MODEL = {"num_layers": 1, "hidden_size": 4, "num_attention_heads": 1, "max_position_embeddings": 8, "vocab_size": 8}
ADAM = OptimizerConfig()
COSINE = ScheduleConfig(lr=1e-3, min_lr=1e-4, lr_decay_style="cosine", lr_warmup_iters=2)
ITERATIONS = TrainConfig(micro_batch_size=2, global_batch_size=8, train_iters=20)
KEPT = {"steps": 9, "loss_scale": {"value": 4.0, "good_steps": 3, "hysteresis": 2}}


def saved(
    folder: Path,
    *,
    optimizer=ADAM,
    schedule=COSINE,
    train=ITERATIONS,
    with_optimizer=True,
    settings=(),
    **model,
):
    """A checkpoint of iteration 10 with one weight."""
    run = RunConfig(model=ModelConfig(**MODEL, **model), optimizer=optimizer, schedule=schedule, train=train)
    in_samples = train.train_samples is not None
    made = ParamSchedule(
        schedule, optimizer, train.train_samples or train.train_iters, "samples" if in_samples else "iterations"
    )
    state = {
        "format": 1,
        "config": run.to_dict(),
        "layout": {"dp": 3},
        "train": {
            "iteration": 10,
            "consumed_samples": 80,
            "consumed_valid_samples": 5,
            "schedule_position": 80 if in_samples else 9,
            "floating_point_operations": 1e6,
        },
        "schedule": {**made.state(), **dict(settings)},
        "optimizer": {"steps": 9, "loss_scale": {"value": 4.0, "good_steps": 3, "hysteresis": 2}}
        if with_optimizer
        else None,
    }
    tensors = {"model/w": WEIGHT, "optimizer/w/exp_avg": MOMENT}
    if run.model.dtype_name != "float32":
        tensors = {**tensors, "model/w": WEIGHT.to(getattr(torch, run.model.dtype_name)), "optimizer/w/master": MASTER}
    whole = [WholeTensor(n, t.dtype, tuple(t.shape), lambda box, t=t: t) for n, t in tensors.items()]
    return CheckpointSource(write_whole(folder, 10, whole, state))


def test_the_schedule_counts_samples(tmp_path):
    found = training_state_of(saved(tmp_path), torch.float32)
    assert (found.iteration, found.floating_point_operations, found.adam.updates) == (10, 1e6, 9)
    assert found.scheduler == {
        "max_lr": 1e-3,
        "min_lr": 1e-4,
        "lr_warmup_steps": 16,
        "lr_decay_steps": 160,
        "lr_decay_style": "cosine",
        "num_steps": 72,
        "start_wd": 0.01,
        "end_wd": 0.01,
        "wd_incr_style": "constant",
        "wd_incr_steps": 160,
    }
    assert found.arguments["consumed_train_samples"] == 80 and found.arguments["consumed_valid_samples"] == 5
    assert found.adam.loss_scale is None


def test_a_run_in_samples_and_lengths_that_a_constant_rate_does_not_need(tmp_path):
    schedule = ScheduleConfig(lr=1e-3, min_lr=1e-5, lr_decay_style="constant", lr_decay_samples=500)
    train = TrainConfig(micro_batch_size=2, global_batch_size=8, train_samples=640)
    found = training_state_of(saved(tmp_path, schedule=schedule, train=train), torch.float32).scheduler
    assert (found["min_lr"], found["lr_decay_steps"], found["num_steps"], found["wd_incr_steps"]) == (
        1e-5,
        500,
        80,
        640,
    )


def test_the_batch_follows_from_the_layout(tmp_path):
    train = TrainConfig(micro_batch_size=2, train_iters=20)
    found = training_state_of(saved(tmp_path, train=train), torch.float32)
    assert found.arguments["global_batch_size"] == 6 and found.scheduler["lr_decay_steps"] == 120


@pytest.mark.parametrize(("precision", "master"), [({}, WEIGHT), ({"bf16": True}, MASTER), ({"fp16": True}, MASTER)])
def test_the_masters_and_the_loss_scale(tmp_path, precision, master):
    source = saved(tmp_path, **precision)
    adam = training_state_of(source, source.dtype).adam
    box = Box((0, 1), (2, 2))
    assert torch.equal(adam.read("w", "master", box), master[:, 1:])
    assert torch.equal(adam.read("w", "exp_avg", box), MOMENT[:, 1:])
    scale = {"scale": torch.tensor([4.0]), "growth_tracker": 3, "hysteresis_tracker": 2}
    assert adam.loss_scale == (scale if precision == {"fp16": True} else None)


def test_weights_alone_without_an_optimizer(tmp_path):
    found = training_state_of(saved(tmp_path, with_optimizer=False), torch.bfloat16)
    assert found.adam is None and found.folder == "release"


@pytest.mark.parametrize(
    ("options", "dtype", "problem"),
    [
        ({}, torch.bfloat16, "optimizer of a model in float32, bfloat16 is asked for; give --no-load-optim"),
        ({"settings": {"decoupled_max_lr": 0.01}}, torch.float32, "--decoupled-lr 0.01, .* give --no-load-optim"),
        ({"optimizer": OptimizerConfig(optimizer="sgd")}, torch.float32, "optimizer sgd, .* give --no-load-optim"),
    ],
)
def test_what_megatron_lm_could_not_go_on_with(tmp_path, options, dtype, problem):
    with pytest.raises(ConfigError, match=problem):
        training_state_of(saved(tmp_path, **options), dtype)


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ("--loader hf --saver mcore --no-load-optim", "--no-load-optim has no effect with --loader hf"),
        ("--saver hf --format torch_dist", "--format torch_dist has no effect with --saver hf; remove it"),
        ("--saver hf --no-load-optim", "--no-load-optim has no effect with --saver hf; remove it"),
        (
            "--saver mcore --format torch_dist --target-pipeline-parallel-size 2",
            "--target-pipeline-parallel-size 2 has no effect with --format torch_dist",
        ),
    ],
)
def test_flags_without_effect(tmp_path, capsys, flags, problem):
    line = f"--loader megatron --load-dir {tmp_path} --save-dir {tmp_path}/new {flags}"
    assert convert.main(line.split()) == 2
    assert problem in capsys.readouterr().err
