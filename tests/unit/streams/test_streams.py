"""The streams of a device."""

import torch

from megatron.core.streams.streams import Streams
from megatron.core.timeline import Timeline

CPU = torch.device("cpu")


def make_streams():
    return Streams(CPU, Timeline(CPU))


def test_what_the_cpu_computed_is_done():
    work = make_streams().mark()
    work.wait()
    work.synchronize()
    assert work.is_completed()


def test_copies_of_two_streams_in_the_order_of_their_works():
    streams = make_streams()
    offload, reload = streams.stream("offload"), streams.stream("reload", wait_row="wait reload")
    device, host, back = torch.arange(4.0), torch.zeros(4), torch.zeros(4)
    saved = offload.run(lambda: host.copy_(device), "out", after=[streams.mark()], keep=[device])
    restored = reload.run(lambda: back.copy_(host), "in", after=[saved])
    restored.wait()
    assert back.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_host_streams_are_not_drawn():
    streams = make_streams()
    streams.timeline.start()
    ran = []
    streams.host_stream("update").run(lambda: ran.append(1), "chunk").synchronize()
    assert ran == [1] and streams.timeline.stop() == []
