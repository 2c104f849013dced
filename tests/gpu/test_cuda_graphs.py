"""Layers as real CUDA graphs: the same training as without, beside other threads that use the device, and memory."""

import threading

import pytest
import torch
import torch.distributed as dist

from megatron.base.heartbeat import Heartbeat
from megatron.core.comm.collectives import all_reduce
from megatron.core.groups import Group
from megatron.core.streams.cuda import everything_queued
from megatron.core.streams.graph import CudaGraphs
from tests.gpu.cuda import CUDA, NEEDS_CUDA
from tests.unit.models.builds import GPT, LLAMA, assert_gradients, gradients, losses, make_ids
from tests.unit.transformer.test_layer_graphs import Setup

pytestmark = NEEDS_CUDA
LARGER = {"hidden_size": 256, "num_attention_heads": 4}
# Products that overwrite and products that add to zeros may be different kernels of cuBLAS.
LIMIT = {"float32": 1e-5, "bfloat16": 1e-2}


def made(fields, *, graphs):
    setup = Setup(fields, device=CUDA, make_pool=CudaGraphs(CUDA).pool)
    if not graphs:
        setup.model.decoder.graphs = None
    return setup


@pytest.mark.parametrize("dtype", [{}, {"bf16": True, **LARGER}], ids=["fp32", "bf16"])
@pytest.mark.parametrize("fields", [LLAMA, GPT], ids=["llama", "gpt"])
def test_same_losses_and_gradients(fields, dtype):
    plain, graphed = (made({**fields, **dtype}, graphs=graphs) for graphs in (False, True))
    limit = LIMIT["bfloat16" if dtype else "float32"]
    for seed in range(4):
        batches = [make_ids(2, 16, seed=10 * seed + number).to(CUDA) for number in range(3)]
        one, other = plain.step(*batches), graphed.step(*batches)
        for a, b in zip(one[0], other[0], strict=True):
            torch.testing.assert_close(a, b, rtol=limit, atol=limit)
        assert_gradients(other[1], one[1], limit)
    assert len(graphed.graphs._free[graphed.layers]) == 1, "the graphs were used, and the slot came back"


def test_two_microbatches_under_way():
    """Their slots take turns in another order than that of the captures."""
    plain, graphed = (made(LLAMA, graphs=graphs) for graphs in (False, True))
    found = []
    for setup in (plain, graphed):
        setup.step(make_ids(2, 16).to(CUDA))
        for step in range(2):
            setup.data_parallel.begin_step(4)
            setup.graphs.begin_step({setup.layers: 2})
            batches = [make_ids(2, 16, seed=4 * step + number).to(CUDA) for number in range(4)]
            waiting = [losses(setup.model, batches[0]).sum()]
            for number, ids in enumerate([*batches[1:], None], start=1):
                if ids is not None:
                    waiting.append(losses(setup.model, ids).sum())
                setup.data_parallel.begin_backward(last=number == 4)
                waiting.pop(0).backward()
                setup.data_parallel.end_backward(last=number == 4)
            setup.data_parallel.finish_reduction()
        found.append(gradients(setup.data_parallel))
    assert_gradients(found[1], found[0])


def test_other_threads_ask_events_and_pin_memory_during_captures():
    stop, failures = threading.Event(), []

    def work():
        torch.cuda.set_device(CUDA)
        try:
            while not stop.is_set():
                everything_queued(CUDA).is_completed()
                torch.empty(1 << 20, pin_memory=True)
        except Exception as error:
            failures.append(error)

    other = threading.Thread(target=work)
    other.start()
    try:
        setup = made(LLAMA, graphs=True)
        for seed in range(3):
            setup.step(make_ids(2, 16, seed=seed).to(CUDA))
    finally:
        stop.set()
        other.join()
    assert not failures


def test_a_collective_in_a_graph_is_not_followed():
    torch.cuda.set_device(CUDA)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        alone = Group("tp", (0,), 0, dist.group.WORLD, Heartbeat(0))
        x = torch.ones(1024, device=CUDA)
        all_reduce(x, alone)  # makes the communicator
        queued = len(alone.heartbeat._queued)
        graph = CudaGraphs(CUDA).pool().graph()
        doubled = graph.capture(lambda: all_reduce(x * 2, alone))
        assert len(alone.heartbeat._queued) == queued
        x.fill_(3.0)
        graph.replay()
        assert doubled.cpu().equal(torch.full((1024,), 6.0))
    finally:
        dist.destroy_process_group()


def test_memory_of_the_graphs_is_bounded():
    """More steps allocate no more."""
    setup = made({**LLAMA, **LARGER}, graphs=True)
    ids = make_ids(4, 64).to(CUDA)
    held = []
    for _ in range(6):
        setup.step(ids)
        torch.cuda.synchronize()
        held.append(torch.cuda.memory_allocated())
    assert held[3] == held[5]
