"""tools/plan.py schedule: what it prints, the files it writes, and how it refuses."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from megatron.planner.schedule.plot import COLOURS
from megatron.schedule.schedule import Kind

F, I, W = Kind.FORWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD
TOOL = Path(__file__).parents[3] / "tools" / "plan.py"


@pytest.fixture(scope="module")
def plan():
    spec = importlib.util.spec_from_file_location("plan", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return lambda *flags: module.main(["schedule", *map(str, flags)])


HIDES = "--overlap-moe-expert-parallel-comm"
SIZES = ("--pipeline-model-parallel-size", 4, "--num-microbatches", 8)


def rows(text):
    """The cells of the table's rows."""
    cells = (line.split() for line in text.splitlines())
    return [row for row in cells if row and row[0].isdigit()]


def test_table(plan, capsys):
    assert plan(*SIZES) == 0
    out = capsys.readouterr().out
    assert "1f1b: 4 ranks, 8 microbatches, 33 ms, bubble 27.3%" in out
    assert "(p - 1) / (m + p - 1) = 27.27% of the step" in out
    assert [row[-2:] for row in rows(out)] == [["4", "4"], ["3", "3"], ["2", "2"], ["1", "1"]]


@pytest.mark.parametrize(
    ("flags", "headline", "formula"),
    [
        (("--schedule", "gpipe"), "gpipe: 4 ranks, 8 microbatches, 33 ms, bubble 27.3%", "27.27%"),
        (("--schedule", "zb-h1"), "zb-h1: 4 ranks, 8 microbatches, 27 ms, bubble 11.1%", "11.11%"),
        (("--schedule", "zb-v"), "zb-v: 4 ranks x 2 stages, 8 microbatches, 25.5 ms, bubble 5.9%", "5.88%"),
        (("--virtual", 2), "interleaved: 4 ranks x 2 stages, 8 microbatches, 28.5 ms, bubble 15.8%", "15.79%"),
        (
            ("--num-layers", 24, "--num-layers-per-virtual-pipeline-stage", 2),
            "interleaved: 4 ranks x 3 stages, 8 microbatches, 27 ms, bubble 11.1%",
            "11.11%",
        ),
        (
            ("--forward-time", 2, "--weight-grad-time", 1),
            "1f1b: 4 ranks, 8 microbatches, 55 ms, bubble 27.3%",
            "27.27%",
        ),
        (("--forward-only",), "1f1b, forward only: 4 ranks, 8 microbatches, 11 ms, bubble 27.3%", None),
        (("--schedule", "zb-v", "--weight-grad-time", 0.5), "zb-v: 4 ranks x 2 stages", None),
    ],
)
def test_schedules(plan, capsys, flags, headline, formula):
    assert plan(*SIZES, *flags) == 0
    out = capsys.readouterr().out
    assert headline in out
    assert ("of the step" in out) is (formula is not None)
    if formula is not None:
        assert f" = {formula} of the step" in out


def test_transfers_cost_time(plan, capsys):
    spans = []
    for transfer, *flags in ((0,), (0.2,), (0.2, "--no-overlap-p2p-communication"), (0.2, "--blocking-transfers")):
        assert plan(*SIZES, "--virtual", 2, "--transfer-time", transfer, *flags) == 0
        spans.append(float(capsys.readouterr().out.split(" ms")[0].split()[-1]))
    assert spans == sorted(set(spans)), "each costs more than the one before"


def test_hidden_exchanges(plan, capsys, tmp_path):
    headlines = []
    for flags in ((), (HIDES,)):
        assert plan(*SIZES, "--exchange-time", 1.5, *flags, "--png", tmp_path / "picture.png") == 0
        headlines.append(capsys.readouterr().out.splitlines()[0])
    assert headlines[0].startswith("1f1b: 4 ranks, 8 microbatches, 66 ms")
    assert headlines[1].startswith("1f1b: 4 ranks, 8 microbatches, 49.9 ms"), headlines[1]


def test_picture(plan, tmp_path, capsys):
    png = tmp_path / "new" / "zb-v.png"
    assert plan(*SIZES, "--schedule", "zb-v", "--png", png) == 0
    assert f"{png} written" in capsys.readouterr().out.replace("\n", "")
    pixels = imread(png)[..., :3]
    height, width = pixels.shape[:2]
    assert width == 2100 and 400 < height < 500
    areas = [(np.abs(pixels - COLOURS[kind]).max(-1) < 0.02).sum() for kind in (F, I, W)]
    assert min(areas) > 0.05 * height * width
    assert max(areas) < 1.2 * min(areas), "the three take equally long"


