"""--async-save: a checkpoint that is written while the run trains on is that of a run that waits, byte for byte."""

import contextlib
import dataclasses
import errno
import functools
import json
import logging
import os
import re
import threading
from pathlib import Path

import pytest
import torch

from megatron.base.errors import CheckpointError, TrainingError
from megatron.command_line.read import parse
from megatron.config.context_parallel import inner_size
from megatron.config.data_parallel import data_parallel_settings
from megatron.config.mesh import mesh_of
from megatron.config.rules.check import check
from megatron.core.dist_checkpointing import storage
from megatron.core.dist_checkpointing.folders import TRACKER
from megatron.core.dist_checkpointing.store import verify
from megatron.planner.memory.plan import plan_memory
from megatron.rl.reference import ReferenceWeights
from megatron.tooling.memory_check import COMMON, EXPERTS, LLAMA, PP2, TP2
from megatron.training.callbacks import Checkpoint
from megatron.training.checkpoint import begin_save, finish_save, save_checkpoint
from megatron.training.loop import Callback, fit
from megatron.training.setup import build
from megatron.training.signals import ExitSignals, StopRequest
from tests import pool
from tests.adversary.runtime import LATE
from tests.adversary.seams import adversary
from tests.same_numbers import CASES

STEPS, INTERVAL = 5, 2
SAVED = (2, 4, 5)
WAITING, GATED = "waiting", "gated"
NEVER = StopRequest(ExitSignals(enabled=False), None, 0.0, 0)
plain_write = storage.write_tensor_file


class Gate(Callback):
    """A slow disk: files of a checkpoint are written when the run has taken at least one more step."""

    def __init__(self):
        self._iteration = 0
        self._moved = threading.Condition()

    def write(self, path, sources):
        saved = int(path.parent.name.split("_")[1].split(".")[0])
        with self._moved:
            assert self._moved.wait_for(lambda: self._iteration > saved, timeout=60)
        return plain_write(path, sources)

    def move(self, iteration):
        with self._moved:
            self._iteration = iteration
            self._moved.notify_all()

    def after_step(self, trainer, report):
        self.move(report.iteration)

    def end(self, trainer, reason):
        self.move(STEPS + 1)


def trainer_of(size, name, folder, *further):
    _, line = CASES[name]
    deep = any(word in line for word in ("pipeline", "offloading"))
    samples = 4 if deep or name.startswith("dp") else 2
    flags = f"--train-iters {STEPS} --global-batch-size {samples} --save {folder} --save-interval {INTERVAL}"
    return trainer_from(size, f"{line} {flags} {'' if deep else '--num-layers 2'}", *further)


def trainer_from(size, line, *further):
    run = parse([*line.split(), *further], description="")
    check(run, size)
    mesh, instances = mesh_of(run.parallel, size), data_parallel_settings(run.parallel).optimizer_instances
    sizes = {axis: getattr(mesh, axis) for axis in ("tp", "cp", "pp", "ep", "etp")}
    groups = pool.groups(**sizes, instances=instances, inner=inner_size(run.parallel))
    return build(run, groups, torch.device("cpu"))


def session(rank, size, name, folder, mode):
    further = () if mode == WAITING else ("--async-save",)
    with adversary(LATE, rank) if mode == LATE else contextlib.nullcontext():
        trainer, gate = trainer_of(size, name, folder, *further), Gate()
        trainer.reads_late = mode == GATED  # as on a GPU: numbers of a step come when the next one is queued
        storage.write_tensor_file = gate.write if mode == GATED else plain_write
        try:
            fit(trainer, [Checkpoint(NEVER, lambda trainer: None), gate])
        finally:
            storage.write_tensor_file = plain_write


@functools.cache
def saved(name, root, mode):
    """iteration -> (bytes of its files of tensors, what its metadata.json says besides the flags of the run)."""
    folder = Path(root) / f"{name} {mode}".replace(" ", "_").replace(",", "")
    pool.run(CASES[name][0], session, name, str(folder), mode)
    assert (folder / TRACKER).read_text() == f"{STEPS}\n"
    found = {}
    for iteration in SAVED:
        path = folder / f"iter_{iteration:07d}"
        verify(path)
        metadata = json.loads((path / "metadata.json").read_text())
        del metadata["state"]["config"], metadata["crc32"]
        found[iteration] = {file.name: file.read_bytes() for file in path.glob("*.safetensors")}, metadata
    assert sorted(entry.name for entry in folder.glob("*iter_*")) == [f"iter_{i:07d}" for i in SAVED]
    return found


