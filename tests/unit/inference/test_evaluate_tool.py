import gzip
import importlib.util
import json
import re
import runpy
from pathlib import Path

import pytest

from megatron.core.datasets.tokenizer import NullTokenizer
from megatron.core.inference.score import score_texts
from tests import pool
from tests.unit.inference.small import LLAMA, save_small, small_model

ROOT = Path(__file__).parents[3]
TEXT = " ".join(str(i * 7 % 98) for i in range(90))
LINES = ["5 17 3", "60 61 62 63 64"]


@pytest.fixture(scope="module")
def tool():
    return runpy.run_path(str(ROOT / "tools" / "evaluate.py"), run_name="evaluate")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_small(pool.groups(), tmp_path_factory.mktemp("run"))


@pytest.fixture
def call(tool, folder, capsys):
    """(exit code, stdout, stderr) of the tool on the checkpoint."""

    def call(*flags):
        code = tool["run_tool"](tool["build_parser"](), tool["evaluate"], ["--load", folder, "--device", "cpu", *flags])
        found = capsys.readouterr()
        return code, found.out, found.err

    return call


def expected(texts, context, stride):
    """Training starts from these weights for seed 1234, as save_small's run does."""
    model, build = small_model(pool.groups(), seed=1234, **LLAMA)
    return score_texts(model, build, NullTokenizer(99), texts, context=context, stride=stride, batch_tokens=100)


def row(out, name):
    """The columns of a table's row after its name."""
    (line,) = [line for line in out.splitlines() if line.split()[:1] == [name]]
    return line.split()[1:]


def test_a_table_with_a_row_a_file_and_their_total(call, tmp_path):
    text, lines, output = tmp_path / "a.txt", tmp_path / "b.jsonl.gz", tmp_path / "out.json"
    text.write_text(TEXT)
    lines.write_bytes(gzip.compress(("\n".join(json.dumps({"body": x}) for x in LINES) + "\n").encode()))
    flags = ("--text", str(text), "--jsonl", str(lines), "--json-key", "body", "--output", str(output))
    code, out, err = call(*flags)
    assert code == 0, err
    scores = [expected([TEXT], 64, 32), expected(LINES, 64, 32)]
    tokens, nats = sum(s.tokens for s in scores), sum(s.nats for s in scores)
    assert "context 64, stride 32" in out
    assert row(out, str(text))[:3] == ["1", "90", str(len(TEXT))]
    assert row(out, str(lines))[:2] == ["2", "8"]
    assert row(out, "all")[:2] == ["3", "98"] and row(out, "all")[3] == f"{nats / tokens:.4f}"
    written = json.loads(output.read_text())["texts"]
    assert written[str(text)]["nats_per_token"] == pytest.approx(scores[0].loss, rel=1e-6)
    assert written[str(lines)]["bits_per_byte"] == pytest.approx(scores[1].bits_per_byte, rel=1e-6)


def test_context_and_stride_are_flags(call, tmp_path):
    text = tmp_path / "a.txt"
    text.write_text(TEXT)
    code, out, _ = call("--text", str(text), "--context-length", "20", "--stride", "5")
    assert code == 0 and "context 20, stride 5" in out
    assert row(out, str(text))[3] == f"{expected([TEXT], 20, 5).loss:.4f}"


def test_the_default_context_is_bounded(tool, tmp_path, capsys):
    """Of a model with 131,072 positions a document is read 4096 at a time."""
    folder = save_small(pool.groups(), tmp_path / "run", max_position_embeddings=131_072)
    text = tmp_path / "a.txt"
    text.write_text("5 17 3")
    code = tool["run_tool"](
        tool["build_parser"](), tool["evaluate"], ["--load", folder, "--device", "cpu", "--text", str(text)]
    )
    assert code == 0 and "context 4096, stride 2048" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "nothing to evaluate on; give --text, --jsonl or --tasks"),
        (("--text", "nowhere.txt"), "--text nowhere.txt is not a file"),
        (("--text", "{file}", "--stride", "65"), "--stride 65 .* at most the context of 64"),
        (("--text", "{file}", "--stride", "0"), "--stride: must be from 1 to .*, got 0"),
        (("--text", "{file}", "--context-length", "65"), "--context-length 65 is above .* 64; give 64 or less"),
        (("--text", "{file}", "--num-fewshot", "2"), "--num-fewshot has no effect without --tasks"),
        (("--text", "{file}", "--batch-tokens", "0"), "--batch-tokens: must be from 1 to .*, got 0"),
        (("--tasks", "x", "--num-fewshot", "-1"), "--num-fewshot: must be from 0 to .*, got -1"),
        (("--tasks", "x", "--limit", "0"), "--limit: must be from 1 to .*, got 0"),
        (("--text", "{file}", "--limit", "3"), "--limit has no effect without --tasks"),
        (("--text", "{file}", "--add-bos"), "no bos token"),
        (("--text", "{file}", "--tensor-model-parallel-size", "2"), "1 processes for .* 2 x .* 1; start 2"),
        (("--text", "{file}", "--pipeline-model-parallel-size", "2"), "1 processes for .* 2; start a multiple of 2"),
        (("--jsonl", "{file}"), r"line 1: is a JSON int|line 1: is not JSON"),
        (("--jsonl", "{deep}"), "line 1: is JSON that is nested too deeply"),
        (("--tasks", "x", "--stride", "2"), "--stride has no effect"),
        (("--text", "{latin}"), "cannot be read"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(call, tmp_path, flags, message):
    names = {"file": tmp_path / "file.txt", "latin": tmp_path / "latin.txt", "deep": tmp_path / "deep.jsonl"}
    names["file"].write_text("1 2 3\n")
    names["deep"].write_text('{"text": ' + "[" * 100_000 + "]" * 100_000 + "}\n")
    names["latin"].write_bytes(b"\xe9\xe8")
    code, out, err = call(*(flag.format(**names) for flag in flags))
    assert code == 2 and out == ""
    line = err.splitlines()[-1]
    assert line.startswith("error: ") and err.count("error: ") == 1
    assert re.search(message, line), err


@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is not None, reason="lm_eval is installed")
def test_tasks_without_the_harness(call):
    code, _, err = call("--tasks", "mine")
    assert code == 2 and err == "error: --tasks needs lm_eval; pip install 'megatron-patched[eval]'\n"
