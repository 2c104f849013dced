"""JSON lines to `.bin/.idx`: the bytes, their independence of workers and blocks, and every way to fail."""

import gzip
import json
import logging
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import time

import pytest
from transformers import AutoTokenizer

from megatron.base.errors import ConfigError, DataError
from megatron.core.datasets import jsonl
from megatron.core.datasets import preprocess as preprocessing
from megatron.core.datasets.preprocess import PreprocessOptions, preprocess
from megatron.core.datasets.tokenizer import NullTokenizer
from tests.unit.datasets.helpers import INT32, UINT16, golden_pair, read_pair
from tests.unit.datasets.test_tokenizer import hugging_face_folder

EOD = 999


def write_lines(path, texts, **more):
    lines = "".join(json.dumps({"text": text, **more}) + "\n" for text in texts)
    path.write_bytes(gzip.compress(lines.encode()) if path.suffix == ".gz" else lines.encode())
    return str(path)


def run(tmp_path, inputs, tokenizer=None, **changes):
    settings = {"output_prefix": str(tmp_path / "out" / "set"), "workers": 1, **changes}
    return preprocess(PreprocessOptions(input=tuple(inputs), **settings), tokenizer or NullTokenizer(EOD + 1))


def output(tmp_path, key="text"):
    return read_pair(tmp_path / "out" / f"set_{key}_document")


def numbers(count):
    """Texts of NullTokenizer: document i has i mod 7 tokens, so some have none."""
    return [" ".join(str((i * 31 + k) % EOD) for k in range(i % 7)) for i in range(count)]


def golden(texts, eod, kind=UINT16):
    documents = [[int(word) for word in text.split()] for text in texts]
    return golden_pair([[document + [EOD] * eod] if document else [] for document in documents], kind)


@pytest.mark.parametrize("append_eod", [False, True])
@pytest.mark.parametrize("vocab_size, kind", [(1000, UINT16), (70000, INT32)])
def test_bytes_are_those_of_the_format(tmp_path, append_eod, vocab_size, kind):
    class Tokenizer(NullTokenizer):
        def __init__(self):
            super().__init__(vocab_size)
            self.eod = EOD

    texts = numbers(50)
    summary = run(tmp_path, [write_lines(tmp_path / "a.jsonl", texts)], Tokenizer(), append_eod=append_eod)
    assert output(tmp_path) == golden(texts, append_eod, kind)
    tokens = sum(i % 7 + (append_eod and i % 7 > 0) for i in range(50))
    assert (summary.documents, summary.tokens) == (50, tokens)
    assert summary.bytes == os.path.getsize(tmp_path / "a.jsonl")


@pytest.mark.parametrize("workers", [1, 2])
def test_output_is_in_the_order_of_the_input(tmp_path, monkeypatch, workers):
    monkeypatch.setattr(jsonl, "BLOCK_BYTES", 256)
    texts = numbers(300)
    files = [
        write_lines(tmp_path / "z.jsonl", texts[:100]),
        write_lines(tmp_path / "a1.jsonl", texts[100:170]),
        write_lines(tmp_path / "a2.jsonl.gz", texts[170:]),
    ]
    run(tmp_path, [files[0], f"{tmp_path}/a?.jsonl*"], workers=workers, append_eod=True)
    assert output(tmp_path) == golden(texts, True)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("partitions", [2, 3])
def test_partitions_are_dealt_as_megatron_deals_them(tmp_path, monkeypatch, workers, partitions):
    monkeypatch.setattr(jsonl, "BLOCK_BYTES", 256)
    texts = numbers(100)
    path = write_lines(tmp_path / "a.jsonl", texts)
    run(tmp_path, [path], workers=workers, partitions=partitions, append_eod=True)
    dealt = [text for part in range(partitions) for text in texts[part::partitions]]
    assert output(tmp_path) == golden(dealt, True)
    assert len(list((tmp_path / "out").iterdir())) == 2
    run(tmp_path, [path], workers=workers, partitions=partitions, append_eod=True, keep_sequential_samples=True)
    assert output(tmp_path) == golden(texts, True)


