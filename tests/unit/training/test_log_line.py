"""The log line: exact text, what parsers of Megatron-LM's logs find in it, and our own parser."""

import math
import re
from dataclasses import replace
from datetime import datetime

import pytest

from megatron.training.logging.line import (
    LogLine,
    LogWindow,
    format_duration,
    format_evaluation,
    format_line,
    parse_evaluation,
    parse_line,
)
from megatron.training.state import StepReport

NOW = datetime(2026, 1, 2, 3, 4, 5, 678)
LINE = LogLine(
    iteration=20,
    train_iters=100,
    consumed_samples=5120,
    seconds_per_iteration=0.51234,
    learning_rate=3e-4,
    global_batch_size=256,
    loss=2.3456789,
    loss_scale=1.0,
    grad_norm=0.98765,
    num_zeros=7,
    params_norm=123.4567,
    skipped_iterations=1,
    nan_iterations=0,
    tokens_per_second_per_gpu=10153.04,
    tflops_per_gpu=522.118,
    mfu=0.5279,
    peak_memory=61 * 1024**3 + 512 * 1024**2,
    eta_seconds=3723.4,
)
GOLDEN = (
    " [2026-01-02 03:04:05.000678] iteration       20/     100 | consumed samples:         5120 |"
    " elapsed time per iteration (ms): 512.3 | throughput per GPU (TFLOP/s/GPU): 522.1 |"
    " learning rate: 3.000000E-04 | global batch size:   256 | lm loss: 2.345679E+00 | loss scale: 1.0 |"
    " grad norm: 0.988 | num zeros: 7.0 | params norm: 123.457 | number of skipped iterations:   1 |"
    " number of nan iterations:   0 | tokens/s/GPU: 10153.0 | model TFLOP/s/GPU: 522.12 | MFU: 52.8% |"
    " peak memory (GB): 61.50 | ETA: 1:02:03 |"
)


def report(iteration=1, **fields):
    values = {
        "loss": 3.0,
        "grad_norm": 1.0,
        "loss_scale": 1.0,
        "learning_rate": 1e-4,
        "global_batch_size": 8,
        "tokens": 800,
        "seconds": 0.5,
    }
    return StepReport(iteration=iteration, **{**values, **fields})


def close(window, **fields):
    given = {"consumed_samples": 16, "train_iters": 10, "remaining_samples": 64, "peak_memory": 0}
    return window.close(**{**given, **fields})


def test_golden_line():
    assert format_line(LINE, NOW, log_throughput=True) == GOLDEN


def test_optional_fields_are_left_out():
    bare = replace(LINE, loss=None, num_zeros=None, params_norm=None, mfu=None)
    text = format_line(bare, NOW)
    for name in ("throughput per GPU", "lm loss", "num zeros", "params norm", "MFU"):
        assert name not in text
    assert "global batch size:   256 | loss scale: 1.0 | grad norm: 0.988 | number of skipped" in text


@pytest.mark.parametrize(
    ("pattern", "value"),
    [
        (r"iteration\s+(\d+)/", 20),
        (r"iteration\s+\d+/\s*(\d+) \|", 100),
        (r"consumed samples:\s+(\d+) \|", 5120),
        (r"elapsed time per iteration \(ms\): ([\d.]+) \|", 512.3),
        (r"throughput per GPU \(TFLOP/s/GPU\): ([\d.]+) \|", 522.1),
        (r"learning rate: ([\d.]+E[+-]\d+) \|", 3e-4),
        (r"global batch size:\s+(\d+) \|", 256),
        (r"lm loss: ([\d.]+E[+-]\d+) \|", 2.345679),
        (r"loss scale: ([\d.]+) \|", 1.0),
        (r"grad norm: ([\d.]+) \|", 0.988),
        (r"num zeros: ([\d.]+) \|", 7),
        (r"params norm: ([\d.]+) \|", 123.457),
        (r"number of skipped iterations:\s+(\d+) \|", 1),
        (r"number of nan iterations:\s+(\d+) \|", 0),
    ],
)
def test_megatron_log_parsers_find_their_fields(pattern, value):
    found = re.findall(pattern, format_line(LINE, NOW, log_throughput=True))
    assert [float(text) for text in found] == [value]


