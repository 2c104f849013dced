"""The Chrome trace of a pipeline: messages end when they have moved, and compute waits for what it needs."""

import json
import re

import pytest

from tests.e2e.helpers.launch import run
from tests.e2e.helpers.runs import MOCK, flags

WAYS = ("pp 0>1", "pp 1>0")
SLACK = 5e3  # microseconds: the ranks' clocks begin at a barrier
NEEDS = {"RF": "forward", "RB": "(backward|input gradient)"}
SENT = {"RF": ("SF", -1), "RB": ("SB", 1)}


def spans(events, rank, rows):
    """Name -> (start, stop) of the first step in the trace, in microseconds."""
    found = {}
    for event in events:
        if event["ph"] == "X" and event["pid"] == rank and event["cat"] in rows:
            found.setdefault(event["name"], (event["ts"], event["ts"] + event["dur"]))
    return found


def check_summaries(text):
    """A line for each recorded step, whose parts are all of it; there is a bubble, and no axis but pp and dp."""
    lines = re.findall(r"where iteration (\d) went: [\d.]+ ms \| (.*)", text)
    assert [number for number, _ in lines] == ["3", "4"]
    for _, line in lines:
        shares = {kind: float(share) for kind, share in re.findall(r"(\w+) ([\d.]+)%", line)}
        assert sum(shares.values()) == pytest.approx(100.0, abs=0.5), line
        assert set(shares) <= {"compute", "pp", "dp", "bubble", "other"}, line
        assert shares["compute"] > 0 and shares["bubble"] > 0, line  # how large depends on what else the machine does


@pytest.mark.alone
@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_messages(tmp_path, schedule):
    """Four microbatches on two ranks: each message is in the trace at both ends, after what it depends on."""
    options = {
        "--pipeline-model-parallel-size": 2,
        "--pipeline-schedule": schedule,
        "--num-layers": 4,
        "--micro-batch-size": 2,
        "--train-iters": 4,
        "--profile-timeline": tmp_path / "trace.json",
    }
    result = run(flags(MOCK, options), tmp_path / "log", 2)
    assert result.codes == [0, 0], result.text
    check_summaries(result.text)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    messages, compute = ([spans(events, rank, rows) for rank in range(2)] for rows in (WAYS, ("compute",)))
    received = [(rank, name) for rank in range(2) for name in messages[rank] if name.startswith("receive")]
    ways = 2 if schedule == "zb-v" else 1  # stages 0 and 1 are on different ranks, 1 and 2 on one, 2 and 3 apart
    assert len(received) == 4 * 2 * ways and sum(map(len, messages)) == 2 * len(received)
    for rank, name in received:
        kind, number, stage = re.fullmatch(r"receive (R[FB])(\d)@(\d)", name).groups()
        other, step = SENT[kind]
        sent = messages[1 - rank][f"send {other}{number}@{int(stage) + step}"]
        arrived = messages[rank][name][1]
        (needing,) = (
            span
            for text, span in compute[rank].items()
            if re.fullmatch(f"{NEEDS[kind]} {number} of stage {stage}", text)
        )
        assert sent[0] < arrived + SLACK and arrived < needing[0] + 1, (rank, name)
