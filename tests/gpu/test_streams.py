"""Streams of a device: copies wait for slow kernels, compute waits for copies, and memory is held until then."""

import functools

import pytest
import torch

from megatron.core.streams.streams import Streams
from megatron.core.timeline import Timeline
from tests.gpu.cuda import CUDA, NEEDS_CUDA

pytestmark = NEEDS_CUDA
CYCLES = 50_000_000  # some hundredths of a second
N = 1 << 20


@pytest.fixture
def streams():
    return Streams(CUDA, Timeline(CUDA))


def test_a_copy_out_and_back_behind_slow_kernels(streams):
    out, back = streams.stream("offload"), streams.stream("reload")
    host = torch.empty(N, pin_memory=True)
    device = torch.zeros(N, device=CUDA)
    torch.cuda._sleep(CYCLES)
    device.fill_(3.0)
    saved = out.run(functools.partial(host.copy_, device, non_blocking=True), "out", keep=[device, host])
    assert not saved.is_completed(), "the host does not wait"
    del device
    torch.zeros(N, device=CUDA)  # would be given the memory of `device`, were it free
    restored = torch.empty(N, device=CUDA)
    loaded = back.run(lambda: restored.copy_(host, non_blocking=True), "in", after=[streams.mark(), saved])
    loaded.wait()
    total = restored.sum()
    saved.synchronize()
    assert host.eq(3.0).all() and float(total) == 3.0 * N


def test_the_host_carries_out_work_behind_a_copy(streams):
    out, update = streams.stream("offload"), streams.host_stream("update")
    host, device = torch.empty(N, pin_memory=True), torch.zeros(N, device=CUDA)
    torch.cuda._sleep(CYCLES)
    device.fill_(2.0)
    copied = out.run(lambda: host.copy_(device, non_blocking=True), "gradient", keep=[device, host])

    def step():
        copied.synchronize()
        host.mul_(2.0)
        assert torch.cuda.current_device() == device.get_device()

    update.run(step, "step", after=()).synchronize()
    assert host.eq(4.0).all()


def test_spans_show_when_the_device_worked(streams):
    out = streams.stream("offload", wait_row="wait offload")
    host, device = torch.empty(N, pin_memory=True), torch.ones(N, device=CUDA)
    streams.timeline.start()
    with streams.timeline.span("compute", "slow"):
        torch.cuda._sleep(CYCLES)
    out.run(lambda: host.copy_(device, non_blocking=True), "layer 0", keep=[device, host]).wait()
    spans = {span.row: span for span in streams.timeline.stop()}
    assert set(spans) == {"compute", "offload", "wait offload"}
    assert spans["offload"].start >= spans["compute"].stop
    assert spans["wait offload"].stop >= spans["offload"].stop
