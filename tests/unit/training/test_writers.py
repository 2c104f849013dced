"""What the writers record, read back from event files and from a stand-in for wandb."""

import math
import sys
from types import SimpleNamespace

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron.base.errors import ConfigError
from megatron.config.train import LoggingConfig
from megatron.training.logging.line import LogWindow
from megatron.training.logging.writers import Metrics, open_writers
from megatron.training.state import StepReport

CPU = torch.device("cpu")


def report(iteration, **fields):
    values = {
        "loss": 3.0 / iteration,
        "grad_norm": 1.5,
        "loss_scale": 4.0,
        "learning_rate": 1e-4,
        "global_batch_size": 8,
        "tokens": 800,
        "seconds": 0.5,
    }
    return StepReport(iteration=iteration, **{**values, **fields})


def log_line(iteration):
    window = LogWindow(flops_per_sample=1e12, world_size=2, peak_tflops=100.0)
    window.add(report(iteration))
    return window.close(consumed_samples=8 * iteration, train_iters=9, remaining_samples=8, peak_memory=0)


def run(writers, interval):
    """Four steps, the last of which was skipped, a log line and an evaluation."""
    metrics = Metrics(writers, interval, CPU)
    for iteration in range(1, 5):
        skipped = iteration == 4
        metrics.step(
            report(iteration, num_zeros=5, params_norm=7.0, skipped=skipped),
            consumed_samples=8 * iteration,
            world_size=6,
        )
    metrics.line(log_line(4), {"forward-backward": 0.25})
    metrics.evaluation(4, 32, loss=2.0)
    metrics.evaluation(4, 32, loss=1.0, name="web")
    metrics.close()


def read(folder):
    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(e.step, round(e.value, 5)) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_tags(tmp_path):
    folder = tmp_path / "a" / "tb"
    run(open_writers(LoggingConfig(tensorboard_dir=str(folder)), None, {}), interval=1)
    found = read(folder)
    steps = [1, 2, 3, 4]
    expected = {
        "learning-rate": [1e-4] * 4,
        "batch-size": [8.0] * 4,
        "loss-scale": [4.0] * 4,
        "world-size": [6.0] * 4,
        "grad-norm": [1.5] * 4,
        "num-zeros": [5.0] * 4,
        "params-norm": [7.0] * 4,
        "lm loss": [3.0, 1.5, 1.0],  # none for the skipped step
    }
    for tag, values in expected.items():
        assert found.pop(tag) == list(zip(steps, values)), tag
        assert found.pop(f"{tag} vs samples") == [(8 * s, v) for s, v in zip(steps, values)], tag
    memory = [found.pop(f"mem-{kind}-bytes") for kind in ("allocated", "max-allocated", "reserved")]
    assert all(len(points) == 4 and points[0][1] > 1e7 for points in memory)
    assert found == {
        "forward-backward-time": [(4, 0.25)],
        "iteration-time": [(4, 0.5)],
        "iteration-time vs samples": [(32, 0.5)],
        "throughput": [(4, 8.0)],
        "tokens-per-second": [(4, 800.0)],
        "mfu": [(4, 0.08)],
        "lm loss validation": [(4, 2.0)],
        "lm loss validation vs samples": [(32, 2.0)],
        "lm loss validation ppl": [(4, 7.38906)],
        "lm loss validation ppl vs samples": [(32, 7.38906)],
        "lm loss validation-web": [(4, 1.0)],
        "lm loss validation-web vs samples": [(32, 1.0)],
        "lm loss validation-web ppl": [(4, 2.71828)],
        "lm loss validation-web ppl vs samples": [(32, 2.71828)],
    }


def test_only_every_interval(tmp_path):
    run(open_writers(LoggingConfig(tensorboard_dir=str(tmp_path)), None, {}), interval=2)
    assert read(tmp_path)["grad-norm"] == [(2, 1.5), (4, 1.5)]


def test_a_rank_without_writers_records_nothing(tmp_path):
    run(open_writers(LoggingConfig(), None, {}), interval=1)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--tensorboard-dir"):
        open_writers(LoggingConfig(tensorboard_dir=str(tmp_path / "file" / "tb")), None, {})


class FakeWandb(SimpleNamespace):
    """Records what the client library would be told."""

    def __init__(self):
        super().__init__(asked={}, rows=[], finished=False)

    def init(self, **asked):
        self.asked = asked
        return self

    def log(self, row, step):
        self.rows.append((step, row))

    def finish(self):
        self.finished = True


def test_wandb_gets_the_same_tags(tmp_path, monkeypatch):
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    config = LoggingConfig(wandb_project="p", wandb_exp_name="n", wandb_entity="e")
    run(open_writers(config, str(tmp_path), {"model": {"num_layers": 2}}), interval=4)
    folder = tmp_path / "wandb"
    assert folder.is_dir()
    assert fake.asked == {
        "project": "p",
        "name": "n",
        "entity": "e",
        "dir": str(folder),
        "config": {"model": {"num_layers": 2}},
    }
    assert [step for step, _ in fake.rows] == [4, 4, 4, 4]
    row = fake.rows[0][1]
    assert (row["grad-norm"], row["samples vs steps"]) == (1.5, 32)
    assert fake.rows[1][1]["iteration-time"] == 0.5
    assert fake.rows[2][1]["lm loss validation"] == 2.0
    assert fake.finished


def test_wandb_is_not_installed(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"--wandb-project p needs the wandb package.*\[wandb\]"):
        open_writers(LoggingConfig(wandb_project="p"), str(tmp_path), {})


def test_a_resumed_run_has_every_step_once(tmp_path):
    """Killed at iteration 4, it goes on from the checkpoint of iteration 2, which had read 16 samples."""
    config = LoggingConfig(tensorboard_dir=str(tmp_path))
    run(open_writers(config, None, {}), interval=1)
    (written,) = tmp_path.iterdir()
    with open(written, "ab") as file:
        file.write(b"\x20\0\0")  # a record that was cut short
    before = read(tmp_path)
    writers = open_writers(config, None, {}, iteration=2, samples=16)
    left = read(tmp_path)
    assert left["lm loss"] == [point for point in before["lm loss"] if point[0] <= 2]
    assert left["lm loss vs samples"] == [point for point in before["lm loss vs samples"] if point[0] <= 16]
    metrics = Metrics(writers, 1, CPU)
    for iteration in (3, 4):
        metrics.step(report(iteration), consumed_samples=8 * iteration, world_size=6)
    metrics.close()
    assert [step for step, _ in read(tmp_path)["grad-norm"]] == [1, 2, 3, 4]
    assert [step for step, _ in read(tmp_path)["grad-norm vs samples"]] == [8, 16, 24, 32]
    assert len(list(tmp_path.iterdir())) == 2


def test_a_step_without_labels_has_no_loss(tmp_path):
    metrics = Metrics(open_writers(LoggingConfig(tensorboard_dir=str(tmp_path)), None, {}), 1, CPU)
    metrics.step(report(1, loss=math.nan, has_labels=False), consumed_samples=8, world_size=1)
    metrics.close()
    assert "lm loss" not in read(tmp_path) and "grad-norm" in read(tmp_path)
