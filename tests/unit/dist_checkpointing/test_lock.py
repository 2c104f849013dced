import errno
import fcntl
import json
import multiprocessing
import os

import pytest

from megatron.base.errors import CheckpointError
from megatron.core.dist_checkpointing import lock
from megatron.core.dist_checkpointing.lock import LOCK, hold


def in_child(work):
    """The value of `work()` in a forked process: a lock keeps other processes out, not its own."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=lambda: there.send(work()))
    process.start()
    process.join(20)
    return here.recv()


def attempt(folder):
    try:
        with hold(folder):
            return "held"
    except CheckpointError as error:
        return str(error)


def test_the_holder_is_named_until_it_lets_go(tmp_path):
    folder = tmp_path / "new" / "save"
    with hold(folder):
        said = in_child(lambda: attempt(folder))
        assert said.startswith(f"{folder} is in use by another job: process {os.getpid()} on ") and "\n" not in said
        assert json.loads((folder / LOCK).read_text())["pid"] == os.getpid()
    assert in_child(lambda: attempt(folder)) == "held"


def test_a_file_system_without_locks_is_warned_of(tmp_path, monkeypatch):
    def unsupported(*args):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "lockf", unsupported)
    said = []
    monkeypatch.setattr(lock.log, "warning", lambda text, *values: said.append(text % values))
    with hold(tmp_path):
        assert said == [f"{tmp_path} cannot be locked (No locks available): let no other job write there"]


@pytest.mark.parametrize("content", ["", "{}", "[1]", "\x00"])
def test_a_holder_that_has_not_written_its_name(tmp_path, content):
    with hold(tmp_path):
        os.truncate(tmp_path / LOCK, 0)  # opened by name: no descriptor of ours is closed
        if content:
            in_child(lambda: (tmp_path / LOCK).write_text(content))
        assert "lock.json does not name it" in in_child(lambda: attempt(tmp_path))