def test_trace(plan, tmp_path):
    trace = tmp_path / "trace.json"
    assert plan(*SIZES, "--trace", trace, "--transfer-time", 0.1, "--forward-time", 2) == 0
    events = json.loads(trace.read_text())["traceEvents"]
    names = {(e["pid"], e["args"]["name"]) for e in events if e["ph"] == "M"}
    assert {(0, "rank 0"), (3, "rank 3"), (0, "compute"), (0, "send forward"), (3, "receive forward")} <= names
    assert (0, "receive forward") not in names
    forward = next(e for e in events if e["name"] == "F0@1")
    assert (forward["pid"], forward["ts"], forward["dur"]) == (1, 2100.0, 2000.0), "microseconds"
    assert sum(e["ph"] == "X" for e in events) == 4 * 8 * 2 + 2 * 3 * 8 * 2


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--schedule", "zb-v", "--virtual", 3), "schedule zb-v has 2 virtual stages per rank, not 3"),
        (("--schedule", "interleaved"), "schedule interleaved needs 2 or more virtual stages per rank"),
        (("--num-layers", 8), "--num-layers has no effect without"),
        (("--num-layers-per-virtual-pipeline-stage", 2), "needs --num-layers; give it"),
        (("--num-layers", 13, "--num-layers-per-virtual-pipeline-stage", 2), "--num-layers 13 is not a multiple of"),
        (("--virtual", 2, "--num-layers", 8, "--num-layers-per-virtual-pipeline-stage", 1), "set the same; remove one"),
        (("--virtual", 2, "--microbatch-group-size-per-virtual-pipeline-stage", 3), "give 4 or more"),
        (("--microbatch-group-size-per-virtual-pipeline-stage", 4), "has no effect under schedule 1f1b; remove it"),
        (("--forward-time", "nan"), "--forward-time: must be above 0, got nan"),
        (("--latency", -1), "--latency: must be 0 or more, got -1"),
        (("--num-microbatches", 0), "--num-microbatches: must be from 1 to 100000, got 0"),
        (("--png", "/dev/null/x.png"), "--png /dev/null/x.png cannot be written"),
        (("--schedule", "best"), "--schedule: invalid choice"),
        (("--bubble", 1), "unrecognized arguments: --bubble 1"),
        ((HIDES, "--schedule", "gpipe"), "needs backwards next to forwards"),
        ((HIDES, "--no-overlap-p2p-communication"), "remove it, or --forward-only, --no-overlap-p2p-communication"),
    ],
)
def test_mistakes(plan, capsys, flags, message):
    assert plan(*SIZES, *flags) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1
    assert message in err


def test_runs_without_torch():
    """As a program: its own imports, its exit code, and no torch in the process."""
    command = [sys.executable, "-X", "importtime", str(TOOL), "schedule", "--num-microbatches", "0"]
    done = subprocess.run(
        [*command, "--pipeline-model-parallel-size", "2"], cwd=TOOL.parents[1], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == "error: --num-microbatches: must be from 1 to 100000, got 0"
    imported = {line.split("|")[-1].strip().split(".")[0] for line in done.stderr.splitlines() if "|" in line}
    assert "megatron" in imported and not {"torch", "matplotlib"} & imported


def test_offload(plan, capsys, tmp_path):
    """Copies that fit cost nothing; longer ones do. They are in the trace, and lines in the picture."""
    half = (*SIZES, "--offload-ratio", 0.5)
    assert plan(*half, "--copy-time", 2, "--trace", tmp_path / "t.json", "--png", tmp_path / "t.png") == 0
    out = capsys.readouterr().out
    assert "8 microbatches, 33 ms" in out and "on the device by rank, in chunks: 3.5, 3, 2, 1" in out
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    copies = [event["dur"] for event in events if event.get("cat") in ("offload activations", "reload activations")]
    assert copies and set(copies) == {1000.0}
    picture = imread(tmp_path / "t.png")[..., :3]
    for kind in (Kind.OFFLOAD, Kind.RELOAD):
        assert (np.abs(picture - COLOURS[kind]).max(axis=-1) < 0.01).any()
    assert plan(*half, "--copy-time", 5) == 0
    assert "8 microbatches, 33 ms" not in capsys.readouterr().out
    assert plan(*SIZES, "--copy-time", 1) == 2
    assert "no effect without --offload-ratio" in capsys.readouterr().err
    assert plan(*SIZES, "--offload-ratio", 1.5) == 2
    assert "must be from 0 to 1" in capsys.readouterr().err
