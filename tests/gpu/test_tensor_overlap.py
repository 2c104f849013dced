"""Overlap of tensor-parallel communication between GPUs: both ways of it against none, on NCCL."""

import multiprocessing
import os

import pytest
import torch

from megatron.base.mesh import Mesh
from megatron.config.parallel import ParallelConfig
from megatron.core.comm.chunks import ChunkComm
from megatron.core.groups import connect, create_groups, disconnect
from megatron.core.parameter import initialize, local_parameters
from megatron.core.streams.streams import Streams
from megatron.core.tensor_parallel.linear import ColumnParallelLinear, LinearContext, RowParallelLinear
from megatron.core.tensor_parallel.overlap import PLAIN, InChunks, choose_overlap
from megatron.core.timeline import Timeline
from megatron.kernels.ops import weight_grad
from megatron.kernels.ops.linear import PlainLinear
from megatron.spec.linear import COLUMN, ROW, LinearSpec
from tests import pool
from tests.gpu.cuda import NEEDS_CUDA

pytestmark = [
    *NEEDS_CUDA,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
S, B, WIDTH, TP = 1024, 2, 512, 2
ASKED = ParallelConfig(tp_comm_overlap=True, sequence_parallel=True)


def passes(groups, how, device, dtype, sequence_parallel):
    """Output and gradients of a column layer, an activation and a row layer, after two passes."""
    context = LinearContext(groups, sequence_parallel, PlainLinear(weight_grad.separate), dtype, device, how)
    layers = torch.nn.Sequential(
        ColumnParallelLinear(LinearSpec(WIDTH, (4 * WIDTH,), COLUMN, ()), context),
        torch.nn.GELU(),
        RowParallelLinear(LinearSpec(4 * WIDTH, (WIDTH,), ROW, ()), context),
    )
    initialize(local_parameters(layers), 1)
    rows = S // TP if sequence_parallel else S
    seed = groups.tp.rank if sequence_parallel else 0
    x = torch.randn(rows, B, WIDTH, generator=torch.Generator().manual_seed(seed)).to(device, dtype).requires_grad_()
    for _ in range(2):
        out = layers(x)
        out.square().sum().backward()
    return [tensor.detach().float().cpu() for tensor in (out, x.grad, *(p.grad for p in layers.parameters()))]


def compare(rank, port, queue, device_type, dtype):
    """Puts (rank, [(way, largest difference of each tensor, relative to its largest element)])."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(TP))
    device = torch.device(device_type, rank) if device_type == "cuda" else torch.device("cpu")
    backend = "nccl" if device_type == "cuda" else "gloo"
    if device_type == "cuda":
        torch.cuda.set_device(device)
    heartbeat = connect(rank, TP, backend=backend, timeout_seconds=60)
    groups = create_groups(Mesh.create(TP, tp=TP), rank, heartbeat, 60)
    chosen, _ = choose_overlap(ASKED, groups.tp, backend, Streams(device, Timeline(device)))
    in_chunks = InChunks(ASKED, ChunkComm(groups.tp, Streams(device, Timeline(device))), "in chunks", 100)
    found = []
    for sequence_parallel in (True, False):
        expected = passes(groups, PLAIN, device, dtype, sequence_parallel)
        for how in (chosen, in_chunks):
            tensors = passes(groups, how, device, dtype, sequence_parallel)
            off = [float((a - b).abs().max() / b.abs().max()) for a, b in zip(tensors, expected, strict=True)]
            found.append((how.name, sequence_parallel, off))
    queue.put((rank, found))
    disconnect(heartbeat)


def run(device_type, dtype):
    """What both ranks found."""
    context = multiprocessing.get_context("spawn")
    queue, port = context.Queue(), pool.free_port()
    ranks = [context.Process(target=compare, args=(rank, port, queue, device_type, dtype)) for rank in range(TP)]
    for process in ranks:
        process.start()
    found = [queue.get(timeout=180) for _ in ranks]
    for process in ranks:
        process.join(60)
    return [ways for _, ways in sorted(found)]


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.bfloat16, 2**-6)])
def test_between_two_gpus(dtype, limit):
    for ways in run("cuda", dtype):
        for name, sequence_parallel, off in ways:
            assert max(off) <= limit, (name, sequence_parallel, off)
