"""Instruction data to tokens and masks: what is written, its independence of workers, and every way to fail."""

import dataclasses
import gzip
import json
import logging
import runpy

import numpy as np
import pytest

from megatron.base.errors import ConfigError, DataError
from megatron.config.data import TokenizerConfig
from megatron.core.datasets import jsonl
from megatron.core.datasets.sft import Conversations, template_of
from megatron.core.datasets.sft_preprocess import SFTOptions, preprocess_sft
from megatron.core.datasets.sft_records import parse_conversation
from megatron.core.datasets.sft_template import SFTTemplate
from megatron.core.datasets.tokenizer import NullTokenizer, build_tokenizer
from megatron.core.datasets.tokenizer_bpe import HuggingFaceTokenizer
from tests.unit.datasets.chat import CHATML, LLAMA3, messages, tokenizer_folder
from tests.unit.datasets.helpers import read_pair


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tokenizer_folder(tmp_path_factory.mktemp("tokenizer"), CHATML)


@pytest.fixture(scope="module")
def tokenizer(folder):
    return HuggingFaceTokenizer(folder)


def records(count):
    """The three formats in turn; record i has i words in its answer."""
    made = []
    for i in range(count):
        answer = " ".join(["fox"] * i)
        made.append(
            (
                {"messages": messages("the quick", answer)},
                {"conversations": [{"from": "human", "value": "the box"}, {"from": "gpt", "value": answer}]},
                {"instruction": "jugs", "input": str(i), "output": answer},
            )[i % 3]
        )
    return made


def write_lines(path, lines):
    text = "".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return str(path)


def run(tmp_path, tokenizer, inputs, **changes):
    settings = {"output_prefix": str(tmp_path / "out" / "chat"), "workers": 1, **changes}
    return preprocess_sft(SFTOptions(input=tuple(inputs), **settings), tokenizer)


def written(tmp_path):
    """[(tokens, mask)] of the conversations."""
    found = Conversations(str(tmp_path / "out" / "chat"))
    return [(found.tokens.get(i).tolist(), found.mask.get(i).tolist()) for i in range(len(found))]


def expected(tokenizer, given):
    template = SFTTemplate(tokenizer)
    pairs = [template.encode(parse_conversation(json.dumps(record).encode())) for record in given]
    return [(tokens, [int(mark) for mark in trained]) for tokens, trained in pairs]


@pytest.mark.parametrize("workers", [1, 2])
def test_conversations_in_the_order_of_the_input(tmp_path, monkeypatch, tokenizer, workers):
    monkeypatch.setattr(jsonl, "BLOCK_BYTES", 512)
    given = records(60)
    paths = [
        write_lines(tmp_path / "b.jsonl", [*given[:30], ""]),
        write_lines(tmp_path / "a.jsonl.gz", given[30:]),
    ]
    done = run(tmp_path, tokenizer, paths, workers=workers)
    found = written(tmp_path)
    assert found == expected(tokenizer, given)
    assert (done.conversations, done.dropped, done.truncated) == (60, 0, 0)
    assert done.tokens == sum(len(tokens) for tokens, _ in found)
    assert done.trained == sum(sum(mask) for _, mask in found)
    assert done.bytes == sum(len(json.dumps(record)) + 1 for record in given) + 1
    assert len(list((tmp_path / "out").iterdir())) == 4


def test_ids_are_int32_however_small_the_vocabulary(tmp_path, tokenizer):
    run(tmp_path, tokenizer, [write_lines(tmp_path / "a.jsonl", records(3))])
    found = Conversations(str(tmp_path / "out" / "chat"))
    assert (found.tokens.dtype, found.mask.dtype) == (np.dtype("<i4"), np.dtype("u1"))


@pytest.mark.parametrize("truncate", [False, True])
def test_conversations_that_are_too_long(tmp_path, monkeypatch, tokenizer, truncate):
    monkeypatch.setattr(jsonl, "BLOCK_BYTES", 512)
    given = records(40)
    given[20] = {"messages": messages("fox " * 50, "box")}  # cut to the length, nothing is left to train on
    whole, length = expected(tokenizer, given), 30
    path = write_lines(tmp_path / "a.jsonl", given)
    done = run(tmp_path, tokenizer, [path], seq_length=length, truncate=truncate)
    kept = [pair for pair in whole if len(pair[0]) <= length]
    longer = len(whole) - len(kept)
    assert 1 < longer < 39, "else this tests nothing"
    if truncate:
        kept = [(tokens[:length], mask[:length]) for tokens, mask in whole if any(mask[:length])]
        assert len(kept) == 39
    assert written(tmp_path) == kept
    assert (done.dropped, done.truncated) == ((1, longer - 1) if truncate else (longer, 0))


