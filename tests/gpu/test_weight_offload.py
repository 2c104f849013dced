"""Offloaded weights on CUDA: the same bits, less device memory, page-locked host memory."""

import pytest
import torch

from megatron.core.offload.copy_engine import CopyEngine
from megatron.core.offload.host_pool import HostPool
from megatron.core.streams.streams import Streams
from megatron.core.timeline import Timeline
from tests.gpu.cuda import CUDA, NEEDS_CUDA
from tests.unit.models.builds import LLAMA
from tests.unit.offload.weights_run import Run

pytestmark = NEEDS_CUDA
LAYERS, OFFLOADED, LENGTH = 8, 6, 128
FIELDS = {
    **LLAMA,
    "num_layers": LAYERS,
    "hidden_size": 1024,
    "ffn_hidden_size": 4096,
    "max_position_embeddings": LENGTH,
}


def trained(fields, *, offload):
    """(losses, weights, peak bytes of the last step, the run)"""
    engine = CopyEngine(Streams(CUDA, Timeline(CUDA))) if offload else None
    run = Run({**FIELDS, **fields}, OFFLOADED, HostPool(pinned=True), engine, CUDA, LENGTH)
    losses = []
    for number in range(4):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        losses.append(run.step(number))
        garbage = torch.full((1 << 24,), 7.0, device=CUDA)  # lands where weights were given up
        del garbage
    peak = torch.cuda.max_memory_allocated()
    return losses, run.weights(), peak, run


# torch's attention adds gradients in fp32 atomically, in any order: plain torch does not.
@pytest.mark.parametrize("fields", [{"attention_backend": "unfused"}, {"bf16": True}], ids=["fp32", "bf16"])
def test_same_bits_and_less_memory(fields):
    losses, weights, peak, near = trained(fields, offload=False)
    before = near.device_bytes()
    del near
    other, others, lower, run = trained(fields, offload=True)
    assert other == losses
    assert all(others[name].equal(elements) for name, elements in weights.items())
    assert before - run.device_bytes() == run.pool.nbytes
    assert peak - lower > 0.45 * run.pool.nbytes, "three buckets of six may be on the device in the update"
    shards = [bucket.offloaded.shard for bucket in run.data_parallel.buckets if bucket.offloaded is not None]
    assert len(shards) == run.pool.num_allocated == OFFLOADED and all(shard.is_pinned() for shard in shards)
