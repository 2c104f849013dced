"""tools/plan.py search: what it prints, the files that it writes, and one line for input that cannot work."""

import contextlib
import io
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron.base.errors import ConfigError
from megatron.command_line.read import parse
from megatron.config.rules.check import problems
from megatron.planner.search.layout import Layout
from megatron.planner.search.search import MESH
from megatron.planner.time.constants import blind_error
from megatron.planner.time.groups import GROUPS
from megatron.planner.time.step_time import PARTS
from megatron.tooling.plan import try_runs
from megatron.tooling.plan.front import FrontPicture, Mark
from megatron.tooling.plan.front_plot import draw_front
from megatron.tooling.plan.layouts import seconds_text
from megatron.tooling.plan.words import mesh_words, method_words
from tools.plan import main

ROOT = Path(__file__).parents[4]
# The model and the batch; a space of few layouts, because every test searches it.
MODEL = (
    *("--num-layers", 8, "--hidden-size", 2048, "--ffn-hidden-size", 5632, "--num-attention-heads", 16),
    *("--group-query-attention", "--num-query-groups", 4, "--vocab-size", 32000, "--swiglu"),
    *("--normalization", "RMSNorm", "--position-embedding-type", "rope", "--disable-bias-linear"),
    *("--untie-embeddings-and-output-weights", "--seq-length", 4096, "--global-batch-size", 64),
)
AXES = "cp=1 virtual_stages=1,2 schedule=1f1b,interleaved uneven_ends=off micro_batch=1 instances=1 offload=0"
FEW = f"tp=1,2 pp=1,2 {AXES} optimizer_offload=0 sharding=optim tp_overlap=on recompute=none,full"
SEARCH = ("search", "--cluster", "h100:1x8", "--space", FEW, *MODEL)


def plan(capsys, *words):
    """(exit code, lines on stdout, text on stderr)."""
    code = main([str(word) for word in words])
    shown = capsys.readouterr()
    return code, shown.out, shown.err


def command_in(text):
    """The flags of the printed command."""
    words = shlex.split(text[text.index("torchrun") :].split("\n\n")[0].replace("\\\n", " "))
    return words[words.index("pretrain_gpt.py") + 1 :]


@pytest.fixture(scope="module")
def answer(tmp_path_factory):
    """(text that is printed, object that is written, page) of one search with all its answers."""
    folder, out = tmp_path_factory.mktemp("search"), io.StringIO()
    files = ("--json", folder / "found.json", "--front", folder / "new" / "front.html")
    with contextlib.redirect_stdout(out):
        assert main([str(word) for word in (*SEARCH, *files, "--explain", 2, "--train-tokens", "1e11")]) == 0
    found = json.loads((folder / "found.json").read_text(encoding="utf-8"))
    assert all(f"{file} written" in out.getvalue() for file in files[1::2])
    return out.getvalue(), found, (folder / "new" / "front.html").read_text(encoding="utf-8")


class TestTable:
    def test_a_layout_per_mesh_and_how_they_were_found(self, answer):
        out, found, _ = answer
        rows = re.findall(r"^ (\d)  (.*?)  +([\d.]+)  +([\d.]+) ", out, re.MULTILINE)
        assert [row[0] for row in rows] == ["1", "2", "3", "4"]
        assert len({tuple(layout["axes"][axis] for axis in MESH) for layout in found["layouts"]}) == 4
        seconds = [float(row[2]) for row in rows]
        assert seconds == sorted(seconds) == [float(seconds_text(each["step_seconds"])) for each in found["layouts"]]
        assert [float(row[3]) for row in rows] == pytest.approx([s * blind_error() / 100 for s in seconds], abs=0.006)
        assert "days" in out and "MFU: model FLOPs (spec/flops.py" in out and f"within {blind_error():g} %" in out
        assert re.search(r"\d+ layouts on 8 h100: \d+ cannot be among .*, \d+ of the others need too much", out)

    def test_it_is_no_wider_than_a_terminal(self, answer):
        table = answer[0].split("layouts on 8 h100")[0]
        assert max(map(len, table.splitlines())) <= 120

    def test_the_command_starts_a_run_that_the_rules_accept(self, answer):
        flags = command_in(answer[0])
        assert problems(parse(flags, description=""), 8) == []
        assert set(map(str, MODEL)) <= set(flags)
        assert "--mock-data --tokenizer-type NullTokenizer stand for flags that a run needs" in answer[0]

    def test_the_same_time_as_the_command_time_says(self, answer, capsys):
        best = answer[1]["layouts"][0]
        _, out, _ = plan(capsys, "time", "--cluster", "h100:1x8", *command_in(best["command"]))
        assert f"step {1e3 * best['step_seconds']:.1f} ms" in out

    def test_flags_that_are_given_are_fixed(self, capsys):
        given = ("--tensor-model-parallel-size", 2, "--lr", "3e-4", "--train-iters", 7)
        space = FEW.replace("tp=1,2 ", "")
        _, out, _ = plan(capsys, "search", "--cluster", "h100:1x8", "--space", space, "--top", 2, *MODEL, *given)
        words = re.findall(r"^ \d  (.*?)  ", out, re.MULTILINE)
        assert len(words) == 2 and all(word.startswith("tp 2, ") for word in words)
        flags = command_in(out)
        assert flags.count("--tensor-model-parallel-size") == 1 and "3e-4" in flags and "7" in flags
        assert " days" in out, "of 7 steps"


