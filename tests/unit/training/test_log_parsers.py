"""What public parsers of Megatron-LM's logs find in ours. tests/e2e/test_features.py lets them read a whole run."""

from datetime import datetime
from pathlib import Path

import pytest

from megatron.core.device import MemoryReport
from megatron.planner.memory.footprint import Footprint
from megatron.training.logging.footprint import MIB, format_footprint, format_memory
from megatron.training.logging.line import (
    LogLine,
    format_evaluation,
    format_line,
    format_loaded,
    format_loading,
    format_saved,
    format_saving,
)
from megatron.training.logging.timers import format_timers
from tests.unit.training.log_parsers import ITERATION, OTHERS, flagscale_losses, read

NOW = datetime(2026, 1, 2, 3, 4, 5, 678)
VALUES = {
    "time": "2026-01-02 03:04:05.000678",
    **{"iteration": 20, "total": 100, "samples": 5120, "ms": 512.3, "tflops": 48.1, "rate": 3e-4, "batch": 256},
    **{"loss": 2.345679, "scale": 65536, "norm": 0.988, "zeros": 7, "params": 123.457, "skipped": 1, "nan": 0},
}


@pytest.fixture(scope="module")
def line():
    values = LogLine(
        **{"iteration": 20, "train_iters": 100, "consumed_samples": 5120, "seconds_per_iteration": 0.51234},
        **{"learning_rate": 3e-4, "global_batch_size": 256, "loss": 2.3456789, "loss_scale": 65536.0},
        **{"grad_norm": 0.98765, "num_zeros": 7, "params_norm": 123.4567, "skipped_iterations": 1, "nan_iterations": 0},
        **{"tokens_per_second_per_gpu": 10153.04, "tflops_per_gpu": 48.118, "mfu": 0.5279, "peak_memory": 61 * 1024**3},
        **{"eta_seconds": 3723.4},
    )
    return format_line(values, NOW, log_throughput=True)


@pytest.mark.parametrize("parser", ITERATION)
def test_the_line_of_an_iteration(parser, line):
    (found,) = read(ITERATION[parser], line)
    assert found and found == {name: VALUES[name] for name in found}


def test_a_line_cut_at_its_bars(line):
    assert flagscale_losses(f"{line}\n{line}") == [2.345679, 2.345679]


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        ("validation", format_evaluation("iteration 20", 2.0), {"iteration": 20, "loss": 2}),
        ("final validation", format_evaluation("iteration 20 on validation set", 2.0), {"iteration": 20, "loss": 2}),
        ("perplexity", format_evaluation("iteration 20", 2.0), {"ppl": 7.389056}),
        (
            "memory",
            format_memory(3, 20, MemoryReport(MIB, 2 * MIB, 4 * MIB, 0), 3 * MIB),
            {"rank": 3, "iteration": 20, "allocated": 1, "most": 2},
        ),
        ("reserved", format_memory(3, 20, MemoryReport(MIB, 2 * MIB, 4 * MIB, 0), 3 * MIB), {"reserved": 3, "most": 4}),
        ("footprint", format_footprint(Footprint(MIB, 2 * MIB, 3 * MIB, 4 * MIB)), {"size": 10}),
        (
            "timer",
            format_timers([{"forward-backward": 0.5}, {"forward-backward": 1.0}], 5),
            {"name": "forward-backward", "least": 100, "most": 200},
        ),
        (
            "saving",
            format_saving(20, Path("/run/save"), NOW),
            {"time": VALUES["time"], "iteration": 20, "path": "/run/save"},
        ),
        ("saved", format_saved(20, Path("/run/save"), 4, 2, NOW), {"iteration": 20, "path": "/run/save"}),
        ("loading", format_loading(Path("/run/save/iter_0000020"), 20), {"iteration": 20, "path": "/run/save"}),
        ("loaded", format_loaded(Path("/run/save/iter_0000020"), 20, 4, 2), {"iteration": 20}),
    ],
)
def test_other_lines(kind, text, expected):
    assert read(OTHERS[kind], text) == [expected]


def test_golden_lines_of_checkpoints():
    """Megatron-LM's words and places, with our format's name."""
    root = Path("/run/save")
    assert format_saving(20, root, NOW) == (
        "[2026-01-02 03:04:05.000678] saving checkpoint at iteration      20 to /run/save in safetensors format"
    )
    assert format_saved(20, root, 4, 2, NOW) == (
        "  [2026-01-02 03:04:05.000678] successfully saved checkpoint from iteration      20 to /run/save [ t 1/4, p "
        "1/2 ]"
    )
    assert format_loading(root / "iter_0000020", 20) == " loading checkpoint from /run/save at iteration 20"
    assert format_loading(root / "release", None) == " loading release checkpoint from /run/save/release"
    assert format_loaded(root / "iter_0000020", 0, 4, 2) == (
        "  successfully loaded checkpoint from /run/save [ t 1/4, p 1/2 ] at iteration 0"
    )