def test_several_keys_and_lists_of_texts(tmp_path):
    lines = [{"a": "1 2", "b": ["3", "", "4 5"]}, {"a": "", "b": []}, {"a": "6", "b": [""]}]
    (tmp_path / "x.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    run(tmp_path, [str(tmp_path / "x.jsonl")], json_keys=("a", "b"), append_eod=True)
    assert output(tmp_path, "a") == golden_pair([[[1, 2, EOD]], [], [[6, EOD]]], UINT16)
    assert output(tmp_path, "b") == golden_pair([[[3], [4, 5, EOD]], [], []], UINT16)
    assert len(list((tmp_path / "out").iterdir())) == 4


@pytest.mark.parametrize("compress", ["", ".gz"])
@pytest.mark.parametrize(
    "bad, message",
    [
        ('{"text": "1', r"is not JSON in UTF-8"),
        ('{"body": "1"}', r"has no key 'text', only body"),
        ('{"text": "1 1000"}', r"cannot be tokenized: token id 1000 is outside the vocabulary of 1000"),
    ],
)
def test_bad_line_is_named_and_nothing_is_left(tmp_path, monkeypatch, bad, message, compress):
    monkeypatch.setattr(jsonl, "BLOCK_BYTES", 200)
    lines = [json.dumps({"text": text}) for text in numbers(90)]
    lines[40], lines[77] = "", bad  # an empty line is no document, but counts as a line
    first, second = (f"{tmp_path}/{name}.jsonl{compress}" for name in "ab")
    for path, part in ((first, lines[:30]), (second, lines[30:])):
        data = "\n".join(part).encode()
        with open(path, "wb") as file:
            file.write(gzip.compress(data) if compress else data)
    with pytest.raises(DataError, match=rf"b\.jsonl{compress}, line 48: {message}"):
        run(tmp_path, [first, second], workers=2)
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("workers", [1, 2])
def test_bad_lines_are_skipped_and_counted(tmp_path, monkeypatch, workers):
    monkeypatch.setattr(jsonl, "BLOCK_BYTES", 200)
    good = numbers(60)
    lines = [json.dumps({"text": text}) for text in good]
    lines[20:20] = ['{"text": "1', '{"body": "1"}', '{"text": "1 1000"}', '{"text": "1001"}']
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    done = run(tmp_path, [str(tmp_path / "a.jsonl")], workers=workers, on_error="skip")
    assert output(tmp_path) == golden(good, False)
    assert (done.documents, done.skipped) == (60, 4)
    (tmp_path / "b.jsonl").write_text("\n".join(lines[20:24]))
    with pytest.raises(DataError, match="holds no documents; all of its 4 lines were skipped"):
        run(tmp_path, [str(tmp_path / "b.jsonl")], on_error="skip")


@pytest.mark.parametrize("partitions", [1, 3])
def test_what_a_killed_run_left_is_removed_and_what_a_living_one_writes_stays(tmp_path, partitions):
    """A run is killed in the middle, another stands still in the middle; then a third writes the same dataset."""
    path = write_lines(tmp_path / "a.jsonl", numbers(20))
    killed, living = (start_and_stop_in_the_middle(tmp_path, path, partitions) for _ in range(2))
    before = hidden(tmp_path)
    killed.kill()
    killed.join()
    try:
        assert hidden(tmp_path) == before, "the killed run left what it was writing"
        run(tmp_path, [path], partitions=partitions)
        left = hidden(tmp_path)
        assert left < before and len(left) == len(before) / 2
        assert all(f".{killed.pid}." not in name for name in left)
    finally:
        living.kill()
        living.join()
    run(tmp_path, [path], partitions=partitions)
    assert hidden(tmp_path) == set() and output(tmp_path)[0]


def start_and_stop_in_the_middle(tmp_path, path, partitions):
    """A process that has opened all its outputs and now waits."""
    context = multiprocessing.get_context("fork")
    reached = context.Event()

    def work():
        def wait(blocks, *others):
            reached.set()
            time.sleep(60)

        preprocessing.write_blocks = wait
        run(tmp_path, [path], partitions=partitions)

    process = context.Process(target=work)
    process.start()
    assert reached.wait(20)
    return process


def hidden(tmp_path):
    """Everything in the output's folder but the dataset, by its path there."""
    folder = tmp_path / "out"
    found = {str(path.relative_to(folder)) for path in folder.rglob("*")}
    return {name for name in found if name not in ("set_text_document.bin", "set_text_document.idx")}


def test_failure_keeps_what_was_there(tmp_path):
    run(tmp_path, [write_lines(tmp_path / "a.jsonl", ["1 2"])])
    before = output(tmp_path)
    (tmp_path / "b.jsonl").write_text('{"text": "3"}\n{')
    for partitions in (1, 2):
        with pytest.raises(DataError, match=r"b\.jsonl, line 2"):
            run(tmp_path, [str(tmp_path / "b.jsonl")], partitions=partitions)
        assert output(tmp_path) == before and len(list((tmp_path / "out").iterdir())) == 2


def test_no_documents_and_bad_options(tmp_path):
    (tmp_path / "a.jsonl").write_text("\n\n")
    with pytest.raises(DataError, match=r"--input .*a\.jsonl holds no documents"):
        run(tmp_path, [str(tmp_path / "a.jsonl")])
    assert list((tmp_path / "out").iterdir()) == []
    for flag in ("workers", "partitions", "log_interval"):
        with pytest.raises(ConfigError, match=f"--{flag.replace('_', '-')} is 0; give at least 1"):
            run(tmp_path, [str(tmp_path / "a.jsonl")], **{flag: 0})


def test_output_that_cannot_be_written(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", ["1"])
    for partitions in (1, 2):
        with pytest.raises(DataError, match=r"a\.jsonl"):
            run(tmp_path, [path], output_prefix=f"{path}/set", partitions=partitions)


class DyingTokenizer(NullTokenizer):
    """Its process is killed at the text "13", as the kernel does when memory runs out."""

    def encode(self, text):
        if text == "13":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().encode(text)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_killed_worker_ends_the_run(tmp_path, monkeypatch, workers):
    monkeypatch.setattr(jsonl, "BLOCK_BYTES", 64)
    path = write_lines(tmp_path / "a.jsonl", [str(i) for i in range(40)])
    with pytest.raises(DataError, match=rf"a worker process was killed: .*lower --workers, now {workers}"):
        run(tmp_path, [path], DyingTokenizer(1000), workers=workers)
    assert list((tmp_path / "out").iterdir()) == []


@pytest.fixture
def tool(capsys):
    """Runs a tool's main in this process; gives (exit code, stdout, stderr)."""
    logger = logging.getLogger("megatron")
    before = (list(logger.handlers), logger.level, logger.propagate)

    def call(name, *words):
        code = runpy.run_path(f"tools/{name}.py")["main"]([str(word) for word in words])
        return code, *capsys.readouterr()

    yield call
    logger.handlers[:], logger.level, logger.propagate = before


def test_tools(tmp_path, tool):
    texts = numbers(60)
    null = ["--tokenizer-type", "NullTokenizer", "--vocab-size", EOD + 1, "--workers", 2]
    for name, part in (("a", texts[:20]), ("b", texts[20:])):
        path = write_lines(tmp_path / f"{name}.jsonl", part)
        words = ["--input", path, "--output-prefix", tmp_path / "sets" / name, "--append-eod", "--log-interval", 10]
        code, out, err = tool("preprocess_data", *words, *null)
        assert (code, err) == (0, "") and f"wrote {len(part)} documents" in out and "docs/s" in out
    code, out, err = tool("merge_datasets", "--input", tmp_path / "sets", "--output-prefix", tmp_path / "all")
    assert (code, err) == (0, "") and "merged a_text_document, b_text_document" in out
    assert read_pair(tmp_path / "all") == golden(texts, True)


def test_special_tokens_of_a_hugging_face_tokenizer(tmp_path, tool):
    """As Megatron-LM's tool: those that the tokenizer puts around a text, unless they are switched off."""
    folder = hugging_face_folder(tmp_path / "hf", eos_token="</s>", bos_token="<s>")
    texts = ["the quick fox", "", "</s> jumps", "pack my box"]
    path = write_lines(tmp_path / "a.jsonl", texts)
    library = AutoTokenizer.from_pretrained(folder)
    words = ["--input", path, "--workers", 2, "--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", folder]
    for number, (more, included) in enumerate([([], True), (["--tokenizer-hf-no-include-special-tokens"], False)]):
        prefix = tmp_path / f"set{number}"
        code, _, err = tool("preprocess_data", *words, "--output-prefix", prefix, "--append-eod", *more)
        assert (code, err) == (0, "")
        documents = [library(text, add_special_tokens=included).input_ids for text in texts]
        assert all((ids[:1] == [0]) is included for ids in documents)
        expected = [[[*ids, library.eos_token_id]] if ids else [] for ids in documents]
        assert read_pair(f"{prefix}_text_document") == golden_pair(expected, UINT16)


def test_mistakes_on_the_command_line(tmp_path, tool):
    path = write_lines(tmp_path / "a.jsonl", ["1", "x"])
    common = ["--input", path, "--output-prefix", tmp_path / "set", "--workers", 1]
    for words, message in [
        ([*common, "--tokenizer-type", "NullTokenizer", "--vocab-size", 5], f"{path}, line 2: cannot be tokenized"),
        ([*common, "--tokenizer-type", "HuggingFaceTokenizer"], "--tokenizer-type HuggingFaceTokenizer needs --token"),
        ([*common, "--tokenizer-type", "Bert"], "--tokenizer-type: "),
        (common, "no tokenizer is given"),
        ([*common, "--vocab-file", "no", "--merge-file", path], "--vocab-file no does not exist"),
        (common[:-2], "the following "),
        ([*common, "--worker", 1], "unrecognized "),
    ]:
        code, out, err = tool("preprocess_data", *words)
        assert code == 2 and out == "" and err.startswith(f"error: {message}") and err.count("\n") == 1
    code, out, err = tool("merge_datasets", "--input", tmp_path, "--output-prefix", tmp_path / "all")
    assert code == 2 and err == f"error: --input {tmp_path} holds no .bin/.idx pair; give the folder of the datasets\n"
    assert [p.name for p in tmp_path.iterdir()] == ["a.jsonl"]


def test_exit_code_of_the_process(tmp_path):
    words = ["--input", f"{tmp_path}/none", "--output-prefix", f"{tmp_path}/set", "--workers", "1"]
    null = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "5"]
    done = subprocess.run([sys.executable, "tools/preprocess_data.py", *words, *null], capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith(f"error: --input {tmp_path}/none names no file") and done.stderr.count("\n") == 1