QUICK = ("experts", "dp optim_grads_params", "dp weights and updates offloaded", "fp8 pp zb-h1", "precision-aware")
ORDERS = ("dp optim_grads_params", "fp8 pp zb-h1", "dp weights and updates offloaded", "dp states offloaded")
# An adapter needs a checkpoint to start from, "auto" depends on times, and while fp16 overflows nothing is saved.
SLOW = [name for name in CASES if not any(word in name for word in ("lora", "auto", "overflow"))]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return str(tmp_path_factory.mktemp("saves"))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in SLOW]
)
def test_the_bytes_of_a_run_that_waits(root, name):
    """Twice in a row, while the weights change; the second save comes while the first one is written, or after it."""
    plain, background = saved(name, root, WAITING), saved(name, root, GATED)
    assert background == plain
    assert plain[2][0] != plain[4][0] != plain[5][0], "the weights did change"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in ORDERS[:2] else [pytest.mark.slow]) for name in ORDERS]
)
def test_the_latest_order_of_copies_and_writes(root, name):
    assert saved(name, root, LATE) == saved(name, root, WAITING)


def all_reduces(calls):
    return [call.shape for call in calls if call.group == "world" and call.op.startswith("all_reduce")]


def counted(rank, size, folder, stoppable):
    """(all-reduces over the world of a step without a pending save, of steps with one)."""
    trainer = trainer_of(size, "dp optim bf16", folder, "--async-save")
    background, opened = trainer.background_save, threading.Event()

    def write(path, sources):
        assert opened.wait(60)
        return plain_write(path, sources)

    storage.write_tensor_file = write
    trainer.stop_wanted = (lambda: False) if stoppable else None
    try:
        found = []
        for step in range(3):
            with trainer.groups.heartbeat.record() as calls:
                report = trainer.train_step()
            found.append(all_reduces(calls))
            if step == 0:
                assert report.save_remaining is None
                background.begin(functools.partial(begin_save, trainer))
            else:
                with trainer.groups.heartbeat.record() as calls:
                    assert report.save_remaining == 2 and not background.advance(2)
                assert calls == [], "nothing is sent before all ranks have written"
        opened.set()
        assert background.finish(functools.partial(finish_save, trainer)).is_dir()
        return found
    finally:
        storage.write_tensor_file = plain_write


@pytest.mark.parametrize("stoppable", [True, False])
def test_the_ranks_agree_by_one_number_of_an_all_reduce_that_steps_have_anyway(tmp_path, stoppable):
    """And by one of their own where nothing can stop the run."""
    (plain, *pending), _ = pool.run(2, counted, str(tmp_path), stoppable)
    flags = [(1,)] if stoppable else []
    assert plain[len(plain) - len(flags) :] == flags
    rest = plain[: len(plain) - len(flags)]
    assert pending == [[*rest, (2,) if stoppable else (1,)]] * 2


def failing(rank, size, folder, failed, further):
    """(what rank 0 logs, its error) of a run in which rank 1 cannot write the iterations `failed`."""
    trainer = trainer_of(size, "dp optim bf16", folder, "--async-save", *further)

    def write(path, sources):
        if rank == 1 and int(path.parent.name.split("_")[1].split(".")[0]) in failed:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return plain_write(path, sources)

    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("megatron").addHandler(handler)
    storage.write_tensor_file = write
    try:
        fit(trainer, [Checkpoint(NEVER, lambda trainer: None)])
    except CheckpointError as error:
        return lines, str(error), trainer.state.iteration
    finally:
        storage.write_tensor_file = plain_write
        logging.getLogger("megatron").removeHandler(handler)
    return lines, None, trainer.state.iteration


NO_SPACE = r"could not save iteration {} to .*, earlier checkpoints are untouched: rank 1: ENOSPC: No space left.*__1_0"


def test_a_failed_background_save_is_one_line_and_training_goes_on(tmp_path):
    (lines, error, iteration), _ = pool.run(2, failing, str(tmp_path), (4,), ())
    said = [line for line in lines if "could not save" in line]
    assert len(said) == 1 and re.match(NO_SPACE.format(4), said[0]) and "Training goes on" in said[0]
    assert error is None and iteration == STEPS
    assert sorted(entry.name for entry in tmp_path.glob("*iter_*")) == ["iter_0000002", "iter_0000005"]


