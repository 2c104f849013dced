"""A rank that dies, freezes or raises ends the job within seconds, and the others say which one it was."""

import json
import os
import re
import shutil
import signal
import time
from pathlib import Path

import psutil
import pytest

from megatron.core.dist_checkpointing.local_folders import run_folder
from tests.e2e.helpers.launch import Torchrun, run, start
from tests.e2e.helpers.runs import MOCK, figures, flags

LONG = {"--train-iters": 100000, "--lr-decay-style": "constant"}
RAISES = "tests.e2e.helpers.drivers:raises_in_a_step"


def saving(tmp_path, **changes):
    return {**MOCK, **LONG, "--save": tmp_path / "save", "--save-interval": 5, **changes}


def assert_continues(tmp_path, lost):
    """The last checkpoint that the lost run named loads in a world of two, and training goes on after it."""
    last = int((tmp_path / "save" / "latest_checkpointed_iteration.txt").read_text())
    assert f"successfully saved checkpoint from iteration {last:7d}" in lost.stdout[0]
    resume = {"--load": tmp_path / "save", "--exit-interval": last + 2, "--save-interval": 1000}
    resumed = run(flags(saving(tmp_path, **resume)), tmp_path / "log-resumed", 2)
    assert resumed.codes == [0, 0], resumed.text
    assert list(figures(resumed.stdout[0])) == [last + 1, last + 2]


def test_killed_under_torchrun(tmp_path, capfd):
    job = Torchrun(flags(saving(tmp_path)), tmp_path / "log", 2)
    job.wait_for("successfully saved checkpoint from iteration      10")
    # What it published last may still be from before the first step, or from between two phases.
    file, deadline = tmp_path / "save" / "heartbeat" / "rank_00001.json", time.monotonic() + 10
    while (beat := json.loads(file.read_text()))["phase"] == "start" and time.monotonic() < deadline:
        time.sleep(0.05)
    started = time.monotonic()
    os.kill(beat["pid"], signal.SIGKILL)
    lost = job.wait(timeout=40)
    seconds = time.monotonic() - started
    with capfd.disabled():
        print(f"\n  job ended {seconds:.1f} s after one of its ranks was killed")
    assert seconds < 30 and lost.codes == [1]  # 6 s on two cores that ten processes share
    ours = [line for line in lost.stderr[0].splitlines() if line.startswith("error on rank 0: ")]
    assert len(ours) == 1, lost.stderr[0]
    named = (
        r"error on rank 0: \w+ number \d+ on group (dp_cp|replicas|world) \(ranks 0, 1\) failed after [\d.]+ s: "
        r"rank 1 is gone"
    )
    assert "last in phase 'start'" not in ours[0]
    assert re.match(named, ours[0]) and f"pid {beat['pid']}" in ours[0], ours[0]
    assert_continues(tmp_path, lost)


@pytest.mark.alone
def test_killed_under_tensor_parallelism(tmp_path):
    job = start(flags(MOCK, LONG, {"--tensor-model-parallel-size": 2}), tmp_path / "log", 2)
    job.wait_for("iteration        3/")
    os.kill(job.pids[1], signal.SIGKILL)
    started = time.monotonic()
    lost = job.wait(timeout=20)
    assert lost.codes == [1, -9] and time.monotonic() - started < 10
    assert re.match(r"error on rank 0: \w+ number \d+ on group \w+ \(ranks 0, 1\) failed", lost.stderr[0]), lost.text
    assert "rank 1 is gone or frozen (no heartbeat any more, last in phase '" in lost.stderr[0]
    assert "Traceback" not in lost.text and lost.stderr[0].count("\n") == 1


@pytest.mark.alone
def test_frozen(tmp_path, capfd):
    timeout = 4
    job = start(flags(MOCK, LONG, {"--distributed-timeout-minutes": timeout / 60}), tmp_path / "log", 2)
    job.wait_for("iteration        3/")
    os.kill(job.pids[1], signal.SIGSTOP)
    started = time.monotonic()
    try:
        while 0 not in job.codes and time.monotonic() - started < 30:
            job.ended()
            time.sleep(0.05)
        seconds = time.monotonic() - started
    finally:
        job.kill()
    with capfd.disabled():
        print(f"\n  job ended {seconds:.1f} s after one of its ranks froze, with a timeout of {timeout} s")
    text = job.text(0, "err")
    assert job.codes[0] == 1 and timeout < seconds < timeout + 10, text
    assert "rank 1 is gone or frozen (no heartbeat any more, last in phase '" in text and str(job.pids[1]) in text
    assert "Traceback" not in text and text.count("\n") == 1, text


