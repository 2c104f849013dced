"""A run saved under one way of sharing continues under any other: replicas, bucket sizes, shards, tensor
parallelism."""

import time
from pathlib import Path

import pytest
import torch

from megatron.config.data_parallel import data_parallel_settings
from megatron.config.rules.check import check
from megatron.training.checkpoint import save_checkpoint
from megatron.training.setup import build
from tests import pool
from tests.e2e.helpers.runs import checkpoint
from tests.parallel.strategies import boxes_of, whole
from tests.unit.config.runs import SHORT_RUN, make_run
from tests.unit.models.builds import CPU

FIELDS = {**SHORT_RUN, "num_layers": 1}
BEFORE, AFTER = 3, 5
CLOSE = 1e-6  # relative; of losses
A, B = {"ddp_bucket_size": 2000}, {"ddp_bucket_size": 5500}
OPTIM = {"use_distributed_optimizer": True}
OVERLAPPED = {**OPTIM, "overlap_grad_reduce": True, "overlap_param_gather": True}
GRADS = {"data_parallel_sharding_strategy": "optim_grads", "overlap_param_gather": True}
PARAMS = {"data_parallel_sharding_strategy": "optim_grads_params"}
TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}


def built(size, fields):
    """A trainer under `fields`, with a share of the global batch a replica as its microbatch."""
    tp = fields.get("tensor_model_parallel_size", 1)
    run = make_run(**{**FIELDS, "micro_batch_size": FIELDS["global_batch_size"] * tp // size, **fields})
    check(run, size)
    instances = data_parallel_settings(run.parallel).optimizer_instances
    return build(run, pool.groups(tp=tp, instances=instances), CPU)


def session(rank, size, fields, steps, then_save=False):
    """Losses of some steps; a checkpoint after the first BEFORE of them, if it is asked for."""
    trainer = built(size, fields)
    losses = []
    for number in range(1, steps + 1):
        losses.append(trainer.train_step().loss)
        if then_save and number == BEFORE:
            save_checkpoint(trainer)
    return losses


def run(world, fields, steps, then_save=False):
    found = pool.run(world, session, fields, steps, then_save)
    assert found == [found[0]] * world, "ranks report different losses"
    return found[0]


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    """(folder of a checkpoint, the losses that followed it) of a run at dp 4, overlapped, with small buckets."""
    folder = str(tmp_path_factory.mktemp("sharded"))
    losses = run(4, {**OVERLAPPED, **A, "save": folder}, BEFORE + AFTER, then_save=True)
    return folder, losses[BEFORE:]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The same of a run whose ranks share nothing."""
    folder = str(tmp_path_factory.mktemp("plain"))
    losses = run(2, {**B, "save": folder}, BEFORE + AFTER, then_save=True)
    return folder, losses[BEFORE:]


def test_the_same_run_goes_on_bit_for_bit(sharded):
    folder, expected = sharded
    assert run(4, {**OVERLAPPED, **A, "load": folder}, AFTER) == expected


LAYOUTS = {
    "dp 3, another bucket size": (3, {**OVERLAPPED, **B}),
    "dp 3, after the step": (3, {**OPTIM, **B}),
    "dp 2 x tp 2": (4, {**OVERLAPPED, **B, **TP2}),
    "dp 4, two instances": (4, {**OVERLAPPED, **B, "num_distributed_optimizer_instances": 2}),
    "dp 3, sharded gradients": (3, {**GRADS, **A}),
    "dp 3, sharded parameters": (3, {**PARAMS, **B}),
    "dp 2, nothing shared": (2, B),
    "dp 1": (1, A),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_from_sharded(sharded, layout):
    folder, expected = sharded
    world, fields = LAYOUTS[layout]
    assert run(world, {**fields, "load": folder}, AFTER) == pytest.approx(expected, rel=CLOSE)


@pytest.mark.parametrize("layout", ["dp 3, another bucket size", "dp 2 x tp 2", "dp 3, sharded parameters"])
def test_from_plain(plain, layout):
    folder, expected = plain
    world, fields = LAYOUTS[layout]
    assert run(world, {**fields, "load": folder}, AFTER) == pytest.approx(expected, rel=CLOSE)


@pytest.mark.parametrize("layout", ["dp 2 x tp 2", "dp 3, sharded parameters"])
def test_and_back(sharded, tmp_path, layout):
    """Loaded under another layout, saved there at once, and loaded by the plain optimizer."""
    folder, expected = sharded
    world, fields = LAYOUTS[layout]
    moved = str(tmp_path)
    pool.run(world, move, {**fields, "load": folder, "save": moved})
    assert run(2, {**A, "load": moved}, AFTER) == pytest.approx(expected, rel=CLOSE)
    (tensors, _), (others, _) = (checkpoint(Path(path) / f"iter_{BEFORE:07d}") for path in (folder, moved))
    names = {name for name in tensors if not name.startswith("rng/")}
    assert names == {name for name in others if not name.startswith("rng/")}
    assert [name for name in names if not tensors[name].equal(others[name])] == [], "moving changes no bit"


def move(rank, size, fields):
    save_checkpoint(built(size, fields))


def saved_at_once(rank, size, fields):
    """Weights by slices right after a step whose gathers are late on rank 1 and saved at once; the evaluation then."""
    trainer = built(size, fields)
    publish = trainer.data_parallel.mark_updated

    def late(bucket, finish=None):
        if rank == 1:
            time.sleep(0.01)
        publish(bucket, finish)

    trainer.data_parallel.mark_updated = late
    trainer.train_step()
    trainer.train_step()
    save_checkpoint(trainer)
    weights = boxes_of(trainer.data_parallel)
    return weights, trainer.evaluate(trainer.readers.valid)


def loaded(rank, size, fields):
    """(weights, evaluation) of the checkpoint."""
    trainer = built(size, fields)
    return boxes_of(trainer.data_parallel), trainer.evaluate(trainer.readers.valid)


@pytest.mark.parametrize("strategy", [OVERLAPPED, GRADS, PARAMS], ids=["optim", "grads", "params"])
def test_a_checkpoint_right_after_a_step_holds_current_parameters(tmp_path, strategy):
    ranks = pool.run(3, saved_at_once, {**strategy, **A, "save": str(tmp_path)})
    expected = whole([weights for weights, _ in ranks])
    tensors, _ = checkpoint(tmp_path / "iter_0000002")
    for name, weight in expected.items():
        assert tensors[f"model/{name}"].equal(weight), name
    again = pool.run(3, loaded, {**strategy, **A, "load": str(tmp_path)})
    assert {loss for _, loss in ranks} == {loss for _, loss in again}, "evaluations agree bit for bit"
    assert len({loss for _, loss in again}) == 1


def masters(rank, size, fields, steps):
    """(whether each master is just its weight, losses of the next steps)"""
    trainer = built(size, fields)
    weights = {(piece.name, piece.start): part for piece, part in trainer.data_parallel.weights()}
    found = []
    for piece, key, tensor in trainer.optimizer.pieces():
        if key == "master":
            weight = weights[piece.name, piece.start]
            assert weight.dtype == torch.bfloat16 and tensor.bfloat16().equal(weight), "the weight is its rounding"
            found.append(bool(tensor.equal(weight.float())))
    losses = [trainer.train_step().loss for _ in range(steps)]
    return found, losses


@pytest.mark.parametrize("strategy", [OVERLAPPED, GRADS, PARAMS], ids=["optim", "grads", "params"])
def test_masters(tmp_path, strategy):
    """Of a bf16 run: loaded as they were, or rebuilt from the weights with --no-load-optim, under another dp."""
    half = {"bf16": True, **B}
    losses = run(4, {**OVERLAPPED, **half, "save": str(tmp_path)}, BEFORE + 1, then_save=True)
    fields = {**strategy, **half, "load": str(tmp_path)}
    exact = pool.run(3, masters, fields, 2)
    assert not any(flag for rank, _ in exact for flag in rank), "masters hold more than the weights do"
    rebuilt = pool.run(3, masters, {**fields, "load_optim": False}, 2)
    assert all(flag for rank, _ in rebuilt for flag in rank) and all(rank for rank, _ in rebuilt)
    for _, after in (*exact, *rebuilt):
        assert after[0] == pytest.approx(losses[BEFORE], rel=2.0**-8), "the same weights, in bf16"
    assert rebuilt[0][1][1] != exact[0][1][1], "moments start anew"
