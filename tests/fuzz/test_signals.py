"""Requests to stop in three phases, on ranks without torchrun; the campaign has all of them under torchrun."""

import os
import signal

import pytest

from megatron.core.dist_checkpointing.folders import folder_name
from tests.e2e.helpers.launch import run, start
from tests.fuzz.signals import PHASE, PHASES, Ended, argv_of, check

BEFORE = ["--train-iters", "2"]


@pytest.mark.parametrize(
    ("name", "number"),
    [("datasets", signal.SIGUSR1), ("evaluation", signal.SIGTERM), ("export", signal.SIGUSR1), ("load", None)],
)
def test_a_request_in_a_long_phase(name, number, tmp_path):
    phase = PHASES[name]
    assert run([*argv_of(PHASES["step"], tmp_path, ""), *BEFORE], tmp_path / "log").codes == [0]
    if name == "export":
        (tmp_path / "hf" / folder_name(2)).mkdir(parents=True)
    before = (tmp_path / "run" / folder_name(2) / "metadata.json").read_bytes()
    request = "time limit" if number is None else number.name
    limit = ["--exit-duration-in-mins", "0.03"] if number is None else []
    argv = [*argv_of(phase, tmp_path, ""), *limit]
    job = start(argv, tmp_path / "log2", 2, driver="tests.fuzz.signals:slowed", env={PHASE: name})
    job.wait_for(phase.begins)
    if number is not None:
        os.kill(job.pids[1], number)
    result = job.wait()
    newest = int((tmp_path / "run/latest_checkpointed_iteration.txt").read_text())
    assert result.codes == [0, 0], result.text
    ended = Ended(1 if request == "SIGTERM" else 0, 0.0, newest, result.stdout[0])  # torchrun's code would be 1
    assert check(phase, request, ended, tmp_path, before) == ("iteration 3" if phase.trains else "untouched")
