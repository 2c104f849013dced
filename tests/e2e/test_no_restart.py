"""Ends that a restart cannot change: they are not started again, and the job ends with their reason."""

import re

import pytest

from tests.e2e.helpers.examples import make_models_and_data, start
from tests.e2e.helpers.launch import Torchrun
from tests.e2e.helpers.runs import MOCK, flags

CPU = ["--", "--device", "cpu", "--num-workers", 0, "--eval-iters", 0, "--log-interval", 1]
RESTARTS = ("--max-restarts", "2")
AGAIN = "not started again: the attempt before ended so, and this one would, too"
TORCHRUN = '#!/usr/bin/env bash\necho "started: $*"\n'


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    make_models_and_data(folder)
    return folder


@pytest.mark.parametrize("wrong", ["--fp8-formt hybrid", "--use-mup", "--clip-grad -1", "--bf16 --fp16"])
def test_flags_are_checked_before_torchrun_starts(made, tmp_path, wrong):
    (tmp_path / "torchrun").write_text(TORCHRUN)
    (tmp_path / "torchrun").chmod(0o755)
    words = ["--model", made / "llama", "--data", made / "text", "--save", tmp_path / "run", "--train-iters", 2]
    words += ["--seq-length", 64, "--global-batch-size", 4, "--precision", "fp32", "--gpus", 2]
    ended = start("examples/llama/pretrain_llama.sh", tmp_path, *words, *CPU, *wrong.split())
    assert ended.returncode == 2 and "started" not in ended.stdout, ended.stdout
    assert ended.stderr.startswith("error: --") and "Traceback" not in ended.stderr
    fine = start("examples/llama/pretrain_llama.sh", tmp_path, *words, *CPU)
    assert fine.returncode == 0 and "started: --nproc-per-node 2 --max-restarts 3" in fine.stdout


def test_a_nan_stop_ends_the_next_attempt_at_once(tmp_path):
    """Loss scaling that overflows at its lowest value makes every step bad; the job after it starts anew."""
    bad = {
        "--fp16": None,
        "--initial-loss-scale": 1e30,
        "--min-loss-scale": 1e30,
        "--max-consecutive-nan-iterations": 2,
    }
    saving = {**MOCK, **bad, "--save": tmp_path / "save", "--save-interval": 100, "--train-iters": 100}
    for number in (1, 2):
        ended = Torchrun(flags(saving), tmp_path / f"log-{number}", 2, RESTARTS).wait()
        reasons = re.findall(
            "^error: gradients were not finite in 2 iterations in a row", ended.stderr[0], re.MULTILINE
        )
        assert ended.codes == [1] and len(reasons) == 3, ended.stderr[0]
        assert ended.stderr[0].count(f"\n{AGAIN}") == 2
        # Only the first attempt of a job trained.
        assert ended.stdout[0].count("] iteration        1/     100 |") == 1, ended.stdout[0]


def test_a_mistake_of_the_input_ends_the_next_attempt_at_once(tmp_path):
    wrong = {**MOCK, "--mock-data": False, "--data-path": tmp_path / "nowhere", "--save": tmp_path / "save"}
    ended = Torchrun(flags({**wrong, "--save-interval": 10}), tmp_path / "log", 1, RESTARTS).wait()
    assert ended.codes == [1] and ended.stderr[0].count(f"\n{AGAIN}") == 2, ended.stderr[0]
