import threading

import pytest

from megatron.base.hang import HangWatch, Stall, late_ranks, report_of
from megatron.base.heartbeat import Beat, Call, Heartbeat, Notice

pytestmark = pytest.mark.alone
CALL = Call("all_reduce", "dp", (4,), "float32", 16)


def beat(rank, time=104.0, **changes):
    fields = {"host": f"node{rank}", "pid": 7, "phase": "forward", "collective": "", "group": "", "sequences": {}}
    return Beat(**{"rank": rank, **fields, "since": 100.0, "time": time, **changes})


def waiting(rank, **changes):
    return beat(rank, collective="all_reduce", group="dp", **changes)


def late(*beats, silent=()):
    after = {one.rank: one for one in beats}
    before = {rank: one if rank in silent else beat(rank, time=101.0) for rank, one in after.items()}
    return late_ranks(before, after)


class TestLateRanks:
    def test_one_that_computes_while_others_wait(self):
        assert late(waiting(0), beat(1), waiting(2)) == {1: "computing for 4 s"}

    def test_a_silent_one_is_late_wherever_it_was(self):
        assert late(waiting(0), waiting(1), silent=[1]) == {1: "it is silent: its process is frozen or gone"}

    def test_one_that_ended_says_why(self):
        assert late(waiting(0), waiting(1, error="no memory"), silent=[1]) == {1: "it ended: no memory"}

    def test_one_that_writes_inside_a_collective_step(self):
        assert late(waiting(0), waiting(1, work="writing its files")) == {1: "writing its files for 4 s"}

    def test_one_that_waits_for_its_device_is_not_late(self):
        assert late(beat(0, phase="read-step"), beat(1)) == {1: "computing for 4 s"}

    def test_nobody_if_all_wait(self):
        assert late(waiting(0), waiting(1), beat(2, phase="read-step")) == {}

    def test_one_that_never_reported(self):
        assert late_ranks({0: None}, {0: None}) == {0: "it never reported"}


class TestReport:
    def test_lines(self):
        beats = {0: waiting(0, last="all_reduce number 3 on group dp"), 1: beat(1, queued="x number 2 on group tp")}
        text = report_of(
            Stall("forward", 12.3, 0.2), beats, {1: "computing for 4 s"}, {1: "a.py:1 f\nb.py:2 g", 0: None}
        )
        assert text.splitlines() == [
            "no progress for 12 s in phase 'forward', where the longest recent stay took 0.2 s; rank 1 on node1: "
            "computing for 4 s",
            "  rank 1: node1, pid 7, phase 'forward', computing for 4 s, unfinished on the device: x number 2 on group tp",
            "  rank 0: node0, pid 7, phase 'forward', in all_reduce on group dp for 4 s, last collective all_reduce number "
            "3 on group dp",
            "  Python stack of rank 1:",
            "    a.py:1 f",
            "    b.py:2 g",
            "  Python stack of rank 0: no answer",
        ]

    def test_many_ranks_are_counted(self):
        lines = report_of(
            Stall("forward", 12.0, None), {rank: waiting(rank) for rank in range(40)}, {}, {}
        ).splitlines()
        assert lines[0].endswith("every rank waits in a collective or for its device")
        assert len(lines) == 18 and lines[-1] == "  and 24 more ranks"


