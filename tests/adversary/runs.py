"""Short runs of the command lines of tests/same_numbers.py, as they are and under the adversarial runtime."""

from __future__ import annotations

import contextlib
import hashlib
from typing import Any

import torch

from megatron.command_line.read import parse
from megatron.config.context_parallel import inner_size
from megatron.config.data_parallel import data_parallel_settings
from megatron.config.mesh import mesh_of
from megatron.config.rules.check import check
from megatron.config.run import RunConfig
from megatron.training.setup import build
from tests import pool
from tests.adversary.seams import adversary
from tests.parallel.strategies import boxes_of
from tests.same_numbers import CASES

STEPS = 3
_SHORTER = f"--train-iters {STEPS} --global-batch-size"
_SHALLOWER = "--num-layers 2"
_DEEP = ("pipeline", "offloading")  # flags that need more layers, and more microbatches than a first and a last


def configured(name: str) -> tuple[int, RunConfig]:
    """(processes, run) of one of the command lines."""
    world, line = CASES[name]
    deep = any(word in line for word in _DEEP)
    samples = 4 if deep or name.startswith("dp") else 2
    run = parse(f"{line} {_SHORTER} {samples} {'' if deep else _SHALLOWER}".split(), description="")
    check(run, world)
    return world, run


def trained(rank: int, size: int, run: RunConfig, mode: str | None, seed: int = 0) -> tuple[list[Any], str]:
    """(losses and gradient norms, digest of this rank's weights and optimizer state) after a few steps.

    mode: of the adversarial runtime; None: without it.
    """
    with adversary(mode, seed + rank) if mode else contextlib.nullcontext():
        mesh, instances = mesh_of(run.parallel, size), data_parallel_settings(run.parallel).optimizer_instances
        sizes = {axis: getattr(mesh, axis) for axis in ("tp", "cp", "pp", "ep", "etp")}
        groups = pool.groups(**sizes, instances=instances, inner=inner_size(run.parallel))
        trainer = build(run, groups, torch.device("cpu"))
        numbers = [(report.loss, report.grad_norm) for report in (trainer.train_step() for _ in range(STEPS))]
        trainer.data_parallel.synchronize()
        digest = hashlib.sha256()
        for _, _, _, values in boxes_of(trainer.data_parallel):
            digest.update(values.tobytes())
        for _, _, values in trainer.optimizer.pieces():
            digest.update(values.numpy().tobytes())
        return numbers, digest.hexdigest()
