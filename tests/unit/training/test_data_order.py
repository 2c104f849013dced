"""The sizes that Megatron-LM asks its datasets for, and what is said when a continued run reads in another order."""

import dataclasses
import logging
from pathlib import Path

import pytest

from megatron.config.batch_schedule import BatchSchedule
from megatron.core.datasets.sample import Splits
from megatron.training.data_order import megatron_sizes, warn_of_another_order
from tests.unit.config.runs import make_run

DATA = {"mock_data": False, "data_path": ("0.3", "/a/one", "0.7", "/a/two"), "data_order": "megatron"}


def sizes(**changes):
    run = make_run(**{**DATA, "micro_batch_size": 1, "global_batch_size": 4, "eval_iters": 5, **changes})
    return megatron_sizes(run.train, run.eval, BatchSchedule(run.train, 1))


@pytest.mark.parametrize(
    "changes, expected",
    [
        ({"train_iters": 25, "eval_interval": 10}, Splits(100, 3 * 20, 20)),
        ({"train_iters": 20, "eval_interval": 10}, Splits(80, 3 * 20, 20)),
        ({"train_iters": 25}, Splits(100, 20, 20)),
        # 25 whole batches, and the samples that were asked for.
        ({"train_iters": None, "train_samples": 103, "eval_interval": 10}, Splits(103, 3 * 20, 20)),
        # Two steps of two samples, then (103 - 4) // 4 whole batches: 26 iterations, not 25.
        (
            {"train_iters": None, "train_samples": 103, "eval_interval": 26, "rampup_batch_size": (2, 2, 4)},
            Splits(103, 2 * 20, 20),
        ),
        ({"train_iters": 25, "eval_interval": 10, "skip_train": True}, Splits(None, 20, 20)),
    ],
)
def test_sizes(changes, expected):
    assert sizes(**changes) == expected


def warned(caplog, monkeypatch, saved=(), here=(), dp=1):
    """What is logged about a run that goes on with other flags than it was saved with."""
    monkeypatch.setattr(logging.getLogger("megatron"), "propagate", True)
    before, after = (make_run(**{**DATA, "global_batch_size": 8, **dict(changes)}) for changes in (saved, here))
    state = {"config": before.to_dict(), "layout": {"dp": 1}}
    caplog.clear()
    warn_of_another_order(Path("run/iter_0000005"), state, after.to_dict(), dp)
    return "\n".join(dict.fromkeys(caplog.messages))


def test_the_same_order_says_nothing(caplog, monkeypatch):
    assert not warned(caplog, monkeypatch)
    # As many samples in another way, from another folder, under another layout.
    assert not warned(caplog, monkeypatch, here={"train_iters": None, "train_samples": 80}, dp=4)
    assert not warned(caplog, monkeypatch, here={"data_path": ("0.3", "/b/one", "0.7", "/b/two")})
    assert not warned(caplog, monkeypatch, here={"global_batch_size": 4, "train_iters": 20})
    stable = {"data_order": "stable"}
    assert not warned(caplog, monkeypatch, saved=stable, here={**stable, "train_iters": 99})


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"train_iters": 20}, "--train-samples 80 there and 160 here"),
        ({"global_batch_size": 4}, "--train-samples 80 there and 40 here"),
        ({"seed": 5}, "--seed 1234 there and 5 here"),
        ({"seq_length": 64}, "--seq-length 32 there and 64 here"),
        ({"split": "90,10,0"}, "--split 0.969,0.03,0.001 there and 0.9,0.1,0 here"),
        (
            {"data_path": ("0.4", "/a/one", "0.6", "/a/two")},
            "--data-path 3/10 one 7/10 two there and 2/5 one 3/5 two here",
        ),
        ({"data_order": "stable"}, "--data-order megatron there and stable here"),
        ({"dataloader_type": "cyclic"}, "--dataloader-type single there and cyclic here"),
    ],
)
def test_another_order_is_said(caplog, monkeypatch, changes, named):
    text = warned(caplog, monkeypatch, here=changes)
    assert named in text and "another one than before run/iter_0000005" in text and text.count(" there and ") <= 4


def test_cyclic_data_depends_on_the_layout(caplog, monkeypatch):
    cyclic = {"dataloader_type": "cyclic"}
    assert "data-parallel replicas 1 there and 2 here" in warned(caplog, monkeypatch, cyclic, cyclic, dp=2)
    assert not warned(caplog, monkeypatch, dp=2)


def test_a_checkpoint_from_before_the_flag_was_read_in_the_stable_order(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("megatron"), "propagate", True)
    run = make_run(**DATA)
    config = dataclasses.replace(run, data=dataclasses.replace(run.data, data_order="stable")).to_dict()
    del config["data"]["data_order"], config["data"]["data_sharding"]
    warn_of_another_order(Path("run"), {"config": config, "layout": {"dp": 1}}, run.to_dict(), 1)
    assert "--data-order stable there and megatron here" in caplog.text
