"""A run saved by pipeline ranks continues under any other layout; with the same one bit for bit.

Embedding and head are tied, so in most layouts two ranks hold a copy of one weight and the file holds it once.
"""

import functools
from pathlib import Path

import pytest

from megatron.config.data_parallel import data_parallel_settings
from megatron.config.rules.check import check
from megatron.training.checkpoint import save_checkpoint
from megatron.training.setup import build
from tests import pool
from tests.e2e.helpers.runs import checkpoint
from tests.unit.config.runs import SHORT_RUN, make_run
from tests.unit.models.builds import CPU

FIELDS = {
    **SHORT_RUN,
    "num_layers": 8,
    "micro_batch_size": 3,
    "ddp_bucket_size": 5000,
}
BEFORE, AFTER = 2, 3
CLOSE = 1e-6  # relative; of losses
OVERLAPPED = {"overlapped_distributed_optimizer": True}


def pipeline(pp, schedule, v=None, **fields):
    """Fields of a layout."""
    chosen = {"pipeline_model_parallel_size": pp, "pipeline_schedule": schedule}
    return {**chosen, "num_virtual_stages_per_pipeline_rank": v, **fields}


# World size and fields. With dp 1 and tp 1 every rank sees what one process would see, in the same order.
LAYOUTS = {
    "one process": (1, {}),
    "pp 2, 1f1b": (2, pipeline(2, "1f1b")),
    "pp 2, zb-v": (2, pipeline(2, "zb-v")),
    "pp 4, interleaved": (4, pipeline(4, "interleaved", 2)),
    "pp 4, zb-v": (4, pipeline(4, "zb-v")),
    "pp 4, written out": (4, pipeline(4, "1f1b", pipeline_model_parallel_layout="Et|ttt|tttt|L")),
    "tp 2 x pp 2, zb-h1": (4, pipeline(2, "zb-h1", tensor_model_parallel_size=2, sequence_parallel=True)),
    "dp 2 x pp 2, overlapped": (4, pipeline(2, "1f1b", **OVERLAPPED)),
    "dp 4, overlapped": (4, OVERLAPPED),
}
SAME_BITS = ("one process", "pp 2, 1f1b", "pp 2, zb-v", "pp 4, interleaved", "pp 4, zb-v", "pp 4, written out")
SAVED = ("pp 2, 1f1b", "pp 4, zb-v", "dp 2 x pp 2, overlapped", "dp 4, overlapped")


def built(size, fields):
    run = make_run(**{**FIELDS, **fields})
    check(run, size)
    parallel = run.parallel
    groups = pool.groups(
        tp=parallel.tensor_model_parallel_size,
        pp=parallel.pipeline_model_parallel_size,
        instances=data_parallel_settings(parallel).optimizer_instances,
    )
    return build(run, groups, CPU)


def session(rank, size, fields, before):
    """(an evaluation, losses of the next steps) after `before` steps and, if a folder is given, a checkpoint."""
    trainer = built(size, fields)
    for _ in range(before):
        trainer.train_step()
    if "save" in fields:
        save_checkpoint(trainer)
    evaluation = trainer.evaluate(trainer.readers.valid)
    return evaluation, [trainer.train_step().loss for _ in range(AFTER)]


def move(rank, size, fields):
    save_checkpoint(built(size, fields))


def run(layout, before=0, **fields):
    world, of_layout = LAYOUTS[layout]
    found = pool.run(world, session, {**of_layout, **fields}, before)
    assert found == [found[0]] * world, "ranks report different losses"
    return found[0]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Layout -> (folder of its checkpoint, the evaluation and the losses that followed it)."""

    @functools.cache
    def get(layout):
        folder = str(tmp_path_factory.mktemp("saved"))
        return folder, run(layout, before=BEFORE, save=folder)

    return get


@pytest.mark.parametrize("layout", SAVED)
def test_the_same_run_goes_on_bit_for_bit(saved, layout):
    folder, expected = saved(layout)
    assert run(layout, load=folder) == expected


# All from the first; from the others what is furthest from them.
MOVES = [(SAVED[0], target) for target in LAYOUTS]
MOVES += [("pp 4, zb-v", "one process"), ("pp 4, zb-v", "dp 2 x pp 2, overlapped")]
MOVES += [("dp 2 x pp 2, overlapped", "pp 4, interleaved"), ("dp 2 x pp 2, overlapped", "dp 4, overlapped")]
MOVES += [("dp 4, overlapped", target) for target in ("pp 2, zb-v", "pp 4, written out", "tp 2 x pp 2, zb-h1")]


@pytest.mark.parametrize(("source", "target"), MOVES)
def test_goes_on_under_another_layout(saved, source, target):
    folder, (evaluation, losses) = saved(source)
    found, after = run(target, load=folder)
    assert after == pytest.approx(losses, rel=CLOSE)
    assert found == pytest.approx(evaluation, rel=CLOSE)
    if source in SAME_BITS and target in SAME_BITS:
        assert (found, after[0]) == (evaluation, losses[0]), "the same sums in the same order"


# The slow ones save as a layout of SAVED does.
ALSO = [pytest.param(layout, marks=pytest.mark.slow) for layout in ("pp 2, zb-v", "dp 4, overlapped")]


@pytest.mark.parametrize("layout", ["pp 4, interleaved", "tp 2 x pp 2, zb-h1", *ALSO])
def test_and_back(saved, tmp_path, layout):
    """Loaded under another layout and saved there at once: the same elements, each in the file once."""
    folder, expected = saved("pp 2, 1f1b")
    world, fields = LAYOUTS[layout]
    pool.run(world, move, {**fields, "load": folder, "save": str(tmp_path)})
    assert run("pp 2, 1f1b", load=str(tmp_path)) == expected, "bit for bit"
    (tensors, _), (others, _) = (checkpoint(Path(path) / f"iter_{BEFORE:07d}") for path in (folder, tmp_path))
    names = {name for name in tensors if not name.startswith("rng/")}
    assert names == {name for name in others if not name.startswith("rng/")}
    assert sum("word_embeddings" in name for name in names) == 3 and "model/output_layer.weight" not in names
    assert [name for name in names if not tensors[name].equal(others[name])] == []
