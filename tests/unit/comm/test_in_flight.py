"""What the heartbeat holds of a collective on CUDA: nothing but an event, once it has been waited for."""

import threading
import weakref
from types import SimpleNamespace

import pytest
import torch

from megatron.base.heartbeat import Heartbeat
from megatron.core.comm import collectives
from megatron.core.comm.collectives import in_flight
from megatron.core.groups import Group
from tests.unit.base.test_heartbeat import wait_until

pytestmark = pytest.mark.alone
ON_CUDA = SimpleNamespace(is_cuda=True, device=torch.device("cuda", 1))


class NcclWork:
    """Holds its result until it is freed itself, as NCCL's does. It never ends."""

    def __init__(self):
        self.result = torch.zeros(4)
        self.waits = 0

    def wait(self):
        self.waits += 1

    def is_completed(self):
        return False


class Event:
    """An event behind the collective, recorded when it was waited for."""

    def __init__(self):
        self.reached = False

    def is_completed(self):
        return self.reached


@pytest.fixture
def events(monkeypatch):
    """The events that were recorded, with their devices."""
    recorded = []

    def record(device):
        recorded.append((device, Event()))
        return recorded[-1][1]

    monkeypatch.setattr(collectives, "everything_queued", record, raising=False)
    return recorded


@pytest.fixture
def group():
    """Its heartbeat runs, and writes what hangs to `stalls`."""
    heartbeat, stalls = Heartbeat(0, interval=0.01, timeout=0.05), []
    yield SimpleNamespace(of=Group("tp", (0, 1), 0, None, heartbeat), stalls=stalls)
    heartbeat.stop()


def test_a_result_is_freed_with_its_handle_and_a_hang_is_still_reported(group, events):
    work = NcclWork()
    result = weakref.ref(work.result)
    handle = in_flight("all_gather", group.of, ON_CUDA, work)
    del work
    handle.wait()
    assert result() is not None, "the handle holds it"
    del handle
    assert result() is None
    assert [device for device, _ in events] == [ON_CUDA.device]
    group.of.heartbeat.start(on_stall=group.stalls.append)
    wait_until(lambda: group.stalls)
    assert group.stalls[0].startswith("all_gather number 0 on group tp (ranks 0, 1) failed after")


def test_a_hang_before_the_wait_is_reported(group, events):
    handle = in_flight("all_gather", group.of, ON_CUDA, NcclWork())
    group.of.heartbeat.start(on_stall=group.stalls.append)
    wait_until(lambda: group.stalls)
    assert not events and not handle.is_completed()


def test_what_is_over_is_not_reported(group, events):
    beats = threading.Semaphore(0)
    first, second = (in_flight("all_gather", group.of, ON_CUDA, NcclWork()) for _ in range(2))
    for handle in (first, second):
        handle.wait()
    for _, event in events:
        event.reached = True
    group.of.heartbeat._publish = lambda line: beats.release()
    group.of.heartbeat.start(on_stall=group.stalls.append)
    for _ in range(12):  # longer than the timeout
        assert beats.acquire(timeout=5)
    assert group.stalls == []


def test_works_of_the_cpu_stay_as_they_are(group, events):
    work = NcclWork()
    handle = in_flight("all_gather", group.of, torch.zeros(1), work)
    handle.wait()
    assert handle.work is work and work.waits == 1 and not events


def test_a_capture_is_not_followed(group, events, monkeypatch):
    """Nothing runs, and an event of a capture cannot be asked."""
    monkeypatch.setattr(collectives, "is_capturing", lambda: True)
    work = NcclWork()
    in_flight("all_gather", group.of, ON_CUDA, work).wait()
    assert work.waits == 1, "the stream of the capture is put behind it"
    assert not events and not group.of.heartbeat._queued
