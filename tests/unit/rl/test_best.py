"""The best evaluation of a run, and the checkpoint that has it."""

import pytest

from megatron.core.dist_checkpointing.best import BEST, BestCheckpoint, read_best, write_best
from megatron.core.dist_checkpointing.folders import TRACKER, folder_name
from megatron.core.dist_checkpointing.manifest import MANIFEST
from megatron.rl.best import BestEvaluation


@pytest.fixture
def save(tmp_path):
    def saved(iteration):
        (tmp_path / folder_name(iteration)).mkdir()
        (tmp_path / folder_name(iteration) / MANIFEST).write_text("{}")
        (tmp_path / TRACKER).write_text(f"{iteration}\n")

    return saved


def test_a_checkpoint_is_named_when_it_is_saved_and_better(tmp_path, save):
    best = BestEvaluation(tmp_path, "reward", 0)
    named = []
    for iteration, value, is_saved in (
        (0, 0.9, False),
        (10, 0.2, True),
        (20, 0.8, False),
        (30, 0.5, True),
        (40, 0.5, 1),
    ):
        best.add(iteration, value)
        if is_saved:
            save(iteration)
        best.settle()
        named.append(read_best(tmp_path))
    first, second = BestCheckpoint(10, "reward", 0.2), BestCheckpoint(30, "reward", 0.5)
    assert named == [None, first, first, second, second]


def test_an_evaluation_waits_for_a_save_that_is_under_way(tmp_path, save):
    best = BestEvaluation(tmp_path, "reward", 0)
    save(10)
    best.add(20, 0.4)
    best.settle()
    assert read_best(tmp_path) is None
    save(20)
    best.settle()
    assert read_best(tmp_path) == BestCheckpoint(20, "reward", 0.4)


def test_a_run_that_continues_compares_with_the_one_before(tmp_path, save):
    write_best(tmp_path, BestCheckpoint(10, "reward", 0.5))
    best = BestEvaluation(tmp_path, "reward", 10)
    best.add(20, 0.4)
    save(20)
    best.settle()
    assert read_best(tmp_path).iteration == 10


def test_a_branch_that_was_left_has_no_best(tmp_path, save, caplog):
    write_best(tmp_path, BestCheckpoint(30, "reward", 0.5))
    BestEvaluation(tmp_path, "reward", 20)
    assert not (tmp_path / BEST).exists() and "iteration 30, which this run does not have" in caplog.text


def test_a_full_disk_does_not_stop_training(tmp_path, save, caplog, monkeypatch):
    def fails(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("megatron.core.dist_checkpointing.best.replace_file", fails)
    best = BestEvaluation(tmp_path, "reward", 0)
    best.add(10, 0.5)
    save(10)
    best.settle()
    assert "No space left on device" in caplog.text
