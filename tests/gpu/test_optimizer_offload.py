"""Optimizer offload on CUDA: pinned memory, copies beside compute, the same training to the CPU kernel's last bit."""

import pytest
import torch

from megatron.config.optimizer_offload import STATES, UPDATE, OffloadSettings
from megatron.core.offload.copy_engine import CopyEngine
from megatron.core.offload.host_pool import HostPool
from megatron.core.streams.streams import Streams
from megatron.core.timeline import Timeline
from tests import pool
from tests.gpu.cuda import CUDA, NEEDS_CUDA
from tests.unit.models.builds import LLAMA, accumulate, make_data_parallel, make_ids, make_model, make_optimizer

pytestmark = NEEDS_CUDA

BF16 = {**LLAMA, "bf16": True}
CHUNK = 4096
FAR = {
    "half, overlapped": OffloadSettings(mode=UPDATE, fraction=0.5, overlap=True, chunk_size=CHUNK),
    "all, overlapped": OffloadSettings(mode=UPDATE, fraction=1.0, overlap=True, chunk_size=CHUNK),
    "all": OffloadSettings(mode=UPDATE, fraction=1.0, chunk_size=CHUNK),
}
WAITING = OffloadSettings(mode=STATES, fraction=1.0, chunk_size=CHUNK)


def made(fields, offload):
    groups = pool.groups()
    model = make_model(fields, groups, device=CUDA)
    data_parallel = make_data_parallel(model, groups, late_updates=offload.overlap, overlap_reduce=True)
    return model, data_parallel, make_optimizer(data_parallel, groups, offload=offload, clip_grad=0.5)


def trained(fields, offload, steps=20):
    """All parameters after some steps."""
    model, data_parallel, optimizer = made(fields, offload)
    for step in range(steps):
        accumulate(model, data_parallel, [ids.to(CUDA) for ids in make_ids(4, 16, seed=step % 3).chunk(2)])
        assert optimizer.step(1e-3, 0.1, decoupled_lr=5e-4).applied
    data_parallel.synchronize()
    return torch.cat([parameter.detach().flatten().float() for parameter in model.parameters()])


@pytest.mark.parametrize("name", FAR)
@pytest.mark.parametrize("fields", [LLAMA, BF16], ids=["fp32", "bf16"])
def test_the_cpu_updates_as_the_device_does(name, fields):
    """Two kernels: fused multiply-adds round elsewhere, and adam makes steps of noise. A race would not be close."""
    expected, found = trained(fields, OffloadSettings()), trained(fields, FAR[name])
    assert ((found - expected).norm() / expected.norm()) < (1e-2 if fields is BF16 else 1e-4)


@pytest.mark.parametrize("name", FAR)
def test_overlap_changes_no_bit(name):
    """Twice the same run: what depended on the order of streams would differ."""
    assert trained(BF16, FAR[name]).equal(trained(BF16, FAR[name]))
    assert trained(BF16, FAR["all"]).equal(trained(BF16, FAR["all, overlapped"]))


@pytest.mark.parametrize("fields", [LLAMA, BF16], ids=["fp32", "bf16"])
def test_states_that_wait_change_no_bit(fields):
    assert trained(fields, WAITING).equal(trained(fields, OffloadSettings()))


def test_host_memory_is_pinned_for_every_dtype():
    """A conversion of a pinned tensor is not pinned: then no copy runs beside compute, and nobody notices."""
    low = {"use_precision_aware_optimizer": True, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}
    for options in ({}, low):
        for fields in (LLAMA, BF16):
            groups = pool.groups()
            data_parallel = make_data_parallel(make_model(fields, groups, device=CUDA), groups, late_updates=True)
            optimizer = make_optimizer(data_parallel, groups, offload=FAR["all, overlapped"], **options)
            cpu = optimizer.cpu
            states = [tensor for chunk in cpu.chunks for tensor in chunk.state.values()]
            buffers = [tensor for _, tensor in (*cpu._gradients.values(), *cpu._buffers.values())]
            assert states and buffers and all(tensor.is_pinned() for tensor in states + buffers)


def test_all_far_leaves_nothing_on_the_device():
    _, _, optimizer = made(BF16, FAR["all"])
    assert optimizer.device_bytes == 0 and optimizer.host_bytes > 0


def test_copies_wait_for_what_they_are_told():
    """A late writer, and a reader of what was copied back: events, not luck."""
    streams, size = Streams(CUDA, Timeline(CUDA)), 1 << 24
    engine = CopyEngine(streams)
    block, tensors = HostPool(pinned=True).take_tensors({"host": (size, torch.float32)})
    first, second = torch.zeros(size, device=CUDA), torch.zeros(size, device=CUDA)
    torch.cuda._sleep(50_000_000)
    first.fill_(3.0)
    offloaded = engine.to_host("test", [(first, tensors["host"])], block, [streams.mark()])
    reloaded = engine.to_device("test", [(tensors["host"], second)], block, [])
    reloaded.wait()
    assert float(second.sum()) == 3.0 * size
    offloaded.synchronize()
    assert tensors["host"].eq(3.0).all()
