"""A thread carries out operations a few at a time, and raises their errors to whoever waits for them."""

import threading
import time
import weakref

import pytest
import torch

from megatron.core.streams.thread import ThreadStream
from megatron.core.timeline import Timeline

CPU = torch.device("cpu")
SECONDS = 10.0


def make_stream(name="test", in_flight=100, timeline=None, wait_row=None):
    return ThreadStream(name, CPU, timeline or Timeline(CPU), wait_row=wait_row, in_flight=in_flight)


class Message:
    """A message in flight; `arrive` lets it arrive, perhaps broken."""

    def __init__(self):
        self._arrived = threading.Event()
        self._error = None

    def arrive(self, error=None):
        self._error = error
        self._arrived.set()
        return self

    def wait(self):
        assert self._arrived.wait(SECONDS), "a message never arrived"
        if self._error:
            raise self._error


class Network:
    """Logs the progress of numbered operations; the test decides when each message of an operation arrives."""

    def __init__(self):
        self.log = []
        self.messages = {}

    def operation(self, number, steps=1, fails_at=None):
        for step in range(steps):
            if fails_at == step:
                raise ValueError(f"operation {number} fails")
            self.log.append((number, step))
            yield [self.messages.setdefault((number, step), Message())]
        if fails_at == steps:
            raise ValueError(f"operation {number} fails")
        self.log.append((number, "done"))

    def let(self, number, step=0, error=None):
        self.messages.setdefault((number, step), Message()).arrive(error)


def wait(work):
    """As work.wait, but work that is never done fails the test instead of hanging it."""
    assert work._done.wait(SECONDS), "an operation was never done"
    work.wait()


class TestOrder:
    def test_operations_are_done_in_the_order_of_submission(self):
        network, stream = Network(), make_stream(in_flight=3)
        works = [stream.submit(network.operation(n), "") for n in range(6)]
        assert network.log == [(0, 0), (1, 0), (2, 0)], "only so many messages are posted"
        assert not any(work.is_completed() for work in works)
        for n in reversed(range(6)):
            network.let(n)
        for work in reversed(works):
            wait(work)
        assert [entry for entry in network.log if entry[1] == "done"] == [(n, "done") for n in range(6)]
        assert [entry for entry in network.log if entry[1] == 0] == [(n, 0) for n in range(6)]
        assert all(work.is_completed() for work in works)

    def test_an_operation_that_is_done_makes_room_for_the_next(self):
        network, stream = Network(), make_stream(in_flight=2)
        works = [stream.submit(network.operation(n), "") for n in range(3)]
        assert (2, 0) not in network.log
        network.let(0)
        wait(works[0])
        network.let(1)
        network.let(2)
        wait(works[2])
        assert network.log.index((0, "done")) < network.log.index((2, 0))

    def test_later_messages_of_an_operation_are_sent_at_once(self):
        """And none is lost: several steps of each of several operations."""
        network, stream = Network(), make_stream(in_flight=2)
        works = [stream.submit(network.operation(n, steps=3), "") for n in range(4)]
        for n in range(4):
            for step in range(3):
                network.let(n, step)
        for work in works:
            wait(work)
        for n in range(4):
            assert [step for number, step in network.log if number == n] == [0, 1, 2, "done"]

    def test_an_operation_without_messages_is_done_at_once(self):
        work = make_stream().submit(Network().operation(0, steps=0), "")
        assert work.is_completed()

    def test_an_operation_waits_for_the_works_that_it_is_put_behind(self):
        network, first, second = Network(), make_stream(), make_stream()
        before = first.submit(network.operation(0), "")
        behind = second.submit(network.operation(1), "", after=[before])
        assert network.log == [(0, 0)]
        network.let(0)
        network.let(1)
        wait(behind)
        assert network.log == [(0, 0), (0, "done"), (1, 0), (1, "done")]

    def test_functions_run_on_the_thread_behind_what_they_wait_for(self):
        network, stream, ran = Network(), make_stream("copies"), []
        before = make_stream().submit(network.operation(0), "")
        works = [
            stream.run(lambda: ran.append((1, threading.current_thread().name)), "", after=[before]),
            stream.run(lambda: ran.append((2, threading.current_thread().name)), ""),
        ]
        assert not ran
        network.let(0)
        for work in works:
            wait(work)
        assert ran == [(1, "copies"), (2, "copies")]

    def test_submitters_on_several_threads(self):
        network, stream = Network(), make_stream(in_flight=2)
        works, lock = [], threading.Lock()

        def submit(first):
            for n in range(first, first + 10):
                network.let(n)
                work = stream.submit(network.operation(n), "")
                with lock:
                    works.append(work)

        threads = [threading.Thread(target=submit, args=(100 * t,)) for t in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SECONDS)
        for work in works:
            wait(work)
        assert len(works) == 40 and sum(step == "done" for _, step in network.log) == 40


