"""Memory lines and the arithmetic of the footprint."""

import re

import pytest
import torch

from megatron.config.optimizer import OptimizerConfig
from megatron.core.device import MemoryReport
from megatron.planner.footprint import weight_and_optimizer_footprint
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


@pytest.mark.parametrize(
    ("dtype", "optimizer", "shards", "bytes_per_parameter"),
    [
        ("bfloat16", OptimizerConfig(), 1, 18),
        ("float16", OptimizerConfig(), 4, 6 + 12 / 4),
        ("float32", OptimizerConfig(), 1, 16),
        ("float32", OptimizerConfig(), 8, 8 + 8 / 8),
        ("bfloat16", OptimizerConfig(optimizer="sgd"), 1, 14),
        ("bfloat16", OptimizerConfig(optimizer="sgd", sgd_momentum=0.0), 2, 6 + 4 / 2),
    ],
)
def test_footprint(dtype, optimizer, shards, bytes_per_parameter):
    footprint = weight_and_optimizer_footprint(1000, dtype, optimizer, shards)
    assert footprint.total == pytest.approx(1000 * bytes_per_parameter)


@pytest.mark.parametrize(
    ("dtype", "sharding", "bytes_per_parameter"),
    [
        ("bfloat16", "optim", 6 + 12 / 4),
        ("bfloat16", "optim_grads", 2 + 16 / 4),
        ("bfloat16", "optim_grads_params", 18 / 4),
        ("float32", "optim_grads", 4 + 12 / 4),
        ("float32", "optim_grads_params", 16 / 4),
    ],
)
def test_footprint_by_what_is_sharded(dtype, sharding, bytes_per_parameter):
    footprint = weight_and_optimizer_footprint(1000, dtype, OptimizerConfig(), 4, sharding)
    assert footprint.total == pytest.approx(1000 * bytes_per_parameter)


def test_frozen_parameters_cost_their_weights_alone():
    trained = weight_and_optimizer_footprint(100, "bfloat16", OptimizerConfig(), 4, "optim_grads_params")
    both = weight_and_optimizer_footprint(100, "bfloat16", OptimizerConfig(), 4, "optim_grads_params", frozen=1000)
    assert both.total == trained.total + 2 * 1000


def test_footprint_line():
    footprint = weight_and_optimizer_footprint(MIB, "bfloat16", OptimizerConfig(), 2)
    assert format_footprint(footprint) == (
        "Theoretical memory footprints: weight and optimizer=12.00 MB "
        "(weights=2.00, main gradients=4.00, master weights=2.00, moments=4.00)"
    )
