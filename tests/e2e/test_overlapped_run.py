"""A whole run with the overlapped optimizer: its decision, its timeline, its losses, evaluation and resume."""

import json
import re

import pytest

from tests.e2e.helpers.launch import run
from tests.e2e.helpers.runs import MOCK, evaluations, flags, lines

OVERLAPPED = {"--overlapped-distributed-optimizer": None, "--reduce-bucket-size": 4000, "--micro-batch-size": 1}
EVALUATING = {"--eval-interval": 10, "--eval-iters": 2}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("overlapped")
    writing = {"--profile-timeline": folder / "new" / "trace.json", "--save": folder / "save", "--save-interval": 10}
    result = run(flags(MOCK, OVERLAPPED, EVALUATING, writing), folder / "log", 2)
    assert result.codes == [0, 0] and result.stderr == ["", ""], result.text
    return folder, result


def test_losses_are_those_of_plain_data_parallelism(trained, tmp_path):
    _, result = trained
    plain = run(flags(MOCK, {"--micro-batch-size": 1}, EVALUATING), tmp_path, 2)
    assert plain.codes == [0, 0], plain.text
    for name, printed in (("lm loss", 2e-6), ("grad norm", 2e-3)):  # of the last printed digit
        found, expected = ([line[name] for line in lines(text)] for text in (result.stdout[0], plain.stdout[0]))
        assert len(found) == 10 and found == pytest.approx(expected, rel=printed)
    found, expected = evaluations(result.stdout[0]), evaluations(plain.stdout[0])
    assert [loss for _, loss in found] == pytest.approx([loss for _, loss in expected], rel=2e-6)


def test_auto_says_what_it_chose_and_why(trained):
    _, result = trained
    (line,) = [line for line in result.stdout[0].splitlines() if "--grad-reduce-mode auto" in line]
    assert re.search(r"auto: last-microbatch \(4 microbatches; reducing .* MiB takes .* free\)", line)


def test_timeline(trained):
    """Two steps of both ranks; reductions and gathers of every bucket, and the second step's forward beside gathers."""
    folder, result = trained
    assert f"timeline of 2 ranks written to {folder / 'new' / 'trace.json'}" in result.stdout[0]
    events = json.loads((folder / "new" / "trace.json").read_text())["traceEvents"]
    rows = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    work = {row for row in rows.values() if not row.startswith("wait ")}
    assert work == {"iteration", "compute", "step", "reduce-scatter", "all-gather"}
    for rank in (0, 1):
        names = {row: [] for row in rows.values()}
        for event in events:
            if event["ph"] == "X" and event["pid"] == rank:
                names[rows[rank, event["tid"]]].append(event["name"])
        assert names["compute"].count("forward 0") == names["compute"].count("backward 3") == 2
        assert names["step"].count("gradient norm") == 2
        reduced = [name for name in names["reduce-scatter"] if name != "probe"]
        buckets = len(set(reduced))
        assert len(reduced) == 2 * buckets > 4
        # Those of the step before may still be on their way when the recording begins.
        assert 2 * buckets <= len(names["all-gather"]) < 3 * buckets


def test_evaluation_after_a_step_is_that_of_the_saved_model(trained, tmp_path):
    """To the last printed digit; the same samples, since both begin the validation data anew."""
    folder, result = trained
    loading = {"--load": folder / "save", "--skip-train": None}
    alone = run(flags(MOCK, {"--micro-batch-size": 1}, {**EVALUATING, **loading}), tmp_path, 2)
    assert alone.codes == [0, 0], alone.text
    assert evaluations(alone.stdout[0])[0][1] == evaluations(result.stdout[0])[0][1]