def test_parse_reads_back_what_was_printed():
    assert parse_line(format_line(LINE, NOW)) == {
        "time": "2026-01-02 03:04:05.000678",
        "iteration": 20,
        "train iterations": 100,
        "consumed samples": 5120,
        "elapsed time per iteration (ms)": 512.3,
        "learning rate": 3e-4,
        "global batch size": 256,
        "lm loss": 2.345679,
        "loss scale": 1.0,
        "grad norm": 0.988,
        "num zeros": 7,
        "params norm": 123.457,
        "number of skipped iterations": 1,
        "number of nan iterations": 0,
        "tokens/s/GPU": 10153.0,
        "model TFLOP/s/GPU": 522.12,
        "MFU": 52.8,
        "peak memory (GB)": 61.5,
        "ETA": 3723,
    }


def test_parse_reads_older_lines_and_prefixes_and_nothing_else():
    old = (
        "7: iteration        3/     500 | consumed samples:           96 | elapsed time per iteration (ms): 99.5 | "
        "learning rate: 1.000E-05 | global batch size:    32 | lm loss: 1.05E+01 | state: warm | grad norm: nan |"
    )
    fields = parse_line(old)
    assert (fields["iteration"], fields["learning rate"], fields["lm loss"], fields["state"]) == (3, 1e-5, 10.5, "warm")
    assert math.isnan(fields["grad norm"]) and "time" not in fields
    for other in ("", "saving checkpoint at iteration      20 to DIR", format_evaluation("iteration 20", 2.0)):
        assert parse_line(other) == {}


def test_window_averages_and_rates():
    window = LogWindow(flops_per_sample=2e12, world_size=4, peak_tflops=100.0)
    window.add(report(1, loss=4.0, seconds=0.5, global_batch_size=8, tokens=800))
    window.add(report(2, loss=2.0, seconds=1.5, global_batch_size=12, tokens=1200, learning_rate=2e-4, grad_norm=0.5))
    assert len(window) == 2
    line = close(window, consumed_samples=20, train_iters=7, remaining_samples=50, peak_memory=99)
    assert (line.iteration, line.train_iters, line.consumed_samples, line.peak_memory) == (2, 7, 20, 99)
    assert line.loss == 3.0
    assert line.seconds_per_iteration == 1.0
    assert (line.learning_rate, line.grad_norm, line.global_batch_size) == (2e-4, 0.5, 12)
    assert line.tokens_per_second_per_gpu == pytest.approx(2000 / 2.0 / 4)
    assert line.tflops_per_gpu == pytest.approx(20 * 2.0 / 2.0 / 4)
    assert line.mfu == pytest.approx(0.05)
    assert line.eta_seconds == pytest.approx(50 / 20 * 2.0)
    assert len(window) == 0


def test_steps_that_were_not_applied_do_not_enter_the_loss():
    window = LogWindow(1.0, 1, None)
    window.add(report(1, loss=math.nan, nan=True))
    window.add(report(2, loss=50.0, skipped=True))
    window.add(report(3, loss=2.5))
    line = close(window)
    assert (line.loss, line.skipped_iterations, line.nan_iterations, line.mfu) == (2.5, 1, 1, None)
    window.add(report(4, skipped=True))
    line = close(window)
    assert (line.loss, line.skipped_iterations, line.nan_iterations) == (None, 1, 0)


def test_an_empty_window_has_no_line():
    with pytest.raises(AssertionError, match="at least one step"):
        close(LogWindow(1.0, 1, None))


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00:00"), (59.6, "0:01:00"), (3661, "1:01:01"), (360000, "100:00:00")]
)
def test_durations(seconds, text):
    assert format_duration(seconds) == text


def test_evaluation_block():
    rule, line, last_rule = format_evaluation("iteration 100", 2.0).split("\n")
    assert line == " validation loss at iteration 100 | lm loss value: 2.000000E+00 | lm loss PPL: 7.389056E+00 | "
    assert rule == last_rule == "-" * (len(line) + 1)
    assert parse_evaluation(line) == {"where": "iteration 100", "name": "", "lm loss": 2.0, "iteration": 100}
    assert parse_evaluation(rule) == {} == parse_evaluation(format_line(LINE, NOW))


def test_evaluation_of_a_named_set_and_a_cut_perplexity():
    line = format_evaluation("iteration 7 on test set", 30.0, "1").split("\n")[1]
    assert line.startswith(" validation-1 loss at iteration 7 on test set | ")
    assert f"lm loss PPL: {math.exp(20):.6E} |" in line
    assert parse_evaluation(line) == {"where": "iteration 7 on test set", "name": "1", "lm loss": 30.0, "iteration": 7}


def test_a_step_without_labels_does_not_count_in_the_loss():
    window = LogWindow(1.0, 1, None)
    window.add(report(1, loss=3.0))
    window.add(report(2, loss=float("nan"), has_labels=False))
    assert close(window).loss == 3.0
    window.add(report(3, loss=float("nan"), has_labels=False))
    assert close(window).loss is None
