"""The reason that an attempt of a job leaves for the next one."""

import json
import os
import sys
import time

import psutil
import pytest

from megatron.command_line.last_attempt import FILE, leave_reason, reason_left


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    return tmp_path / "save"


def test_the_next_attempt_reads_it(folder):
    assert reason_left(str(folder)) is None
    leave_reason(str(folder), "error: a\nerror: b", 2)
    assert reason_left(str(folder)) == ("error: a\nerror: b", 2)
    assert os.listdir(folder) == [FILE]


def test_without_torchrun_or_a_folder_nothing_is_left(folder, monkeypatch):
    leave_reason(None, "error: a", 2)
    assert reason_left(None) is None
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    leave_reason(str(folder), "error: a", 2)
    assert not folder.exists()


@pytest.mark.parametrize(
    "change",
    [
        {"job": ["other", *sys.argv]},
        {"job": ["job", "pretrain_gpt.py"]},
        {"time": psutil.Process(os.getppid()).create_time() - 1},
    ],
)
def test_another_job_does_not_end_with_it(folder, change):
    """One with the same name is older than the launcher that started this process."""
    leave_reason(str(folder), "error: a", 2)
    left = json.loads((folder / FILE).read_text())
    assert abs(left["time"] - time.time()) < 60
    (folder / FILE).write_text(json.dumps(left | change))
    assert reason_left(str(folder)) is None


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", '{"job": "job"}', '{"job": ["job"], "time": "x"}', "[" * 10**5, "\xff"]
)
def test_a_damaged_reason_is_none(folder, text):
    folder.mkdir()
    (folder / FILE).write_bytes(text.encode("latin-1"))
    assert reason_left(str(folder)) is None


def test_a_folder_that_cannot_be_written(folder):
    folder.write_text("a file")
    leave_reason(str(folder), "error: a", 2)
    assert reason_left(str(folder)) is None