class TestExplain:
    def test_tables_and_the_command_of_that_layout(self, answer):
        out, found, _ = answer
        for heading in ("operations of the slowest rank", "links of a device", "10 % faster", "one change"):
            assert heading in out
        assert "Why layout 2 takes" in out and "The command of layout 2" in out
        assert command_in(out) == command_in(found["layouts"][1]["command"])

    def test_figures(self, answer):
        explained, layout = answer[1]["explanation"], answer[1]["layouts"][1]
        assert explained["layout"] == 2
        spent = sum(item["seconds_per_step"] for item in explained["operations"])
        assert spent == pytest.approx(layout["step_seconds"])
        assert all(gain["step_seconds"] <= layout["step_seconds"] for gain in explained["ten_percent_faster"])
        for change in explained["one_change"]:
            if change["axes"] is not None:
                differs = {axis for axis, value in change["axes"].items() if value != layout["axes"][axis]}
                assert differs == set(change["changed"]) and change["axis"] in differs

    @pytest.mark.parametrize(
        ("own", "message"),
        [
            ("--tensor-model-parallel-size 3 --micro-batch-size 1", "the run would refuse these flags: world size 8"),
            ("--micro-batch-size 32 --global-batch-size 256", "do not fit: "),
            (
                "--tensor-model-parallel-size 8 --sequence-parallel --micro-batch-size 1 --use-distributed-optimizer",
                "the difference by part: tp +",
            ),
            ("--lora-rank 8 --micro-batch-size 1", "the run would refuse these flags: "),
        ],
    )
    def test_a_layout_of_the_users_own(self, capsys, own, message):
        space = FEW.replace("tp=1,2 pp=1,2", "tp=1 pp=1")
        code, out, _ = plan(capsys, "search", "--cluster", "h100:1x8", "--space", space, *MODEL, "--compare", own)
        assert code == 0 and message in out


class TestTry:
    """Layouts that are run, here with steps of made-up lengths."""

    def test_layouts_are_ranked_again(self, capsys, monkeypatch, tmp_path):
        tried = []

        def run(flags, world_size):
            tried.append((tuple(flags), world_size))
            if len(tried) == 2:
                raise ConfigError("a run of the layout ended with code 1: out of memory")
            return 9.0 if len(tried) == 1 else 0.5

        monkeypatch.setattr(try_runs, "try_layout", run)
        file = tmp_path / "found.json"
        code, out, _ = plan(capsys, *SEARCH, "--try", 3, "--json", file)
        found = json.loads(file.read_text(encoding="utf-8"))
        layouts, trial = found["layouts"], found["trial"]
        commands = [command_in(each["command"]) for each in layouts]
        assert code == 0 and tried == [(tuple(each), 8) for each in commands[:3]]
        first, third = (layouts[place]["step_seconds"] for place in (0, 2))
        factor = (9.0 / first * 0.5 / third) ** 0.5
        assert trial["measured_over_predicted"] == pytest.approx(factor)
        assert trial["fastest_first"][0] == 3 and trial["fastest_first"][-1] == 1
        assert trial["layouts"][3]["corrected_step_seconds"] == pytest.approx(factor * layouts[3]["step_seconds"])
        assert "The command of layout 3" in out and command_in(out) == commands[2]
        assert "layout 2 did not run: a run of the layout ended with code 1: out of memory" in out

    def test_no_layout_runs(self, capsys, monkeypatch):
        def run(flags, world_size):
            raise ConfigError("it ended with code 1")

        monkeypatch.setattr(try_runs, "try_layout", run)
        code, out, err = plan(capsys, *SEARCH, "--try", 1)
        assert code == 2 and not out and err.splitlines() == ["error: it ended with code 1"]


