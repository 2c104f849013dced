"""--log-memory: the line, and that what it measures is what a run has taken."""

import logging
import re

import pytest
import torch

from megatron.command_line.read import parse
from megatron.kernels.backends import cpu_allocator
from megatron.kernels.backends.cpu_allocator import CpuMemory
from megatron.planner.memory.plan import RankMemory
from megatron.tooling.memory_check import COMMON, LLAMA
from megatron.training.logging.memory import LogMemory, PeakMemory, format_line
from megatron.training.setup import build
from tests import pool

CPU = torch.device("cpu")
SMALL = "--num-layers 1 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 2 --seq-length 64 --log-interval 2"


def test_lines_of_a_run(caplog):
    run = parse(f"{COMMON} {LLAMA} {SMALL} --log-memory".split(), description="")
    memory = PeakMemory(CPU)
    trainer = build(run, pool.groups(), CPU)
    callback = LogMemory(memory)
    with caplog.at_level(logging.INFO):
        callback.start(trainer)
        for _ in range(4):
            callback.after_step(trainer, trainer.train_step())
        callback.end(trainer, None)
    lines = [re.match(r"\[Pipeline rank 0\] \(after (\d+) iterations\)", message) for message in caplog.messages]
    assert [int(found.group(1)) for found in lines if found] == [2, 4]
    assert memory.source == "torch's allocations"
    last = caplog.messages[-1]
    planned, measured = (float(re.search(rf"{name}: ([\d.]+)", last).group(1)) for name in ("planned", "measured"))
    assert planned > 1
    # The whole run, so that making the initial weights counts, too: never less than a step.
    assert planned <= measured * 1.01


def test_golden_line():
    others = dict.fromkeys(("parameters", "start", "per_microbatch", "in_flight", "host", "disk"), 0)
    moment = "backward of microbatch 0: layer 3: mlp"
    rank = RankMemory(rank=1, stages=(), at_peak={"mlp": 3 * 2**20}, moment=moment, **others)
    assert format_line(rank, 2 * 2**20, 50) == (
        "[Pipeline rank 1] (after 50 iterations) peak memory (MB) | planned: 3.00 | measured: 2.00 | "
        "planned / measured: 1.500 | planned at: backward of microbatch 0: layer 3: mlp"
    )


class TestCpuMemory:
    def test_tensors_are_counted_while_they_live(self):
        memory = CpuMemory()
        before = memory.allocated
        kept = torch.zeros(1000)
        view = kept[10:]
        memory.reset_peak()
        torch.ones(500, dtype=torch.float64).sum()
        assert (memory.allocated - before, memory.peak - before) == (4000, 8000 + 8)
        del kept
        assert memory.allocated - before == 4000, view.shape
        del view
        assert memory.allocated == before

    def test_what_a_kernel_takes_is_counted(self):
        memory = CpuMemory()
        x = torch.randn(8, 4, 256, 16)
        before = memory.allocated
        memory.reset_peak()
        out = torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
        assert memory.peak - before > out.nbytes

    def test_results_are_the_same(self):
        CpuMemory()
        x = torch.arange(7.0)
        torch.testing.assert_close(torch.cat([x, x]).sort().values.unique(), x)
        assert x.data_ptr() % 64 == 0

    def test_without_a_compiler_the_resident_set_takes_its_place(self, monkeypatch):
        monkeypatch.setattr(cpu_allocator.shutil, "which", lambda name: None)
        monkeypatch.setattr(cpu_allocator, "_library", cpu_allocator._library.__wrapped__)
        with pytest.raises(OSError, match="no C\\+\\+ compiler"):
            CpuMemory()
        memory = PeakMemory(CPU)
        assert "resident set" in memory.source and "no C++ compiler" in memory.source
        block = torch.ones(64 * 2**20, dtype=torch.uint8)
        assert memory.peak() >= 0.9 * block.nbytes
        del block
