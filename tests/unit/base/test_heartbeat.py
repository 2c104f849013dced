import json
import os
import subprocess
import sys
import threading
import time
import weakref

import pytest

from megatron.base.heartbeat import Beat, Call, Heartbeat, missing_ranks

pytestmark = pytest.mark.alone
CALL = Call("all_reduce", "dp", (4,), "float32", 16)


class Store:
    """What torch's key-value store is to a heartbeat: the last line of every rank."""

    def __init__(self):
        self.lines = {}

    def heartbeat(self, rank, **kwargs):
        def publish(line):
            self.lines[rank] = line

        return Heartbeat(rank, publish=publish, read=self.lines.get, interval=0.06, **kwargs)


@pytest.fixture
def store():
    return Store()


@pytest.fixture
def start():
    """Start heartbeats; all are stopped at the end of the test."""
    running = []

    def start_all(*heartbeats, **kwargs):
        for heartbeat in heartbeats:
            heartbeat.start(**kwargs)
            running.append(heartbeat)

    yield start_all
    for heartbeat in running:
        heartbeat.stop()


def wait_until(condition):
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true within 5 s"
        time.sleep(0.002)


def beat(rank=1, **changes):
    fields = {"host": "node1", "pid": 7, "phase": "forward", "collective": "", "group": "", "sequences": {}}
    return Beat(**{"rank": rank, **fields, "since": 100.0, "time": 104.0, **changes})


class TestState:
    def test_json_round_trip(self):
        one = beat(sequences={"dp": 3})
        assert Beat.from_json(one.to_json()) == one and "\n" not in one.to_json()

    def test_phases_nest(self):
        heartbeat = Heartbeat(0)
        with heartbeat.phase("train"):
            with heartbeat.phase("save-checkpoint"):
                assert heartbeat.state().phase == "save-checkpoint"
            assert heartbeat.state().phase == "train"
        assert heartbeat.state().phase == "start"

    def test_a_phase_that_raised_stays(self):
        heartbeat = Heartbeat(0)
        with pytest.raises(ZeroDivisionError), heartbeat.phase("train"), heartbeat.phase("save-checkpoint"):
            raise ZeroDivisionError
        assert heartbeat.state().phase == "save-checkpoint"

    def test_collectives_are_counted_by_group(self):
        heartbeat = Heartbeat(0)
        assert [heartbeat.enter("all_reduce", group, CALL) for group in ("dp", "dp", "tp")] == [1, 2, 1]
        state = heartbeat.state()
        assert (state.collective, state.group, state.sequences) == ("all_reduce", "tp", {"dp": 2, "tp": 1})
        heartbeat.leave()
        assert heartbeat.state().collective == ""

    def test_waiting_for_an_old_collective_does_not_count(self):
        heartbeat = Heartbeat(0)
        heartbeat.enter("all_reduce", "dp", CALL)
        heartbeat.leave()
        heartbeat.wait_in("all_reduce", "dp")
        assert (heartbeat.state().collective, heartbeat.state().sequences) == ("all_reduce", {"dp": 1})


class TestRecord:
    def test_nested_recorders_see_their_own_part(self):
        heartbeat = Heartbeat(0)
        with heartbeat.record() as outer:
            with heartbeat.record() as inner:
                heartbeat.enter("all_reduce", "dp", CALL)
            heartbeat.enter("all_reduce", "dp", CALL)
        heartbeat.enter("all_reduce", "dp", CALL)
        assert (inner, outer) == ([CALL], [CALL, CALL])

    def test_equal_recorders_are_told_apart(self):
        heartbeat = Heartbeat(0)
        with heartbeat.record() as outer:
            with heartbeat.record():
                pass
            heartbeat.enter("all_reduce", "dp", CALL)
        assert outer == [CALL]


