"""Files that anybody may have written: pipes, devices, and JSON without end."""

import os

import pytest

from megatron.base.errors import CheckpointError
from megatron.base.read_file import parse_json, read_json, read_regular
from megatron.core.dist_checkpointing.folders import TRACKER, find
from megatron.core.models.hf.families import read_config
from megatron.core.models.mcore.source import MCoreSource


@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_what_is_no_file_is_not_read(tmp_path, kind):
    path = tmp_path / "config.json"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    with pytest.raises((ValueError, OSError)):
        read_json(path)
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read"):
        read_config(tmp_path)


def test_a_file_that_is_too_large(tmp_path):
    (tmp_path / "x").write_bytes(b"12345")
    assert read_regular(tmp_path / "x", 5) == b"12345"
    with pytest.raises(ValueError, match="it has more than 4 bytes"):
        read_regular(tmp_path / "x", 4)


@pytest.mark.parametrize("text", ["[" * 100_000, b"\xff{}", "{", "9" * 5000, '{"a": ' * 100_000])
def test_what_is_no_json(tmp_path, text):
    with pytest.raises(ValueError):
        parse_json(text)
    (tmp_path / "config.json").write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read"):
        read_config(tmp_path)


@pytest.mark.parametrize("content", ["9" * 5000, "pipe"])
def test_a_tracker_without_an_end(tmp_path, content):
    if content == "pipe":
        os.mkfifo(tmp_path / TRACKER)
    else:
        (tmp_path / TRACKER).write_text(content)
    for read in (lambda: find(tmp_path, None), lambda: MCoreSource(tmp_path, None, None)):
        with pytest.raises(CheckpointError, match=TRACKER):
            read()
