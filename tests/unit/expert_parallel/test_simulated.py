"""An exchange on tensors without values, as in a dry run."""

import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron.base.heartbeat import Heartbeat
from megatron.base.mesh import Mesh
from megatron.core.comm.simulated import simulated_world
from megatron.core.expert_parallel.dispatch import AllGather, AllToAll, Local
from megatron.core.expert_parallel.simulated import balanced_counts
from megatron.core.groups import create_groups, with_experts
from megatron.core.streams.simulated import H100, simulated_cuda
from megatron.spec.collectives import ExchangeSizes, exchange_collectives
from megatron.training.dry_run.simulated_torch import SimulatedTorch
from megatron.training.dry_run.traced_memory import TracedMemory

T, K, E, H, BF16 = 1024, 8, 128, 64, 2
# Tokens with an expert on a rank that has 16 of 128. One after the other, each of a token's 8 experts is on another
# rank with the chance (112 - i) / (128 - i).
ROWS = int(T * (1 - math.prod((112 - i) / (128 - i) for i in range(K))))


@pytest.mark.parametrize("kind", [Local, AllToAll, AllGather])
def test_sizes_are_those_of_even_routing(kind):
    device, ep = torch.device("cuda", 0), 1 if kind is Local else 8
    memory = TracedMemory(device, str)
    with (
        simulated_cuda(H100, lambda: memory.allocated),
        simulated_world(0, ep),
        SimulatedTorch(),
        FakeTensorMode(allow_non_fake_inputs=True),
        memory,
    ):
        groups = with_experts(create_groups(Mesh.create(ep, ep=ep), 0, Heartbeat(0), 1.0), 1.0)
        x = torch.zeros(T, H, dtype=torch.bfloat16, device=device, requires_grad=True)
        weights = torch.zeros(T, K, device=device, requires_grad=True)
        read = balanced_counts(K, E, ep)
        dispatcher = Local(E, read=read) if kind is Local else kind(groups.etp_ep, E, read=read)
        reads = memory.host_reads
        with groups.heartbeat.record() as calls:
            dispatched = dispatcher.start(x, torch.zeros(T, K, dtype=torch.int64, device=device), weights).finish()
            out = dispatcher.combine(dispatched.rows * 1, dispatched)
            (out.sum() + dispatched.weights.sum()).backward()
    rows = {Local: T, AllToAll: ep * ROWS, AllGather: ep * T}[kind]
    assert memory.host_reads - reads == 1
    assert dispatched.rows.shape == (rows, H) and out.shape == x.grad.shape == (T, H)
    assert dispatched.assignments.sizes == [ep * T * K // E] * (E // ep)
    assert len(dispatched.weights) == len(dispatched.assignments.rows) == T * K
    if kind is AllToAll:
        sizes = ExchangeSizes(
            experts=E,
            ep=ep,
            etp=1,
            tokens=T,
            topk=K,
            sent_rows=rows,
            assignments=T * K,
            received_rows=rows,
            received_assignments=T * K,
            row=H * BF16,
        )
        expected = exchange_collectives(sizes)
        assert [call.nbytes for call in calls] == [call.nbytes for call in expected.forward + expected.backward]
