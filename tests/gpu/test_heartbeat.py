"""What the heartbeat keeps of collectives on NCCL while the device is behind the host."""

import pytest
import torch
import torch.distributed as dist

from megatron.base.heartbeat import Heartbeat
from megatron.core.comm.collectives import gather_into, in_flight
from megatron.core.groups import Group
from tests.gpu.cuda import CUDA, NEEDS_CUDA

pytestmark = NEEDS_CUDA
CYCLES = 500_000_000  # some tenths of a second
N = 16 * 2**20  # elements of a result, 64 MiB


@pytest.fixture
def alone():
    """A communicator of one rank: its collectives are queued on NCCL's stream as any others."""
    torch.cuda.set_device(CUDA)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield Group("tp", (0,), 0, dist.group.WORLD, Heartbeat(0))
    dist.destroy_process_group()


def test_results_are_freed_while_the_device_is_behind(alone):
    shard = torch.ones(N, device=CUDA)
    for warm in (True, False):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        if not warm:
            torch.cuda._sleep(CYCLES)
        for _ in range(8):
            full = torch.empty_like(shard)
            work = gather_into(full, shard, group=alone.process_group, async_op=True)
            handle = in_flight("all_gather", alone, shard, work, (full, shard))
            handle.wait()
            del full, work, handle
        held = torch.cuda.memory_allocated() - before
    pending = [queued for queued in alone.heartbeat._queued if not queued.finished()]
    assert len(pending) == 8, "the device has not reached them, and the heartbeat follows each of them"
    assert held < shard.nbytes, "all eight results are free"
    torch.cuda.synchronize()
    assert all(queued.finished() for queued in pending)