class Job:
    """Ranks of one job with their watches, whose threads run until the end of a test."""

    def __init__(self, ranks, silent_store=False, **watch):
        self.notice, self.lines, self.said, self.ended = Notice(), {}, [], []
        self.answers, self.silent = threading.Event(), silent_store
        if silent_store:
            self.notice.read = self.notice.claim = lambda *words, **topic: self.answers.wait(60)
        self.heartbeats = [self._heartbeat(rank) for rank in range(ranks)]
        for heartbeat in self.heartbeats:
            HangWatch(heartbeat, ranks, say=self.said.append, **watch)

    def _heartbeat(self, rank):
        def publish(line):
            self.lines[rank] = line

        heartbeat = Heartbeat(rank, publish=publish, read=self.lines.get, notice=self.notice, interval=0.05)
        heartbeat.times.warmup, heartbeat.times.floor = 0, 0.3
        return heartbeat

    def hang(self, late):
        """All ranks are in a step, and all but `late` in a collective."""
        for heartbeat in self.heartbeats:
            heartbeat.times.change("optimizer")
            heartbeat.times.change("train")
            heartbeat.times.change("optimizer")
            if heartbeat.rank != late:
                heartbeat.enter("all_reduce", "dp", CALL)
            heartbeat.start()

    def wait(self, condition):
        for _ in range(400):
            if condition():
                return
            threading.Event().wait(0.02)
        raise AssertionError(f"within 8 s: {self.said}, {self.ended}")

    def stop(self):
        self.answers.set()
        for heartbeat in self.heartbeats:
            heartbeat.stop()


@pytest.fixture
def job():
    jobs = []

    def make(*arguments, **keywords):
        jobs.append(Job(*arguments, **keywords))
        return jobs[-1]

    yield make
    for one in jobs:
        one.stop()


class TestWatch:
    def test_one_rank_reports_for_all(self, job):
        three = job(3)
        three.hang(late=1)
        three.wait(lambda: three.said)
        threading.Event().wait(0.5)
        (text,) = three.said  # not one of every rank, and not one per heartbeat
        assert "; rank 1 on " in text.splitlines()[0] and "Python stack of rank 1:" in text
        assert "test_one_rank_reports_for_all" in text  # where the main thread of this process is

    def test_stacks_and_the_device_record_are_written(self, job, tmp_path):
        two = job(2, device_record=lambda: b"record")
        for heartbeat in two.heartbeats:
            heartbeat.write_to(tmp_path)
        two.hang(late=0)
        two.wait(lambda: (tmp_path / "stacks_00001.txt").exists() and (tmp_path / "flight_record_1").exists())
        two.wait(lambda: "MainThread" in (tmp_path / "stacks_00001.txt").read_text())

    def test_progress_is_reported_and_a_new_hang_as_well(self, job):
        one = job(1)
        one.hang(late=0)
        one.wait(lambda: len(one.said) == 1)
        one.heartbeats[0].times.change("train")
        one.wait(lambda: len(one.said) == 2)
        assert one.said[1].startswith("rank 0 goes on after")
        one.heartbeats[0].times.change("optimizer")
        one.wait(lambda: len(one.said) == 3)
        assert one.said[2].startswith("no progress")

    def test_every_rank_ends_behind_the_report(self, job):
        ended = []
        two = job(2, end=lambda reason: ended.append((reason, len(two.said))))
        two.hang(late=0)
        two.wait(lambda: len(ended) >= 2)
        assert all(reason.startswith("no progress") and reports == 1 for reason, reports in ended)

    def test_nobody_ends_at_the_limit_of_the_report(self, job):
        ended = []
        two = job(2, end=ended.append)
        for heartbeat in two.heartbeats:
            heartbeat.times.floor = 1.0
        two.hang(late=0)
        two.wait(lambda: two.said)
        assert ended == []
        two.wait(lambda: ended)

    def test_a_phase_without_a_limit_is_left_alone(self, job):
        one = job(1)
        one.heartbeats[0].times.warmup = 5
        one.hang(late=0)
        threading.Event().wait(0.8)
        assert one.said == []

    def test_a_collective_is_reported_at_half_of_its_timeout(self, job):
        two = job(2)
        for heartbeat in two.heartbeats:
            heartbeat.times.warmup, heartbeat.timeout = 5, 0.6
        two.hang(late=1)
        two.wait(lambda: two.said)
        assert "; rank 1 on " in two.said[0].splitlines()[0]

    def test_a_silent_store(self, job):
        two = job(2, silent_store=True)
        two.hang(late=1)
        two.wait(lambda: len(two.said) == 2)
        assert all("the job's store does not answer" in text for text in two.said)
