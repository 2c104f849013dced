"""What a CUDA stream queues and for how long it holds tensors, with stand-ins for the device's streams and events.

tests/gpu/test_streams.py runs it on a device.
"""

import contextlib
import weakref

import pytest
import torch

from megatron.core.streams.cuda import CudaStream, CudaWork
from megatron.core.timeline import Timeline

DEVICE = torch.device("cuda", 0)


class Event:
    def __init__(self, name, log):
        self.name, self.passed, self._log = name, False, log

    def query(self):
        return self.passed

    def synchronize(self):
        self._log.append(f"host waits for {self.name}")
        self.passed = True


class DeviceStream:
    """Logs what is queued on it."""

    def __init__(self, name, log):
        self.name, self.device, self.events, self._log = name, DEVICE, [], log

    def wait_stream(self, other):
        self._log.append(f"{self.name} waits for stream {other.name}")

    def wait_event(self, event):
        self._log.append(f"{self.name} waits for {event.name}")

    def record_event(self):
        self.events.append(Event(f"{self.name}{len(self.events)}", self._log))
        self._log.append(f"{self.name} records {self.events[-1].name}")
        return self.events[-1]


class Transfer:
    """A work of the transport, which orders the current stream behind itself."""

    def __init__(self, device):
        self._device = device

    def wait(self):
        self._device.log.append(f"{self._device.current.name} waits for the transfer")


class Device:
    """The streams of a device: compute, side, and those that are made."""

    def __init__(self):
        self.log = []
        self.compute, self.side = DeviceStream("compute", self.log), DeviceStream("side", self.log)
        self.current, self.made = self.compute, []

    def make(self, device, priority):
        self.made.append(DeviceStream("comm", self.log))
        return self.made[-1]

    @contextlib.contextmanager
    def on(self, stream):
        before, self.current = self.current, stream
        yield
        self.current = before


@pytest.fixture
def device(monkeypatch):
    device = Device()
    monkeypatch.setattr(torch.cuda, "Stream", device.make)
    monkeypatch.setattr(torch.cuda, "stream", device.on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: device.current)
    return device


def make_stream(timeline=None, wait_row=None):
    timeline = timeline or Timeline(torch.device("cpu"))
    return CudaStream("reload", DEVICE, timeline, wait_row=wait_row, high_priority=False)


def test_operations_are_queued_behind_the_current_stream(device):
    def operation():
        device.log.append(f"posted on {device.current.name}")
        yield [Transfer(device)]
        device.log.append(f"summed on {device.current.name}")

    work = make_stream().submit(operation(), "")
    queued = ["posted on comm", "comm waits for the transfer", "summed on comm"]
    assert device.log == ["comm waits for stream compute", *queued, "comm records comm0"]
    device.log.clear()
    work.wait()
    assert device.log == ["compute waits for comm0"] and not work.is_completed()
    work.synchronize()
    assert device.log[1:] == ["host waits for comm0"] and work.is_completed()


def test_operations_behind_works_wait_for_these_alone(device):
    stream = make_stream()
    first = stream.run(lambda: device.log.append("first"), "")
    device.log.clear()
    stream.run(lambda: device.log.append("second"), "", after=[first])
    assert device.log == ["comm waits for comm0", "second", "comm records comm1"]


def freed(tensor):
    """A list that is not empty once the tensor is freed."""
    gone = []
    weakref.finalize(tensor, gone.append, True)
    return gone


def test_tensors_are_held_until_the_submitting_stream_is_behind(device):
    stream, tensor = make_stream(), torch.ones(2)
    gone = freed(tensor)
    work = stream.run(lambda: None, "", keep=[tensor])
    del tensor
    with device.on(device.side):
        work.wait()
    assert not gone, "compute may be given the memory while the copy reads it"
    work.wait()
    assert gone


def test_tensors_of_work_that_nothing_waits_for_are_held_until_it_is_over(device):
    stream, tensor = make_stream(), torch.ones(2)
    gone = freed(tensor)
    stream.run(lambda: None, "", keep=[tensor])
    del tensor
    stream.run(lambda: None, "", keep=[torch.ones(1)])
    assert not gone
    device.made[0].events[0].passed = True
    stream.run(lambda: None, "", keep=[torch.ones(1)])
    assert gone


def test_an_error_is_raised_where_the_operation_is_queued(device):
    with pytest.raises(KeyError):
        make_stream().run(lambda: {}["missing"], "")


def test_only_waits_of_the_submitting_stream_are_drawn(device):
    timeline = Timeline(torch.device("cpu"))
    stream = make_stream(timeline, wait_row="wait offload")
    timeline.start()
    work = stream.run(lambda: None, "layer 1")
    with device.on(device.side):
        work.wait()
    work.wait()
    found = [(span.row, span.name) for span in timeline.stop()]
    assert sorted(found) == [("reload", "layer 1"), ("wait offload", "layer 1")]


def test_following_a_transfer_queues_nothing_unless_recording(device):
    timeline = Timeline(torch.device("cpu"))
    stream, transfer = make_stream(timeline), Transfer(device)
    assert stream.follow(transfer, stream.begin("keys")) is transfer and device.log == []
    timeline.start()
    assert stream.follow(transfer, stream.begin("keys")) is transfer
    assert device.log == ["comm waits for stream compute", "comm waits for the transfer"]
    assert [(span.row, span.name) for span in timeline.stop()] == [("reload", "keys")]


def test_a_mark_orders_another_stream(device):
    mark = CudaWork(device.compute.record_event(), device.compute, (), lambda: None)
    make_stream().run(lambda: None, "", after=[mark])
    assert device.log == ["compute records compute0", "comm waits for compute0", "comm records comm0"]
