"""--elastic-world: another number of processes in every attempt, with the losses of one that never changes."""

import os
import subprocess
import sys
import time

import pytest

from tests.e2e.helpers.launch import ROOT, run
from tests.e2e.helpers.runs import MOCK, figures, flags
from tests.fuzz.restarts import end
from tests.pool import free_port

MEETING = "keep_alive_interval=1,keep_alive_max_attempt=4,last_call_timeout=1"


def elastic(folder, **changes):
    saving = {"--save": folder / "save", "--load": folder / "save", "--save-interval": 2}
    return flags(MOCK, {"--elastic-world": None, "--global-batch-size": 8}, saving, changes)


def numbers(found):
    return {step: [float(text.rpartition(":")[2]) for text in texts] for step, texts in found.items()}


def test_three_processes_then_four(tmp_path):
    """Eight samples are for two replicas of three processes while one waits, and for four with a smaller micro batch."""
    whole = run(elastic(tmp_path / "whole"), tmp_path / "log")
    assert whole.codes == [0], whole.text
    expected, got = numbers(figures(whole.stdout[0])), {}
    for world, last in ((3, 4), (4, 10)):
        done = run(elastic(tmp_path, **{"--exit-interval": last}), tmp_path / f"log-{world}", world)
        assert done.codes == [0] * world, done.text
        got |= numbers(figures(done.stdout[0]))
        rows = [line.split("  ")[0] for line in done.stdout[0].splitlines() if line.startswith(("--elas", "--micro"))]
        assert rows == {3: ["--elastic-world"], 4: ["--micro-batch-size"]}[world]
        assert done.text.count("lm loss:") == len(figures(done.stdout[0]))  # the one that waits does not train
    assert list(got) == list(expected)
    for step, values in expected.items():
        assert got[step][0] == pytest.approx(values[0], rel=2e-6), step  # seven digits are printed
        assert got[step][1] == pytest.approx(values[1], abs=1.1e-3), step  # three decimals


@pytest.mark.alone
def test_a_host_is_lost_and_comes_back(tmp_path):
    """The other one goes on alone, and saves before it starts again with both."""
    port = free_port()
    long = {"--train-iters": 100000, "--lr-decay-style": "constant", "--save-interval": 10}
    launcher = ["--nproc-per-node", 1, "--nnodes", "1:2", "--max-restarts", 3, "--rdzv-backend", "c10d"]
    launcher += ["--rdzv-endpoint", f"localhost:{port}", "--local-addr", "127.0.0.1"]
    program = ["pretrain_gpt.py", *elastic(tmp_path, **long)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}

    def agent(host):
        place = ["--rdzv-conf", f"is_host={int(host == 0)},{MEETING}"]
        words = [sys.executable, "-m", "torch.distributed.run", *launcher, *place, *program]
        with open(tmp_path / f"{host}.out", "a") as out, open(tmp_path / f"{host}.err", "a") as err:
            return subprocess.Popen(list(map(str, words)), cwd=ROOT, stdout=out, stderr=err, env=environment)

    def attempts():
        """Of every attempt on the first host, whether it trained alone, and its steps."""
        parts = (tmp_path / "0.out").read_text().split("feature  ")[1:]
        return [("one process" in part, list(figures(part))) for part in parts]

    def until(number):
        deadline = time.monotonic() + 120
        while len(attempts()) < number or not attempts()[-1][1]:
            assert time.monotonic() < deadline, (tmp_path / "0.err").read_text()
            time.sleep(0.05)

    agents = [agent(0), agent(1)]
    try:
        until(1)
        end(agents[1])
        until(2)
        agents.append(agent(1))
        until(3)
    finally:
        for process in agents:
            end(process)
    (both, _), (alone, steps), (again, (first, *_)) = attempts()
    assert (both, alone, again) == (False, True, False)
    assert first == steps[-1] + 1  # nothing is lost when a host comes
