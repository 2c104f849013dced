"""Memory lines and the arithmetic of the footprint."""

import re

import pytest
import torch

from megatron.config.data_parallel import EVERY, DataParallelSettings
from megatron.config.optimizer import OptimizerConfig
from megatron.core.device import MemoryReport
from megatron.planner.memory.footprint import Shards, shards_of, weight_and_optimizer_footprint
from megatron.training.logging.footprint import format_footprint, format_memory, memory_line

MIB = 1024**2


def test_golden_memory_line():
    report = MemoryReport(allocated=3 * MIB // 2, peak_allocated=20 * MIB, peak_reserved=40 * MIB, total=80 * MIB)
    assert format_memory(3, 100, report, reserved=30 * MIB) == (
        "[Rank 3] (after 100 iterations) memory (MB) | allocated: 1.50 | max allocated: 20.00 | reserved: 30.00 | "
        "max reserved: 40.00"
    )


def test_memory_of_this_process():
    found = re.findall(r"(?<=: )[\d.]+", memory_line(0, 1, torch.device("cpu")))
    allocated, most, reserved, most_reserved = map(float, found)
    assert 10 < allocated <= most and reserved == allocated and most_reserved == most


PRECISION_AWARE = OptimizerConfig(use_precision_aware_optimizer=True, exp_avg_dtype="bf16")


@pytest.mark.parametrize(
    ("half", "optimizer", "shards", "bytes_per_parameter"),
    [
        (True, OptimizerConfig(), Shards(1, 1, 1), 18),
        (True, OptimizerConfig(), Shards(1, 1, 4), 6 + 12 / 4),
        (False, OptimizerConfig(), Shards(1, 1, 1), 16),
        (False, OptimizerConfig(), Shards(1, 1, 8), 8 + 8 / 8),
        (True, OptimizerConfig(optimizer="sgd"), Shards(1, 1, 1), 14),
        (True, PRECISION_AWARE, Shards(1, 1, 2), 6 + (4 + 2 + 4) / 2),
        (True, OptimizerConfig(), Shards(1, 4, 4), 2 + 16 / 4),
        (True, OptimizerConfig(), Shards(4, 4, 4), 18 / 4),
        (False, OptimizerConfig(), Shards(1, 4, 4), 4 + 12 / 4),
        (False, OptimizerConfig(), Shards(4, 4, 4), 16 / 4),
    ],
)
def test_footprint(half, optimizer, shards, bytes_per_parameter):
    footprint = weight_and_optimizer_footprint(1000, optimizer, shards, half=half)
    assert footprint.total == pytest.approx(1000 * bytes_per_parameter)


@pytest.mark.parametrize(
    ("settings", "shards"),
    [
        ({"shards": "optim"}, Shards(1, 1, 4)),
        ({"shards": "optim", "mode": EVERY}, Shards(1, 4, 4)),
        ({"shards": "optim_grads", "mode": EVERY}, Shards(1, 4, 4)),
        ({"shards": "optim_grads_params", "mode": EVERY}, Shards(4, 4, 4)),
    ],
)
def test_what_ranks_share(settings, shards):
    assert shards_of(DataParallelSettings(**settings), 4) == shards


def test_frozen_parameters_cost_their_weights_alone():
    trained, both = (
        weight_and_optimizer_footprint(100, OptimizerConfig(), Shards(4, 4, 4), half=True, frozen=frozen)
        for frozen in (0, 1000)
    )
    assert both.total == trained.total + 2 * 1000


def test_footprint_line():
    footprint = weight_and_optimizer_footprint(MIB, OptimizerConfig(), Shards(1, 1, 2), half=True)
    assert format_footprint(footprint) == (
        "Theoretical memory footprints: weight and optimizer=12.00 MB "
        "(weights=2.00, main gradients=4.00, master weights=2.00, moments=4.00)"
    )