def test_another_template_is_kept_with_the_dataset(tmp_path, tokenizer, folder):
    (tmp_path / "llama.jinja").write_text(LLAMA3)
    path = write_lines(tmp_path / "a.jsonl", records(3))
    config = TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=folder)
    changed = build_tokenizer(dataclasses.replace(config, chat_template=str(tmp_path / "llama.jinja")), None)
    run(tmp_path, changed, [path])
    assert tokenizer.decode(written(tmp_path)[2][0]).endswith("fox fox<|eot_id|>")
    assert template_of([str(tmp_path / "out" / "chat")], None) == LLAMA3
    run(tmp_path, tokenizer, [path])
    assert template_of([str(tmp_path / "out" / "chat")], None) is None
    assert len(list((tmp_path / "out").iterdir())) == 4


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ('{"messages": [', "is not JSON"),
        ({"messages": messages("q")}, "has no turn of the assistant"),
        ({"messages": messages("q", "a")[1:]}, "begins with a turn of the assistant"),
    ],
)
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_bad_line_is_named_and_what_was_there_stays(tmp_path, monkeypatch, tokenizer, bad, says, suffix):
    monkeypatch.setattr(jsonl, "BLOCK_BYTES", 300)
    run(tmp_path, tokenizer, [write_lines(tmp_path / "good.jsonl", records(3))])
    before = [read_pair(tmp_path / "out" / name) for name in ("chat", "chat_mask")]
    given = records(50)
    first = write_lines(tmp_path / f"a.jsonl{suffix}", given[:20])
    second = write_lines(tmp_path / f"b.jsonl{suffix}", [*given[20:35], bad, *given[35:]])
    with pytest.raises(DataError, match=rf"b\.jsonl{suffix}, line 16: {says}"):
        run(tmp_path, tokenizer, [first, second], workers=2)
    assert [read_pair(tmp_path / "out" / name) for name in ("chat", "chat_mask")] == before
    assert len(list((tmp_path / "out").iterdir())) == 4


@pytest.mark.parametrize("workers", [1, 2])
def test_bad_conversations_are_skipped_and_counted(tmp_path, monkeypatch, tokenizer, messages_of, workers):
    monkeypatch.setattr(jsonl, "BLOCK_BYTES", 300)
    given = records(30)
    call = {"role": "assistant", "content": "", "tool_calls": [{"name": "f"}]}
    bad = ['{"messages": [', {"messages": messages("q")}, {"messages": [*messages("q"), call]}] * 2
    lines = [*given[:10], *bad[:3], *given[10:], "", *bad[3:], "not json"]
    done = run(tmp_path, tokenizer, [write_lines(tmp_path / "a.jsonl", lines)], workers=workers, on_error="skip")
    assert written(tmp_path) == expected(tokenizer, given)
    assert (done.conversations, done.skipped) == (30, 7)
    said = messages_of()
    assert len(said) == 6 and said[-1] == "skipped 7 lines of 37"
    assert "a.jsonl, line 11: is not JSON in UTF-8" in said[0] and "a.jsonl, line 12: has no turn" in said[1]
    assert "a.jsonl, line 13: has 'tool_calls' in turn 2, which the chat template leaves out" in said[2]
    with pytest.raises(DataError, match=r"line 11: is not JSON .*\(--on-error skip leaves such lines out"):
        run(tmp_path, tokenizer, [write_lines(tmp_path / "a.jsonl", lines)], workers=workers)
    with pytest.raises(DataError, match="holds no conversation to train on: all of its 6 lines were skipped"):
        run(tmp_path, tokenizer, [write_lines(tmp_path / "a.jsonl", bad)], on_error="skip")


@pytest.fixture
def messages_of(monkeypatch, caplog):
    """What the tree has logged as warnings."""
    monkeypatch.setattr(logging.getLogger("megatron"), "propagate", True)
    return lambda: [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_nothing_to_train_on(tmp_path, tokenizer):
    path = write_lines(tmp_path / "a.jsonl", [])
    with pytest.raises(DataError, match=r"a\.jsonl holds no conversation to train on: it is empty"):
        run(tmp_path, tokenizer, [path])
    path = write_lines(tmp_path / "a.jsonl", records(3))
    with pytest.raises(DataError, match="none of its 3 fits in --seq-length 4"):
        run(tmp_path, tokenizer, [path], seq_length=4)
    assert list((tmp_path / "out").iterdir()) == []


def test_options(tmp_path, tokenizer):
    path = write_lines(tmp_path / "a.jsonl", records(3))
    for changes, says in (
        ({"workers": 0}, "--workers is 0; give at least 1"),
        ({"log_interval": 0}, "--log-interval is 0; give at least 1"),
        ({"seq_length": 0}, "--seq-length is 0; give at least 2"),
        ({"truncate": True}, "--truncate has no effect without a length; give --seq-length"),
    ):
        with pytest.raises(ConfigError, match=says):
            run(tmp_path, tokenizer, [path], **changes)
    with pytest.raises(ConfigError, match="--tokenizer-type HuggingFaceTokenizer"):
        run(tmp_path, NullTokenizer(100), [path])
    with pytest.raises(DataError, match="names no file"):
        run(tmp_path, tokenizer, [str(tmp_path / "none")])


@pytest.fixture
def tool(capsys):
    """Runs the tool's main in this process; gives (exit code, stdout, stderr)."""
    logger = logging.getLogger("megatron")
    before = (list(logger.handlers), logger.level, logger.propagate)

    def call(*words):
        code = runpy.run_path("tools/preprocess_sft.py")["main"]([str(word) for word in words])
        return code, *capsys.readouterr()

    yield call
    logger.handlers[:], logger.level, logger.propagate = before


def test_the_tool(tmp_path, tool, folder):
    path = write_lines(tmp_path / "a.jsonl", records(30))
    common = ["--input", path, "--output-prefix", tmp_path / "chat", "--workers", 2]
    common += ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", folder]
    code, out, err = tool(*common, "--seq-length", 30)
    assert (code, err) == (0, "") and "tokens, " in out and "longer than --seq-length 30: " in out
    for words, says in (
        ([*common, "--truncate"], "error: --truncate has no effect"),
        ([*common[:-2], "--tokenizer-model", tmp_path / "none"], "error: --tokenizer-model"),
        (common[2:], "error: the following "),
        ([*common, "--seq-lenght", 3], "error: unrecognized "),
    ):
        code, out, err = tool(*words)
        assert code == 2 and out == "" and err.startswith(says) and err.count("\n") == 1