class TestFiles:
    def test_page(self, answer):
        page = answer[2]
        assert page.count('class="number"') == 4 and "tokens/s per GPU" in page and "76 GiB" in page
        assert "http" not in page, "it needs no other file"
        for layout in answer[1]["layouts"]:
            assert layout["words"].split(";")[0] in page

    def test_json(self, answer):
        found = answer[1]
        assert (
            len(found["layouts"]) == 4
            and found["memory_limit_gib"] == pytest.approx(0.95 * 80)
            and found["search"]["considered"] >= 8
        )
        for each in found["layouts"]:
            assert each["step_seconds"] == pytest.approx(sum(each["parts_seconds"].values()))
            assert each["step_seconds"] == pytest.approx(sum(each["groups_seconds"].values()))
            assert 0 < each["peak_memory_gib"] <= found["memory_limit_gib"] and Layout(**each["axes"])
            rate = each["tokens_per_second_per_device"] * 8
            assert each["days"] == pytest.approx(1e11 / rate / 86400)
            assert rate == pytest.approx(64 * 4096 / each["step_seconds"])

    def test_json_alone(self, capsys):
        space = FEW.replace("tp=1,2 pp=1,2", "tp=1 pp=1")
        _, out, _ = plan(capsys, "search", "--cluster", "h100:1x8", "--space", space, "--json", "-", *MODEL)
        assert json.loads(out)["layouts"][0]["days"] is None, "the length of the run is not known"

    def test_png(self, tmp_path):
        marks = [Mark(10.0 * number, 100.0 * number, f"layout {number}") for number in range(1, 9)]
        memory = np.linspace(1, 100, 50)
        picture = FrontPicture("a search", memory, 9 * memory, marks, marks, marks[4:7], 80.0)
        draw_front(tmp_path / "new" / "front.png", picture)
        assert (tmp_path / "new" / "front.png").read_bytes()[:4] == b"\x89PNG"

    def test_the_front_is_drawn_in_steps(self):
        front = [Mark(10, 5, ""), Mark(20, 8, ""), Mark(200, 9, "")]
        picture = FrontPicture("", np.array([10.0]), np.array([5.0]), front, front, front[:1], 100.0)
        assert picture.steps() == [(10, 5), (20, 5), (20, 8), (135, 8)]
        assert picture.cloud().sum() == 1

    def test_numbers_of_the_best_do_not_cover_each_other(self):
        best = [Mark(50.0, 9, ""), Mark(50.1, 8, ""), Mark(20, 7, "")]
        picture = FrontPicture("", np.array([10.0]), np.array([5.0]), best, best, best, 80.0)
        places = sorted(x for x, _ in picture.label_places())
        assert min(np.diff(places)) > 1.5 and picture.label_places()[2][0] == 20