@pytest.mark.parametrize("axis", ["dp", "tp"])
def test_raises(axis, tmp_path):
    options = saving(tmp_path, **({"--tensor-model-parallel-size": 2} if axis == "tp" else {}))
    env = {"FAULTY_RANK": 1}
    lost = run(flags(options), tmp_path / "log", 2, driver=RAISES, env=env)
    assert lost.codes == [1, 1], lost.text
    own = lost.stderr[1].splitlines()
    assert own[0].startswith("Traceback") and own[-2] == "ZeroDivisionError: a bug in the model"
    assert own[-1] == "error on rank 1: ZeroDivisionError: a bug in the model"
    assert "rank 1 ended: ZeroDivisionError: a bug in the model" in lost.stderr[0]
    assert "Traceback" not in lost.stderr[0]
    beats = {path.name: json.loads(path.read_text()) for path in Path(tmp_path / "save" / "heartbeat").iterdir()}
    assert beats["rank_00001.json"]["error"] == "ZeroDivisionError: a bug in the model"
    assert beats["rank_00001.json"]["phase"] == "train"
    assert beats["rank_00000.json"]["error"] == "it lost other ranks, too"


def test_one_process_that_raises(tmp_path):
    lost = run(flags(MOCK), tmp_path / "log", driver=RAISES, env={"FAULTY_RANK": 0})
    assert lost.codes == [1] and lost.stderr[0].splitlines()[0].startswith("Traceback")


def test_data_worker_that_is_killed(tmp_path):
    """The out-of-memory killer takes a loader's process: the run says so and ends."""
    job = start(flags(MOCK, LONG, {"--num-workers": 1}), tmp_path / "log")
    job.wait_for("iteration        3/")
    (worker,) = map(int, Path(f"/proc/{job.pids[0]}/task/{job.pids[0]}/children").read_text().split())
    os.kill(worker, signal.SIGKILL)
    lost = job.wait()
    assert lost.codes == [1] and re.search("DataLoader worker|data-loading process", lost.stderr[0]), lost.text


def test_ranks_end_when_their_torchrun_is_killed(tmp_path):
    """Else they would train on for ever, and write into the folders of the job that is started in their place."""
    job = Torchrun(flags(saving(tmp_path)), tmp_path / "log", 2)
    job.wait_for("successfully saved checkpoint from iteration       5")
    ranks = psutil.Process(job.process.pid).children()
    job.process.kill()
    _, alive = psutil.wait_procs(ranks, timeout=60)
    for rank in alive:
        rank.kill()
    assert len(ranks) == 2 and not alive
    assert f"this rank ends: the launcher, process {job.process.pid}, is gone" in job.text("err") + job.text()


def test_killed_in_an_exchange_of_tokens(tmp_path):
    """The survivor names the direction, the layer, and the action with its microbatch."""
    driver = "tests.e2e.helpers.drivers:dies_in_an_exchange"
    experts = {"--swiglu": (), "--disable-bias-linear": (), "--num-experts": 4, "--expert-model-parallel-size": 2}
    started = time.monotonic()
    lost = run(flags(MOCK, LONG, experts), tmp_path / "log", 2, driver=driver, env={"FAULTY_RANK": 1})
    assert lost.codes == [1, -9] and time.monotonic() - started < 30, lost.text
    named = (
        r"error on rank 0: results back from experts of layer 1 in forward-backward, F0@0 number \d+ on group etp_ep"
    )
    assert re.match(named, lost.stderr[0]), lost.text
    assert "rank 1 is gone" in lost.stderr[0] and lost.stderr[0].count("\n") == 1


def test_a_restarted_job_goes_on_from_memory(tmp_path):
    """Before anything persists. It repeats the steps since with the same losses, and leaves nothing in memory."""
    local = {"--load": tmp_path / "save", "--save-interval": 1000, "--non-persistent-save-interval": 3}
    job = Torchrun(
        flags(saving(tmp_path, **local), {"--train-iters": 60}), tmp_path / "log", 2, ("--max-restarts", "1")
    )
    folder = run_folder(Path("/dev/shm"), tmp_path / "save")
    try:
        job.wait_for("iter_0000009 in memory")
        beat = json.loads((tmp_path / "save" / "heartbeat" / "rank_00001.json").read_text())
        assert folder.stat().st_mode & 0o77 == 0, "readable by others"
        os.kill(beat["pid"], signal.SIGKILL)
        ended = job.wait()
        assert ended.codes == [0] and not folder.exists(), ended.text
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    before, _, after = ended.stdout[0].partition("going on from the local checkpoint")
    lost, resumed = figures(before), figures(after)
    assert min(resumed) >= 10 and min(resumed) % 3 == 1 and max(resumed) == 60
    repeated = lost.keys() & resumed.keys()
    assert repeated and {i: lost[i] for i in repeated} == {i: resumed[i] for i in repeated}