@pytest.mark.parametrize(
    ("failed", "further", "left"),
    [((4,), ("--ckpt-failure", "stop"), 2), ((STEPS,), (), 4)],
    ids=["--ckpt-failure stop", "the last save"],
)
def test_a_failed_save_ends_the_run(tmp_path, failed, further, left):
    for _, error, _ in pool.run(2, failing, str(tmp_path), failed, further):
        assert re.match(NO_SPACE.format(failed[0]), error)
    assert (tmp_path / TRACKER).read_text() == f"{left}\n"
    assert sorted(tmp_path.glob("*iter_*"))[-1].name == f"iter_000000{left}"


def reference_in_place(rank, size, folder):
    """Saves while the weights of a reference model take the place of the trained ones; and again when they are back."""
    with adversary(LATE):
        trainer = trainer_of(size, "bf16", folder, "--async-save")
        reference, background = ReferenceWeights(trainer, is_anew=True), trainer.background_save
        trainer.train_step()
        trainer.state.iteration = 1
        background.begin(functools.partial(begin_save, trainer))
        with reference.in_place():
            background.finish(functools.partial(finish_save, trainer))
        trainer.state.iteration = 2
        save_checkpoint(trainer)


def test_other_weights_that_take_the_place_of_the_trained_ones_are_not_saved(tmp_path):
    pool.run(1, reference_in_place, str(tmp_path))
    first, second = (tmp_path / f"iter_000000{number}" / "__0_0.safetensors" for number in (1, 2))
    assert first.read_bytes() == second.read_bytes()


def staged(rank, size, line, folder):
    """(pipeline rank, bytes that were staged, bytes that were planned)"""
    trainer = trainer_from(size, f"{line} --save {folder} --save-interval 9 --async-save")
    trainer.train_step()
    trainer.background_save.begin(functools.partial(begin_save, trainer))
    trainer.background_save.finish(functools.partial(finish_save, trainer))
    stage = trainer.groups.pp.rank
    plan = plan_memory(trainer.run, trainer.settings, trainer.target)[stage]
    without = dataclasses.replace(trainer.run.checkpoint, async_save=False)
    plain = plan_memory(dataclasses.replace(trainer.run, checkpoint=without), trainer.settings, trainer.target)[stage]
    assert plain.staged == 0 and plan.host - plain.host == plan.staged and plan.peak == plain.peak
    return stage, trainer.background_save.staging.nbytes, plan.staged


PLANNED = {
    "fp32": (1, ""),
    "dp, bf16": (2, "--bf16 --data-parallel-sharding-strategy no_shard"),
    "ZeRO-1, bf16": (3, "--bf16 --use-distributed-optimizer --global-batch-size 6"),
    "instances": (4, "--bf16 --use-distributed-optimizer --num-distributed-optimizer-instances 2"),
    "ZeRO-3, no optimizer states": (2, "--bf16 --data-parallel-sharding-strategy optim_grads_params --no-save-optim"),
    "tp, pp, tied": (4, f"{TP2} {PP2} --global-batch-size 4"),
    "experts": (2, f"{EXPERTS} --expert-model-parallel-size 2 --use-distributed-optimizer --global-batch-size 4"),
    "weights in host memory": (2, "--bf16 --cpu-offloading-weights --cpu-offloading-num-layers 2"),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if "1" in name or "tp" in name else [pytest.mark.slow]) for name in PLANNED]
)
def test_the_staged_bytes_are_planned(tmp_path, name):
    world, flags = PLANNED[name]
    ranks = pool.run(world, staged, f"{COMMON} {LLAMA} {flags}", str(tmp_path))
    for stage in {stage for stage, *_ in ranks}:
        most = max(nbytes for number, nbytes, _ in ranks if number == stage)
        for planned in (planned for number, _, planned in ranks if number == stage):
            assert planned == pytest.approx(most, rel=0.03), stage


def broken(rank, size, folder):
    """A run whose gradients are not finite after the save, while its files are written."""
    trainer, failed = trainer_of(size, "bf16", folder, "--async-save"), threading.Event()

    def write(path, sources):
        assert failed.wait(60)
        return plain_write(path, sources)

    class Breaks(Callback):
        def after_step(self, trainer, report):
            if report.iteration == 3:
                failed.set()
                raise TrainingError("gradients are not finite")

    storage.write_tensor_file = write
    try:
        fit(trainer, [Checkpoint(NEVER, lambda trainer: None), Breaks()])
    except TrainingError as error:
        return str(error)
    finally:
        storage.write_tensor_file = plain_write


def test_a_save_before_an_error_of_training_is_completed(tmp_path):
    assert pool.run(1, broken, str(tmp_path)) == ["gradients are not finite"]
    assert (tmp_path / TRACKER).read_text() == "2\n"