class TestPublishing:
    def test_file_and_store_get_the_state(self, tmp_path, store, start):
        heartbeat = store.heartbeat(3)
        start(heartbeat)
        heartbeat.write_to(tmp_path / "heartbeat")
        with heartbeat.phase("forward-backward"):
            file = tmp_path / "heartbeat" / "rank_00003.json"
            wait_until(lambda: json.loads(file.read_text())["phase"] == "forward-backward")
            wait_until(lambda: Beat.from_json(store.lines[3]).phase == "forward-backward")
        assert [path.name for path in file.parent.iterdir() if path.suffix == ".json"] == ["rank_00003.json"]

    def test_the_last_state_stays(self, tmp_path):
        heartbeat = Heartbeat(0, interval=0.01)
        heartbeat.start()
        heartbeat.write_to(tmp_path)
        heartbeat.enter("all_reduce", "dp", CALL)
        heartbeat.stop()
        assert json.loads((tmp_path / "rank_00000.json").read_text())["collective"] == "all_reduce"

    def test_a_disk_that_fails_does_not_make_the_rank_look_dead(self, tmp_path, store, start):
        heartbeat = store.heartbeat(0)
        start(heartbeat)
        heartbeat.write_to(tmp_path / "heartbeat")
        for file in (tmp_path / "heartbeat").iterdir():
            file.unlink(missing_ok=True)
        wait_until(lambda: _removed(tmp_path / "heartbeat"))
        first = store.lines[0]
        wait_until(lambda: store.lines[0] != first)

    def test_two_threads_that_beat_do_not_take_each_others_file(self, tmp_path):
        heartbeat = Heartbeat(0)
        heartbeat.write_to(tmp_path)
        failed = []

        def beat_often():
            try:
                for _ in range(500):
                    heartbeat.beat()
            except OSError as error:
                failed.append(error)

        threads = [threading.Thread(target=beat_often) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failed

    def test_stop_from_its_own_thread(self, store, start):
        heartbeat = store.heartbeat(0, timeout=0.01)
        stopped = threading.Event()

        def on_stall(message):
            heartbeat.stop()
            stopped.set()

        start(heartbeat, on_stall=on_stall)
        heartbeat.track("all_reduce", [0, 1], "dp", lambda: False)
        assert stopped.wait(5)


def _removed(folder):
    """Take the folder away even while the heartbeat writes into it."""
    try:
        for file in folder.iterdir():
            file.unlink(missing_ok=True)
        folder.rmdir()
    except OSError:
        return False
    return True


class TestExplain:
    def test_names_the_rank_that_has_not_arrived(self, store, start):
        here, late, there = (store.heartbeat(rank) for rank in range(3))
        start(here, late, there)
        here.enter("all_reduce", "dp", CALL)
        there.enter("all_reduce", "dp", CALL)
        with late.phase("batch-generator"):
            text = here.explain("all_reduce", "dp", [0, 1, 2], 60.04, "timed out")
        assert text.startswith("all_reduce number 1 on group dp (ranks 0, 1, 2) failed after 60.0 s: rank 1 has not ")
        assert "phase 'batch-generator', computing for 0 s" in text and text.endswith("; timed out")
        assert "rank 2" not in text

    def test_a_rank_that_has_gone_past_is_not_accused(self, store, start):
        here, ahead = store.heartbeat(0), store.heartbeat(1)
        start(here, ahead)
        here.enter("broadcast", "dp", CALL)
        ahead.enter("broadcast", "dp", CALL)
        ahead.leave()
        ahead.enter("all_reduce", "tp", CALL)
        text = here.explain("broadcast", "dp", [0, 1], 1.0, "connection closed")
        assert "every rank of it has arrived; connection closed" in text

    def test_names_the_rank_that_died(self, store, start):
        here, dead = store.heartbeat(0), store.heartbeat(1)
        dead.enter("all_reduce", "dp", CALL)
        dead.beat()  # and never again
        start(here)
        here.enter("all_reduce", "dp", CALL)
        assert "rank 1 is gone or frozen" in here.explain("all_reduce", "dp", [0, 1], 1.0, "reset")

    def test_a_rank_that_said_why_it_ended_is_quoted_at_once(self, store, start):
        here, failed = store.heartbeat(0), store.heartbeat(1)
        start(here, failed)
        failed.fail("the dataset is gone")
        here.enter("all_reduce", "dp", CALL)
        started = time.monotonic()
        text = here.explain("all_reduce", "dp", [0, 1], 1.0, "reset")
        assert text.endswith("failed after 1.0 s: rank 1 ended: the dataset is gone; reset")
        assert time.monotonic() - started < here.interval

    def test_names_the_rank_that_never_came(self, store):
        assert "rank 1 never reported" in store.heartbeat(0).explain("all_reduce", "dp", [0, 1], 1.0, "x")

    def test_what_the_library_says_is_cut_to_the_point(self):
        cause = (
            "[/src/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:2. This is typically caused by a crash. Hm"
        )
        text = Heartbeat(0).explain("all_reduce", "dp", [0], 1.0, cause)
        assert text.endswith("failed after 1.0 s: Connection closed by peer [127.0.0.1]:2")

    def test_large_groups_are_not_listed_in_full(self, store):
        text = store.heartbeat(0).explain("all_reduce", "dp", range(100), 1.0, "x")
        assert "(ranks 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, and 84 more)" in text
        assert "rank 16 never reported; and 83 more; x" in text

    def test_a_store_that_is_gone(self):
        def read(rank):
            raise ConnectionError("closed")

        text = Heartbeat(0, read=read, interval=0.01).explain("all_reduce", "dp", [0, 1], 1.0, "reset")
        assert "failed after 1.0 s: waiting for rank 1, and the job's store does not answer either" in text
        assert text.endswith("; reset")

    def test_a_store_that_is_silent(self):
        """A connection to a host that was cut off may hang for minutes: it is not waited for."""
        silent = threading.Event()
        started = time.monotonic()
        text = Heartbeat(0, read=lambda rank: silent.wait(30), interval=0.01).explain("reduce", "dp", [0, 1], 1.0, "x")
        assert time.monotonic() - started < 5
        silent.set()
        assert "waiting for rank 1, and the job's store does not answer either" in text

    def test_alone_it_gives_the_cause(self):
        text = Heartbeat(0).explain("all_reduce", "dp", [0], 1.0, "x")
        assert text == "all_reduce number 0 on group dp (ranks 0) failed after 1.0 s: x"

    def test_clocks_of_hosts_may_differ(self):
        """Ages are differences on one host's clock: a host an hour behind is not dead."""
        early, late = beat(time=104.0), beat(time=105.0, since=60.0)
        assert missing_ranks({1: early}, {1: late}, "dp", 1) == (
            "rank 1 has not arrived (phase 'forward', computing for 45 s)"
        )
        assert missing_ranks({1: early}, {1: beat(time=105.0, sequences={"dp": 1})}, "dp", 1) == ""
        assert "no heartbeat any more, last in phase 'forward' on node1, pid 7" in (
            missing_ranks({1: early}, {1: early}, "dp", 1)
        )

    def test_several_are_named_in_order(self):
        text = missing_ranks({}, {2: None, 1: beat(collective="all_gather", group="tp")}, "dp", 1)
        assert text == (
            "rank 1 has not arrived (phase 'forward', in all_gather on group tp for 4 s); rank 2 never reported"
        )


class TestQueuedWork:
    def test_work_that_never_ends_is_reported_once_with_its_number(self, store, start):
        heartbeat, other = store.heartbeat(0, timeout=0.05), store.heartbeat(1)
        stalls = []
        start(other)
        start(heartbeat, on_stall=stalls.append)
        other.enter("reduce_scatter", "dp", CALL)
        other.enter("reduce_scatter", "dp", CALL)
        heartbeat.enter("reduce_scatter", "dp", CALL)
        heartbeat.track("reduce_scatter", [0, 1], "dp", lambda: False)
        heartbeat.enter("all_gather", "dp", CALL)  # the host goes on; number 1 is the one that hangs
        heartbeat.track("all_gather", [0, 1], "dp", lambda: True)
        wait_until(lambda: stalls)
        time.sleep(0.05)
        (message,) = stalls
        assert message.startswith("reduce_scatter number 1 on group dp")
        assert "every rank of it has arrived; device work did not finish" in message

    def test_ranks_that_report_at_once_do_not_take_each_other_for_dead(self, store, start):
        stalls = []
        pair = [store.heartbeat(rank, timeout=0.03) for rank in range(2)]
        start(*pair, on_stall=stalls.append)
        for heartbeat in pair:
            heartbeat.enter("all_reduce", "dp", CALL)
            heartbeat.track("all_reduce", [0, 1], "dp", lambda: False)
        wait_until(lambda: len(stalls) == 2)
        assert all("every rank of it has arrived" in message for message in stalls)

    def test_finished_and_failed_work_is_forgotten(self, store, start):
        heartbeat, stalls = store.heartbeat(0, timeout=0.03), []

        def failed():
            raise RuntimeError("device-side assert")

        start(heartbeat, on_stall=stalls.append)
        heartbeat.track("all_reduce", [0, 1], "dp", failed)
        heartbeat.track("all_reduce", [0, 1], "dp", lambda: True)
        before = store.lines[0]
        time.sleep(0.3)
        assert stalls == [] and store.lines[0] != before

    def test_finished_work_behind_unfinished_work_is_forgotten(self, start):
        """A receive that is posted early is pending for long: what was queued after it must not be kept for as long."""
        heartbeat, ended = Heartbeat(0, interval=0.01), threading.Event()
        heartbeat.track("receive", [0, 1], "pp", ended.is_set)
        later = Result()
        heartbeat.track("all_gather", [0, 1], "tp", later.is_completed)
        alive = weakref.ref(later)
        del later
        start(heartbeat)
        wait_until(lambda: alive() is None)
        ended.set()

    def test_a_record_may_be_told_to_ask_something_else(self, store, start):
        """So that a work can be freed before it is over, and is reported nevertheless when it never is."""
        heartbeat, stalls, result = store.heartbeat(0, timeout=0.05), [], Result()
        queued = heartbeat.track("all_gather", [0, 1], "tp", result.is_completed)
        alive = weakref.ref(result)
        queued.done = lambda: False
        del result
        assert alive() is None
        start(heartbeat, on_stall=stalls.append)
        wait_until(lambda: stalls)
        assert "device work did not finish" in stalls[0]

    def test_the_thread_chooses_its_device_before_it_asks(self, start):
        """On CUDA a thread that has none opens a context on device 0, in every rank."""
        calls = []

        def done():
            calls.append(("query", threading.current_thread().name))
            return True

        heartbeat = Heartbeat(0, interval=0.01)
        heartbeat.track("all_reduce", [0, 1], "dp", done)
        start(heartbeat, in_thread=lambda: calls.append(("device", threading.current_thread().name)))
        wait_until(lambda: len(calls) == 2)
        assert calls == [("device", "heartbeat"), ("query", "heartbeat")]


class Result:
    """Stands for a work that holds its result."""

    def is_completed(self):
        return True


class TestOrphans:
    """A rank whose job is gone is told so; one whose job lives is not."""

    def test_a_launcher_that_ended(self, tmp_path):
        # The launcher starts a rank and ends; the rank writes what its heartbeat told it.
        rank = (
            "import os, sys, time; from megatron.base.heartbeat import Heartbeat\n"
            "def tell(message): open(sys.argv[1], 'w').write(message); os._exit(0)\n"
            "Heartbeat(0, interval=0.05, launcher=os.getppid()).start(on_orphaned=tell)\n"
            "print(os.getppid(), flush=True); time.sleep(20)"
        )
        launcher = (
            "import subprocess, sys; child = subprocess.Popen([sys.executable, '-c', *sys.argv[1:]], "
            "stdout=subprocess.PIPE); sys.stdout.buffer.write(child.stdout.readline())"
        )
        told = tmp_path / "told"
        done = subprocess.run(
            [sys.executable, "-c", launcher, rank, told], stdout=subprocess.PIPE, text=True, check=True
        )
        wait_until(lambda: told.exists() and told.read_text())
        assert told.read_text() == f"the launcher, process {int(done.stdout)}, is gone"

    def test_a_store_that_went_away(self, store, start):
        def publish(line):
            if gone:
                raise ConnectionError
            store.lines[0] = line

        gone, told = False, []
        heartbeat = Heartbeat(0, publish=publish, interval=0.01, launcher=os.getppid())
        start(heartbeat, on_orphaned=told.append)
        first = store.lines[0]
        wait_until(lambda: store.lines[0] != first)
        assert not told
        gone = True
        wait_until(lambda: told)
        assert "the job's store has not answered" in told[0]

    def test_a_job_without_launcher_and_store(self, start):
        told = []
        heartbeat = Heartbeat(0, interval=0.001)
        start(heartbeat, on_orphaned=told.append)
        beats = [heartbeat.state().time]
        wait_until(lambda: heartbeat.state().time > beats[0] + 0.1)
        assert not told
