"""The server's flags, before it serves."""

import re
import resource
import runpy
from pathlib import Path

import pytest

from tests import pool
from tests.unit.inference.small import save_small


@pytest.fixture(scope="module")
def tool():
    path = Path(__file__).parents[4] / "tools" / "run_text_generation_server.py"
    return runpy.run_path(str(path), run_name="serve")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_small(pool.groups(), tmp_path_factory.mktemp("run"))


def test_connections_leave_half_of_the_files_to_others(tool, monkeypatch):
    limits = iter([1024, 200, resource.RLIM_INFINITY])
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (next(limits), 0))
    assert [tool["most_connections"](272) for _ in range(3)] == [512, 100, 608]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--port", "99999"), "--port: must be from 0 to 65535, got 99999"),
        (("--port", "-1"), "--port: must be from 0 to 65535, got -1"),
        (("--max-batch-size", "0"), "--max-batch-size: must be from 1 to .*, got 0"),
        (("--max-queue", "0"), "--max-queue: must be from 1 to .*, got 0"),
        (("--max-body-mb", "0"), "--max-body-mb: must be from 1 to .*, got 0"),
        (("--max-sequence-length", "0"), "--max-sequence-length: must be from 1 to .*, got 0"),
        (("--stop-id", "99"), "--stop-id 99 must be from 0 to 98"),
        (("--served-model-name", "\udcff"), "is not UTF-8"),
        (("--port", "0", "--max-batch-size", "100000000"), "cache of 100000000 requests of 64 tokens takes .* GB"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(tool, folder, capsys, flags, message):
    argv = ["--load", folder, "--device", "cpu", *flags]
    code = tool["run_tool"](tool["build_parser"](), tool["serve"], argv)
    err = capsys.readouterr().err
    assert code == 2 and err.count("error: ") == 1 and re.search(f"error: .*{message}", err.splitlines()[-1]), err
