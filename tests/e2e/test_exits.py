"""Runs that are asked to stop: they save, end with exit code 0, and go on later from where they were."""

import json
import os
import re
import signal
import time

import pytest

from tests.e2e.helpers.launch import Torchrun, run, start
from tests.e2e.helpers.runs import MOCK, checkpoint, figures, flags, lines

LONG = {"--train-iters": 100000, "--lr-decay-style": "constant"}


def saving(tmp_path, **changes):
    return {**MOCK, **LONG, "--save": tmp_path / "save", "--save-interval": 100000, **changes}


def assert_continues(tmp_path, stopped, stdout):
    """Iteration `stopped` was the last one and was saved; two more follow it."""
    assert max(figures(stdout)) == stopped
    assert f"successfully saved checkpoint from iteration {stopped:7d}" in stdout
    options = saving(tmp_path, **{"--load": tmp_path / "save", "--train-iters": stopped + 2})
    resumed = run(flags(options), tmp_path / "log-resumed", 2)
    assert resumed.codes == [0, 0], resumed.text
    assert list(figures(resumed.stdout[0])) == [stopped + 1, stopped + 2]


@pytest.mark.alone
def test_sigterm_to_torchrun(tmp_path, capfd):
    # With a process that loads data: torchrun signals the whole process group of a worker.
    job = Torchrun(flags(saving(tmp_path, **{"--num-workers": 1})), tmp_path / "log", 2)
    job.wait_for("iteration        5/")
    pids = [
        json.loads((tmp_path / "save" / "heartbeat" / f"rank_0000{rank}.json").read_text())["pid"] for rank in range(2)
    ]
    sent = time.monotonic()
    job.process.send_signal(signal.SIGTERM)
    result = job.wait(timeout=40)
    seconds = time.monotonic() - sent
    with capfd.disabled():
        print(f"\n  job ended {seconds:.1f} s after torchrun got SIGTERM")
    assert seconds < 15
    stopped = re.search(r"stopped at iteration (\d+): SIGTERM to rank [01]\n", result.stdout[0])
    assert stopped, result.text
    # torchrun itself reports the signal; it neither saw a worker fail nor had to kill one.
    assert "error" not in result.stderr[0].partition("Traceback")[0], result.stderr[0]
    assert "SIGKILL" not in result.stderr[0] and not any(os.path.exists(f"/proc/{pid}") for pid in pids)
    assert_continues(tmp_path, int(stopped[1]), result.stdout[0])


@pytest.mark.parametrize(("number", "rank"), [(signal.SIGUSR1, 1), (signal.SIGTERM, 0)])
def test_signal_to_one_rank(number, rank, tmp_path, capfd):
    job = start(flags(saving(tmp_path)), tmp_path / "log", 2)
    job.wait_for("iteration        3/")
    sent = time.monotonic()
    os.kill(job.pids[rank], number)
    result = job.wait()
    with capfd.disabled():
        print(f"\n  job ended {time.monotonic() - sent:.1f} s after rank {rank} got {number.name}")
    assert result.codes == [0, 0] and result.stderr == ["", ""], result.text
    stopped = re.search(rf"stopped at iteration (\d+): {number.name} to rank {rank}\n", result.stdout[0])
    assert stopped, result.stdout[0]
    assert_continues(tmp_path, int(stopped[1]), result.stdout[0])


def test_signals_reach_the_loaders_processes_too(tmp_path):
    """A batch system signals every process of a job: those that load data must not die before the run has saved."""
    job = start(flags(saving(tmp_path, **{"--num-workers": 2})), tmp_path / "log")
    job.wait_for("iteration        3/")
    with open(f"/proc/{job.pids[0]}/task/{job.pids[0]}/children") as file:
        workers = [int(pid) for pid in file.read().split()]
    assert len(workers) >= 2
    for pid in [*workers, job.pids[0]]:
        os.kill(pid, signal.SIGTERM)
    result = job.wait(timeout=20)
    assert result.codes == [0] and result.stderr == [""], result.text
    assert "SIGTERM to rank 0" in result.stdout[0] and "successfully saved checkpoint" in result.stdout[0]


