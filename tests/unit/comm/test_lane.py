"""A lane carries jobs through in order, a few at a time, and hands errors to whoever waits."""

import threading
import time

import pytest

from megatron.core.comm.lane import Lane

SECONDS = 10.0


class Work:
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


class Wire:
    """What jobs do, in order; jobs are numbered, and each message of a job has a work that the test lets arrive."""

    def __init__(self):
        self.log = []
        self.works = {}

    def job(self, number, steps=1, fails_at=None):
        for step in range(steps):
            if fails_at == step:
                raise ValueError(f"job {number} fails")
            self.log.append((number, step))
            work = self.works.setdefault((number, step), Work())
            yield [work]
        if fails_at == steps:
            raise ValueError(f"job {number} fails")
        self.log.append((number, "done"))

    def let(self, number, step=0, error=None):
        self.works.setdefault((number, step), Work()).arrive(error)


def wait(job):
    """As job.wait, but a job that is never done fails the test instead of hanging it."""
    assert job._done.wait(SECONDS), "a job was never done"
    job.wait()


def test_jobs_are_done_in_the_order_of_submission():
    wire, lane = Wire(), Lane("test", in_flight=3)
    jobs = [lane.submit(wire.job(n)) for n in range(6)]
    assert wire.log == [(0, 0), (1, 0), (2, 0)], "only so many messages are posted"
    assert not any(job.is_completed() for job in jobs)
    for n in reversed(range(6)):
        wire.let(n)
    for job in reversed(jobs):
        wait(job)
    assert [entry for entry in wire.log if entry[1] == "done"] == [(n, "done") for n in range(6)]
    assert [entry for entry in wire.log if entry[1] == 0] == [(n, 0) for n in range(6)]
    assert all(job.is_completed() for job in jobs)


def test_a_job_that_is_done_makes_room_for_the_next():
    wire, lane = Wire(), Lane("test", in_flight=2)
    jobs = [lane.submit(wire.job(n)) for n in range(3)]
    assert (2, 0) not in wire.log
    wire.let(0)
    wait(jobs[0])
    wire.let(1)
    wire.let(2)
    wait(jobs[2])
    assert wire.log.index((0, "done")) < wire.log.index((2, 0))


def test_later_messages_of_a_job_go_out_at_once():
    """And nobody's are lost: two steps of each of several jobs."""
    wire, lane = Wire(), Lane("test", in_flight=2)
    jobs = [lane.submit(wire.job(n, steps=3)) for n in range(4)]
    for n in range(4):
        for step in range(3):
            wire.let(n, step)
    for job in jobs:
        wait(job)
    for n in range(4):
        assert [step for number, step in wire.log if number == n] == [0, 1, 2, "done"]


def test_a_job_without_messages_is_done_at_once():
    lane = Lane("test", in_flight=1)
    done = []

    def silent():
        done.append(True)
        yield from ()

    job = lane.submit(silent())
    assert job.is_completed() and done == [True]
    wait(job)


@pytest.mark.parametrize("fails_at", [0, 1, 2])
def test_an_error_reaches_the_waiter_and_later_jobs_still_answer(fails_at):
    """Raised where the first messages are posted, between messages, or at the end."""
    wire, lane = Wire(), Lane("test", in_flight=1)
    for n in range(3):
        wire.let(n, 0)
        wire.let(n, 1)
    before, broken, after = (lane.submit(wire.job(n, steps=2, fails_at=fails_at if n == 1 else None)) for n in range(3))
    wait(before)
    wait(after)
    for _ in range(2):
        with pytest.raises(ValueError, match="job 1 fails"):
            wait(broken)
    assert broken.is_completed()


def test_a_broken_transport_reaches_the_waiter():
    wire, lane = Wire(), Lane("test", in_flight=2)
    broken, after = lane.submit(wire.job(0)), lane.submit(wire.job(1))
    wire.let(0, error=RuntimeError("connection closed by peer"))
    wire.let(1)
    wait(after)
    with pytest.raises(RuntimeError, match="closed by peer"):
        wait(broken)
    assert (0, "done") not in wire.log


def test_submitters_on_several_threads():
    wire, lane = Wire(), Lane("test", in_flight=2)
    jobs, lock = [], threading.Lock()

    def submit(first):
        for n in range(first, first + 10):
            wire.let(n)
            job = lane.submit(wire.job(n))
            with lock:
                jobs.append(job)

    threads = [threading.Thread(target=submit, args=(100 * t,)) for t in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    for job in jobs:
        wait(job)
    assert len(jobs) == 40 and sum(step == "done" for _, step in wire.log) == 40


def test_a_thread_without_work_ends_and_another_begins(monkeypatch):
    """A lane that nobody uses any more leaves nothing behind."""
    monkeypatch.setattr("megatron.core.comm.lane._IDLE_SECONDS", 0.05)
    wire, lane = Wire(), Lane("short", in_flight=1)
    for number in range(2):
        wire.let(number)
        wait(lane.submit(wire.job(number)))
        deadline = time.monotonic() + SECONDS
        while any(thread.name == "short" for thread in threading.enumerate()):
            assert time.monotonic() < deadline, "the thread goes on"
            time.sleep(0.01)
    assert wire.log == [(0, 0), (0, "done"), (1, 0), (1, "done")]
