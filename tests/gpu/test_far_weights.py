"""Weights in far memory on CUDA: the same bits, less memory, homes that are page-locked."""

import pytest
import torch

from megatron.core.memory.copier import StreamCopier
from megatron.core.memory.tiers import FarMemory
from megatron.core.timeline import Timeline
from tests.gpu.cuda import CUDA, NEEDS_CUDA
from tests.unit.memory.far_weights import Run
from tests.unit.models.builds import LLAMA

pytestmark = NEEDS_CUDA
LAYERS, FAR, LENGTH = 8, 6, 128
FIELDS = {
    **LLAMA,
    "num_layers": LAYERS,
    "hidden_size": 1024,
    "ffn_hidden_size": 4096,
    "max_position_embeddings": LENGTH,
}


def trained(fields, far):
    """(losses, weights, peak bytes of the last step, the run)"""
    copier = StreamCopier(CUDA, Timeline(CUDA)) if far else None
    run = Run({**FIELDS, **fields}, FAR, FarMemory(pinned=True), copier, CUDA, LENGTH)
    losses = []
    for number in range(4):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        losses.append(run.step(number))
        garbage = torch.full((1 << 24,), 7.0, device=CUDA)  # lands where weights were given up
        del garbage
    peak = torch.cuda.max_memory_allocated()
    return losses, run.weights(), peak, run


@pytest.mark.parametrize("fields", [{}, {"bf16": True}], ids=["fp32", "bf16"])
def test_same_bits_and_less_memory(fields):
    losses, weights, peak, near = trained(fields, far=False)
    before = near.near_bytes()
    del near
    other, others, lower, run = trained(fields, far=True)
    assert other == losses
    assert all(others[name].equal(elements) for name, elements in weights.items())
    assert before - run.near_bytes() == run.far.nbytes
    assert peak - lower > 0.45 * run.far.nbytes, "three buckets of six may be near in the update"
    homes = [bucket.home.shard for bucket in run.data_parallel.buckets if bucket.home is not None]
    assert len(homes) == run.far.made == FAR and all(shard.is_pinned() for shard in homes)