def test_no_exit_signal_handler(tmp_path):
    job = start(flags(saving(tmp_path, **{"--no-exit-signal-handler": None})), tmp_path / "log")
    job.wait_for("iteration        3/")
    os.kill(job.pids[0], signal.SIGTERM)
    assert job.wait(timeout=10).codes == [-signal.SIGTERM]


def test_ctrl_c(tmp_path):
    job = start(flags(MOCK, LONG), tmp_path / "log")
    job.wait_for("iteration        3/")
    os.kill(job.pids[0], signal.SIGINT)
    result = job.wait(timeout=10)
    assert result.codes == [130] and result.stderr == ["interrupted\n"], result.text


@pytest.mark.alone
def test_ctrl_c_ends_every_rank_without_a_launcher_that_kills_them(tmp_path, capfd):
    """torchrun passes SIGINT on once and then waits 30 s for all of them."""
    job = start(flags(MOCK, LONG), tmp_path / "log", 2)
    job.wait_for("iteration        3/")
    sent = time.monotonic()
    for pid in job.pids:
        os.kill(pid, signal.SIGINT)
    while not job.ended():
        assert time.monotonic() - sent < 15, "a rank waits to be killed"
        time.sleep(0.02)
    with capfd.disabled():
        print(f"\n  job ended {time.monotonic() - sent:.1f} s after its ranks got SIGINT")
    result = job.wait()
    assert result.codes == [130, 130] and result.stderr[0] == "interrupted\n", result.text
    # torch itself may warn on the other rank that the store of the first has gone.
    assert not result.stderr[1] or "TCPStore.cpp" in result.stderr[1].splitlines()[0], result.text


def test_exit_duration(tmp_path):
    limit = {"--exit-duration-in-mins": 3 / 60}
    result = run(flags(saving(tmp_path, **limit)), tmp_path / "log", 2)
    # Neither at once nor never: on a busy machine a step takes longer, and one more is taken.
    assert result.codes == [0, 0] and 2 < result.seconds < 30, f"{result.seconds} s\n{result.text}"
    stopped = re.search(r"stopped at iteration (\d+): --exit-duration-in-mins 0.05\n", result.stdout[0])
    assert stopped and int(stopped[1]) == max(figures(result.stdout[0]))
    assert (tmp_path / "save" / f"iter_{int(stopped[1]):07d}").is_dir()


def test_exit_interval_counts_from_the_start_of_the_whole_run(tmp_path):
    options = saving(tmp_path, **{"--exit-interval": 3})
    for expected in (3, 6):
        result = run(flags(options, {"--load": tmp_path / "save"}), tmp_path / "log")
        assert result.codes == [0] and f"stopped at iteration {expected}: --exit-interval 3" in result.stdout[0]
        assert lines(result.stdout[0])[-1]["iteration"] == expected
    assert checkpoint(tmp_path / "save" / "iter_0000006")[1]["train"]["iteration"] == 6


def test_a_suspicious_step_ends_with_its_exit_code(tmp_path):
    """A number that is not finite, on the only replica: the run saves, and is to be started on another machine."""
    injected = {"--error-injection-rate": 1, "--error-injection-type": "persistent_error"}
    options = saving(tmp_path, **injected, **{"--train-iters": 3})
    result = run(flags(options), tmp_path / "log")
    assert result.codes == [16] and result.stderr[0].count("\n") == 1, result.text
    assert result.stderr[0].startswith("error: iteration 1: rank 0 (") and "no other replica can" in result.stderr[0]
    assert checkpoint(tmp_path / "save" / "iter_0000000")[1]["results"]["unresolved"]["iteration"] == 1
    # With a second replica, which computes other numbers. At this rate the error is that of rank 1 alone.
    other = {"--save": tmp_path / "other", "--error-injection-rate": 5}
    result = run(flags(options, other), tmp_path / "log2", 2)
    assert result.codes[0] == 17 and "a persistent fault of rank 1 (" in result.stderr[0], result.text
    assert (
        result.stderr[1] == "" and "Traceback" not in result.text and not (tmp_path / "other" / "iter_0000000").exists()
    )