BAD = [
    (("--cluster", "h1000", *MODEL), "unknown device 'h1000'; known are v100"),
    (("--cluster", "h100", *MODEL), "h100 does not say how many nodes there are; give h100:NODESx8, or --world-size"),
    (
        ("--cluster", "h100:4x8", "--world-size", 12, *MODEL),
        "--world-size 12 does not fill nodes of 8 h100; give 8 or 16",
    ),
    (("--cluster", "h100:1x8", "--world-size", 16, *MODEL), "a world of 16 ranks does not fit 1 nodes of 8 h100"),
    (("--cluster", "/nowhere.toml", *MODEL), "/nowhere.toml: No such file"),
    (("--cluster", "h100:1x8", *MODEL[:-2]), "give --global-batch-size"),
    (("--cluster", "h100:1x8", *MODEL[:-4], *MODEL[-2:]), "which is missing; give --seq-length"),
    (
        ("--cluster", "h100:1x8", *(w for w in MODEL if w not in ("--vocab-size", 32000))),
        "the size of the vocabulary is not known; give --vocab-size",
    ),
    (
        ("--cluster", "h100:1x8", *MODEL, "--tensor-model-parallel-size", 3),
        "no layout on 8 ranks is left; what would do: 4 instead of --tensor-model-parallel-size 3",
    ),
    (("--cluster", "h100:1x8", "--space", "tp=3", *MODEL), "what would do: 4 instead of --space tp=3"),
    (("--cluster", "h100:1x8", "--space", "tp=x", *MODEL), "'x' is no value of tp"),
    (
        ("--cluster", "h100:1x8", "--space", "tp=3 pp=5", *MODEL),
        "the flags exclude all layouts on 8 ranks, the plainest be",
    ),
    (("--cluster", "a100:1x8", "--fp8-format", "e4m3", *MODEL), "a100 has no fp8 products"),
    (("--cluster", "h100:1x8", "--front", "x.pdf", *MODEL), "--front x.pdf is neither a .png nor a .html file"),
    (("--cluster", "h100:1x8", "--space", FEW, "--explain", 9, *MODEL), "--explain 9: 4 layouts are printed"),
    (("--cluster", "h100:1x8", "--space", FEW, "--compare", "--bf16 '", *MODEL), "No closing quotation"),
    (("--cluster", "h100:1x8", "--json", "/", *MODEL), "--json / cannot be written: it is a folder"),
    (
        ("--cluster", "h100:1x8", "--num-experts", 8, "--overlap-moe-expert-parallel-comm", *MODEL),
        "--overlap-moe-expert-parallel-comm is not searched; leave it out",
    ),
    (("--cluster", "h100:2x8", "--try", 1, *MODEL), "--try 1 runs layouts on this host, and 16 ranks take 2 nodes"),
    (("--cluster", "h100:1x8", *MODEL, "--num-layers", 10**22), "--num-layers must be from 1 to 10000, got 1000"),
    (
        ("--cluster", "h100:1x8", "--global-batch-size", 64, "--load-hf", "/nowhere"),
        "no Hugging Face model is read here",
    ),
    (("--cluster", "h100:1x8", "--train-tokens", "-1", *MODEL), "--train-tokens: must be above 0"),
    (("--cluster", "h100:1x8", "--free-memory", 100, *MODEL), "--free-memory: must be at least 0 and below 100"),
]


@pytest.mark.parametrize(("words", "message"), BAD, ids=[message[:40] for _, message in BAD])
def test_bad_input(capsys, words, message):
    code, out, err = plan(capsys, "search", *words)
    assert code == 2 and out == ""
    assert message in err and err.count("\n") == 1


SMALL = 'nodes = 1\ndevices_per_node = 2\n[device]\nlike = "h100"\nmemory_gib = '


@pytest.mark.parametrize(
    ("memory", "words", "message"),
    [
        (
            9,
            (),
            r"no layout fits 9 GiB on 2 h100 of .*: the least is [\d.]+ GiB, [\d.]+ too much \(.*\); what would do: ",
        ),
        (16, ("--micro-batch-size", 16), r"what would do: 1 instead of --micro-batch-size 16"),
    ],
)
def test_when_nothing_fits(capsys, tmp_path, memory, words, message):
    (tmp_path / "c.toml").write_text(SMALL + str(memory), encoding="utf-8")
    space = f"tp=1 pp=1 {AXES} optimizer_offload=0 sharding=optim tp_overlap=on recompute=none"
    space = space.replace("micro_batch=1 ", "") if words else space
    code, out, err = plan(capsys, "search", "--cluster", tmp_path / "c.toml", "--space", space, *MODEL, *words)
    assert code == 2 and out == "" and err.count("\n") == 1
    assert re.search(message, err), err


def test_groups_cover_the_parts():
    assert sorted(part for members in GROUPS.values() for part in members) == sorted(PARTS)


def test_words():
    layout = Layout(tp=4, sequence_parallel=True, tp_overlap=True, pp=4, schedule="interleaved", virtual_stages=5)
    assert mesh_words(layout, 256) == "tp 4, pp 4 x 5, dp 16, micro batch 1"
    assert method_words(layout, 256) == "interleaved, tp overlapped, dp without ZeRO"
    assert method_words(Layout(), 1) == ""
    other = Layout(cp=2, cp_kind="a2a", sharding="optim_grads", recompute="full:4", offload=0.25, optimizer_offload=0.5)
    assert mesh_words(other, 8) == "cp 2, dp 4, micro batch 1"
    assert method_words(other, 8) == (
        "cp by a2a, ZeRO-2, recompute full of 4 layers per stage, 25% of activations on the host, "
        "50% of the optimizer on the host"
    )


def test_it_starts_without_torch():
    code = (
        "import runpy, sys; sys.argv = ['plan.py', *sys.argv[1:]]\n"
        "try: runpy.run_path('tools/plan.py', run_name='__main__')\n"
        "except SystemExit as end: assert end.code == 0, end.code\n"
        "assert 'torch' not in sys.modules and 'matplotlib' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, *map(str, SEARCH)], cwd=ROOT, check=True, capture_output=True)
