"""Two jobs on one folder: the second one says who has it and changes nothing; a killed one stands in nobody's way."""

import os
import re
import signal

import pytest

from tests.e2e.helpers.launch import run, start
from tests.e2e.helpers.runs import MOCK, figures, flags

LONG = {"--train-iters": 100000, "--lr-decay-style": "constant"}


def saving(tmp_path, **changes):
    return {**MOCK, **LONG, "--save": tmp_path / "save", "--save-interval": 3, "--save-retain": 2, **changes}


@pytest.mark.parametrize("shared", ["--save", "--save-hf"])
def test_the_second_job_is_refused_and_the_first_goes_on(tmp_path, shared):
    options = saving(tmp_path, **{"--save-hf": tmp_path / "hf", "--untie-embeddings-and-output-weights": None})
    first = start(flags(options), tmp_path / "log", 2)
    first.wait_for("successfully saved checkpoint from iteration       3")
    own = {"--save": tmp_path / "own"} if shared == "--save-hf" else {"--save-hf": tmp_path / "own"}
    second = run(flags(options, own), tmp_path / "log2", 2)
    held = options[shared]
    assert second.codes[0] == 2 and second.stderr[1] == "", second.text
    said = rf"error: {held} is in use by another job: process {first.pids[0]} on \S+, since \S+ \S+; end that job or "
    assert re.match(said, second.stderr[0]) and second.stderr[0].count("\n") == 1, second.stderr[0]
    assert figures(second.stdout[0]) == {}
    os.kill(first.pids[0], signal.SIGTERM)
    ended = first.wait()
    assert ended.codes == [0, 0], ended.text


@pytest.mark.parametrize("workers", [0, 2])
def test_a_killed_job_gives_its_folder_up_at_once(tmp_path, workers):
    """Also while processes that loaded its data are still there."""
    options = saving(tmp_path, **{"--num-workers": workers})
    first = start(flags(options), tmp_path / "log")
    first.wait_for("successfully saved checkpoint from iteration       3")
    first.kill()
    again = run(flags(options, {"--load": tmp_path / "save", "--exit-interval": 6}), tmp_path / "log2")
    assert again.codes == [0] and 6 in figures(again.stdout[0]), again.text


def test_what_cannot_be_a_folder_is_found_at_the_start(tmp_path):
    (tmp_path / "file").write_text("")
    for options in ({"--save": tmp_path / "file"}, {"--save-hf": tmp_path / "file"}):
        refused = run(flags(saving(tmp_path, **options)), tmp_path / "log")
        (flag,) = options
        said = f"error: {flag} {tmp_path / 'file'} cannot be written (File exists); give another folder\n"
        assert refused.codes == [2] and refused.stderr[0] == said and figures(refused.stdout[0]) == {}, refused.text