class TestErrors:
    @pytest.mark.parametrize("fails_at", [0, 1, 2])
    def test_an_error_reaches_the_waiter_and_later_operations_still_answer(self, fails_at):
        """Raised where the first messages are posted, between messages, or at the end."""
        network, stream = Network(), make_stream(in_flight=1)
        for n in range(3):
            network.let(n, 0)
            network.let(n, 1)
        before, broken, after = (
            stream.submit(network.operation(n, steps=2, fails_at=fails_at if n == 1 else None), "") for n in range(3)
        )
        wait(before)
        wait(after)
        for _ in range(2):
            with pytest.raises(ValueError, match="operation 1 fails"):
                wait(broken)
        assert broken.is_completed()

    def test_a_broken_transport_reaches_the_waiter(self):
        network, stream = Network(), make_stream(in_flight=2)
        broken, after = stream.submit(network.operation(0), ""), stream.submit(network.operation(1), "")
        network.let(0, error=RuntimeError("connection closed by peer"))
        network.let(1)
        wait(after)
        with pytest.raises(RuntimeError, match="closed by peer"):
            wait(broken)
        assert (0, "done") not in network.log

    def test_an_operation_behind_a_broken_one_fails_as_well(self):
        network, stream, ran = Network(), make_stream(), []
        broken = stream.submit(network.operation(0, fails_at=0), "")
        behind = stream.run(lambda: ran.append(1), "", after=[broken])
        with pytest.raises(ValueError, match="operation 0 fails"):
            wait(behind)
        with pytest.raises(ValueError, match="operation 0 fails"):
            behind.synchronize()
        assert not ran


class TestTimeline:
    def test_spans_of_operations_begin_behind_what_they_wait_for(self):
        network, timeline = Network(), Timeline(CPU)
        stream = make_stream("offload", timeline=timeline)
        timeline.start()
        first = stream.submit(network.operation(0), "layer 0", row="reload")
        second = stream.run(lambda: None, "layer 1", after=[first])
        time.sleep(0.02)
        network.let(0)
        wait(second)
        reload, offload = timeline.stop()
        assert (reload.row, reload.name, offload.row, offload.name) == ("reload", "layer 0", "offload", "layer 1")
        assert reload.stop - reload.start >= 0.02 and reload.stop <= offload.start

    def test_waits_are_drawn_where_they_block(self):
        """Neither those of operations for each other, nor those of the host."""
        network, timeline = Network(), Timeline(CPU)
        stream = make_stream("offload", timeline=timeline, wait_row="wait offload")
        timeline.start()
        done, pending = (stream.submit(network.operation(n), f"layer {n}") for n in range(2))
        behind = stream.run(lambda: None, "behind", after=[pending])
        network.let(0)
        assert done._done.wait(SECONDS)
        done.wait()
        timer = threading.Timer(0.02, network.let, [1])
        timer.start()
        pending.wait()
        behind.synchronize()
        waits = [span for span in timeline.stop() if span.row == "wait offload"]
        assert [span.name for span in waits] == ["layer 1"]
        assert waits[0].stop - waits[0].start >= 0.015

    def test_the_stream_ends_the_span_of_a_transfer_that_has_a_work_of_its_own(self):
        timeline, message = Timeline(CPU), Message()
        stream = make_stream("cp", timeline=timeline)
        assert stream.follow(message, stream.begin("unseen")) is message, "nothing to do unless recording"
        timeline.start()
        work = stream.follow(message, stream.begin("keys"))
        message.arrive()
        wait(work)
        assert [(span.row, span.name) for span in timeline.stop()] == [("cp", "keys")]


def test_tensors_are_kept_until_the_operation_is_over():
    network, stream = Network(), make_stream()
    tensor = torch.ones(2)
    freed = threading.Event()
    weakref.finalize(tensor, freed.set)
    work = stream.submit(network.operation(0), "", keep=[tensor])
    del tensor
    assert not freed.is_set()
    network.let(0)
    wait(work)
    assert freed.wait(SECONDS)


def test_a_thread_without_work_ends_and_another_begins(monkeypatch):
    """A stream that is used no more leaves nothing behind."""
    monkeypatch.setattr("megatron.core.streams.thread._IDLE_SECONDS", 0.05)
    network, stream = Network(), make_stream("short", in_flight=1)
    for number in range(2):
        network.let(number)
        wait(stream.submit(network.operation(number), ""))
        deadline = time.monotonic() + SECONDS
        while any(thread.name == "short" for thread in threading.enumerate()):
            assert time.monotonic() < deadline, "the thread goes on"
            time.sleep(0.01)
    assert network.log == [(0, 0), (0, "done"), (1, 0), (1, "done")]
