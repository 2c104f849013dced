"""Blocks of whole lines, plain and compressed, and what is wrong with a line."""

import gzip
import itertools
import json

import pytest

from megatron.base.errors import DataError
from megatron.core.datasets import jsonl
from megatron.core.datasets.jsonl import find_inputs, parse_texts, read_blocks

LINES = [b"one", b"", b"a longer line than the block " * 3, b"four", b"f\rive", b"six" * 5]


@pytest.mark.parametrize("size", [1, 4, 7, 64, 1000])
@pytest.mark.parametrize("last_end", [b"\n", b""])
@pytest.mark.parametrize("name", ["x.jsonl", "x.jsonl.gz"])
def test_blocks_hold_whole_lines_in_order(tmp_path, monkeypatch, name, last_end, size):
    monkeypatch.setattr(jsonl, "BLOCK_BYTES", size)
    data = b"\n".join(LINES) + last_end
    path = tmp_path / name
    path.write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    blocks = list(read_blocks(str(path)))
    assert [line for block in blocks for line in block.lines()] == LINES
    assert blocks[0].start == 0 and blocks[-1].stop == len(data)
    assert all(a.stop == b.start for a, b in itertools.pairwise(blocks))
    assert len(blocks) == 1 if size == 1000 else len(blocks) > 1


def test_empty_files(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"")
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b""))
    assert not list(read_blocks(str(tmp_path / "a.jsonl"))) and not list(read_blocks(str(tmp_path / "a.jsonl.gz")))


@pytest.mark.parametrize(
    "data",
    [gzip.compress(b"x" * 99999)[:-20], b"no gzip", gzip.compress(b"x" * 9)[:-6] + b"abcdef"],
    ids=["cut short", "no gzip", "wrong checksum"],  # not the bytes, which hold the time
)
def test_damaged_gzip_is_named(tmp_path, data):
    (tmp_path / "a.jsonl.gz").write_bytes(data)
    with pytest.raises(DataError, match=r"a\.jsonl\.gz is not a whole gzip file: .*; copy it again"):
        list(read_blocks(str(tmp_path / "a.jsonl.gz")))


def test_find_inputs(tmp_path):
    for name in ("b.jsonl", "a.jsonl", "[odd].jsonl"):
        (tmp_path / name).write_text("")
    pattern, odd = f"{tmp_path}/?.jsonl", f"{tmp_path}/[odd].jsonl"
    assert find_inputs([odd, pattern]) == [odd, f"{tmp_path}/a.jsonl", f"{tmp_path}/b.jsonl"]
    with pytest.raises(DataError, match=r"--input .*/c\*\.jsonl names no file"):
        find_inputs([pattern, f"{tmp_path}/c*.jsonl"])


def test_parse_texts():
    line = json.dumps({"text": "a\u00e9\U0001f600", "parts": ["b", "c"], "n": 1}).encode()
    assert parse_texts(line, ("text",)) == [["a\u00e9\U0001f600"]]
    assert parse_texts(line, ("parts", "text")) == [["b", "c"], ["a\u00e9\U0001f600"]]


@pytest.mark.parametrize(
    "line, message",
    [
        (b"{", r"is not JSON in UTF-8 \(Expecting property name"),
        (b'{"text": "\xff"}', r"is not JSON in UTF-8 \('utf-8' codec can't decode byte 0xff"),
        (b'["text"]', "is a JSON list, not an object"),
        (b'{"body": "x", "id": 1}', "has no key 'text', only body, id; see --json-keys"),
        (b'{"text": 5}', "holds neither text nor a list of texts under 'text'"),
        (b'{"text": ["a", null]}', "holds neither text nor a list of texts under 'text'"),
        (rb'{"text": "ab\ud83d"}', r"holds half of a surrogate pair under 'text' \(character 2\)"),
    ],
)
def test_bad_lines(line, message):
    with pytest.raises(ValueError, match=message):
        parse_texts(line, ("text",))
