"""A pipeline rank that dies or freezes in the middle of a schedule ends the job, and the others say in which action."""

import re
import signal
import time

import pytest

from tests.e2e.helpers.launch import start
from tests.e2e.helpers.runs import MOCK, flags

STOPS = "tests.e2e.helpers.drivers:stops_in_an_action"
# Four microbatches. Rank 0 runs F0 F1 B0 F2 B1 F3 B2 B3, rank 1 F0 B0 F1 B1 F2 B2 F3 B3.
PIPELINE = {"--pipeline-model-parallel-size": 2, "--micro-batch-size": 2, "--train-iters": 10}


def begin(tmp_path, rank, name, action, more=None):
    options = flags(MOCK, PIPELINE, more or {}, {"--heartbeat-dir": tmp_path / "beats"})
    env = {"FAULTY_RANK": rank, "FAULTY_SIGNAL": name, "FAULTY_ACTION": action}
    return start(options, tmp_path / "log", 2, driver=STOPS, env=env)


def stopped(pid):
    """Whether the process is frozen or gone."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in "TZ"
    except FileNotFoundError:
        return True


def until(condition, seconds, job):
    """Seconds until it was true."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < seconds, job.text(0, "err") + job.text(1, "err")
        time.sleep(0.02)
    return time.monotonic() - started


def ended(job, rank):
    job.ended()
    return rank in job.codes


# What the other rank waits for when this one stops in that action; the third message of a kind in the third step is
# number 11 of its direction, 4 a step.
CASES = [
    (1, "B2@1", r"receive RB2@0 number 11 on group pp 1>0 \(ranks 1, 0\)"),
    (1, "F1@1", r"receive RB1@0 number 10 on group pp 1>0 \(ranks 1, 0\)"),
]


@pytest.mark.parametrize(("rank", "action", "waits"), CASES)
def test_killed_in_mid_schedule(tmp_path, capfd, rank, action, waits):
    job = begin(tmp_path, rank, "SIGKILL", action)
    until(lambda: stopped(job.pids[rank]), 60, job)
    seconds = until(lambda: ended(job, 1 - rank), 30, job)
    with capfd.disabled():
        print(f"\n  job ended {seconds:.1f} s after rank {rank} was killed in {action}")
    lost = job.wait()
    text = lost.stderr[1 - rank]
    assert lost.codes[rank] == -signal.SIGKILL and lost.codes[1 - rank] == 1
    gone = rf"rank {rank} is gone or frozen \(no heartbeat any more, last in phase 'forward-backward, {action}' "
    assert re.match(
        rf"error on rank {1 - rank}: {waits} failed after [\d.]+ s: {gone}.*pid {job.pids[rank]}\)", text
    ), text
    assert text.count("\n") == 1, text


def test_the_rank_with_the_store_is_killed(tmp_path):
    """Nobody can say where it was, but what this rank waited for is known."""
    job = begin(tmp_path, 0, "SIGKILL", "F2@0")
    until(lambda: stopped(job.pids[0]), 60, job)
    until(lambda: ended(job, 1), 30, job)
    lost = job.wait()
    last = lost.stderr[1].splitlines()[-1]
    assert lost.codes == [-signal.SIGKILL, 1]
    assert re.match(r"error on rank 1: receive RF2@1 number 11 on group pp 0>1 \(ranks 0, 1\) failed after", last), last
    assert "rank 0" in last and "Traceback" not in lost.stderr[1]


@pytest.mark.alone
def test_frozen_in_mid_schedule(tmp_path, capfd):
    timeout = 5
    job = begin(tmp_path, 1, "SIGSTOP", "B1@1", {"--distributed-timeout-minutes": timeout / 60})
    try:
        until(lambda: stopped(job.pids[1]), 60, job)
        seconds = until(lambda: ended(job, 0), 30, job)
    finally:
        job.kill()
    with capfd.disabled():
        print(f"\n  job ended {seconds:.1f} s after one of its ranks froze, with a timeout of {timeout} s")
    text = job.text(0, "err")
    assert job.codes[0] == 1 and seconds < timeout + 10, text
    waits = r"receive RB1@0 number 10 on group pp 1>0 \(ranks 1, 0\) failed after [\d.]+ s"
    gone = r"rank 1 is gone or frozen \(no heartbeat any more, last in phase 'forward-backward, B1@1' "
    assert re.match(rf"error on rank 0: {waits}: {gone}", text) and "Traceback" not in text and text.count("\n") == 1, (
        text
    )
