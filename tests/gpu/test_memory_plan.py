"""The memory plan against the caching allocator."""

import gc

import pytest
import torch

from megatron.planner.memory.plan import plan_memory
from megatron.tooling.memory_check import LLAMA, configured
from megatron.training.setup import build
from tests import pool
from tests.gpu.cuda import CUDA, NEEDS_CUDA

pytestmark = NEEDS_CUDA
# Large enough that cuBLAS's work space and the allocator's rounding are small beside it.
SHAPE = (
    "--device cuda --bf16 --hidden-size 1024 --ffn-hidden-size 2816 --num-layers 8 --seq-length 2048 --vocab-size 8192"
)
WORK_SPACE = 96 * 2**20


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--kaimm-recompute-norm --kaimm-recompute-mlp-activation-func",
        "--recompute-activations",
        "--reset-attention-mask",
        "--reset-attention-mask --micro-batch-size 1",
    ],
)
def test_planned_is_measured(flags):
    run = configured(f"{LLAMA} {SHAPE} {flags}", 1)
    gc.collect()  # the run of the test before, which would be freed in this one
    before = torch.cuda.memory_allocated(CUDA)
    trainer = build(run, pool.groups(), CUDA)
    for _ in range(2):
        trainer.train_step()
    torch.cuda.reset_peak_memory_stats(CUDA)
    trainer.train_step()
    peak = torch.cuda.max_memory_allocated(CUDA) - before
    (planned,) = plan_memory(run, trainer.settings, trainer.target)
    assert 0.97 * planned.peak <= peak <= 1.03 * planned.peak + WORK_SPACE
