"""What a program makes of an exception: a line and an exit code, or a traceback."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron.base.errors import CommError, ConfigError, DataError
from megatron.command_line.exits import as_user_error, check_output, exit_code

ABSURD = 2**55


def caught(work):
    with pytest.raises(Exception) as error:
        work()
    return error.value


@pytest.mark.parametrize(
    ("name", "reason"),
    [("none/x", "No such file or directory"), ("file/x", "Not a directory"), ("folder", "Is a directory"),
     ("loop", "Too many levels"), ("x" * 300, "File name too long")],
    ids=lambda value: value[:10],
)  # fmt: skip
def test_a_file_that_cannot_be_opened_is_named_with_the_reason(name, reason, tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    found = as_user_error(caught((tmp_path / name).open))
    assert str(found).startswith(f"{tmp_path / name}: {reason}") and not found.on_all_ranks


@pytest.mark.parametrize(
    ("ask", "amount"),
    [
        (lambda: torch.empty(ABSURD, dtype=torch.int8), rf"for {ABSURD // 10**6}\d+ bytes"),
        (lambda: torch.empty(2**40, 2**40), re.escape(f"for a tensor of [{2**40}, {2**40}]")),
        (lambda: np.empty(ABSURD, np.int8), "for 32.0 PiB"),
        (
            lambda: fail(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0")),
            "for 20.00 GiB",
        ),
    ],
)
def test_memory_that_is_not_there(ask, amount):
    """The amounts are patterns: torch may round what it asks for up."""
    assert re.search(f"not enough memory {amount}; ", str(as_user_error(caught(ask))))


def test_a_mistake_of_ours_is_none_of_the_users():
    errors = [
        ValueError("bad"),
        RuntimeError("mat1 and mat2 shapes"),
        KeyError("x"),
        OSError(104, "reset"),
        CommError(""),
    ]
    assert [as_user_error(error) for error in errors] == [None] * len(errors)
    assert str(as_user_error(OSError(28, "No space left on device"))).startswith("the disk: No space left on device; ")
    own = DataError("x.idx is damaged")
    assert as_user_error(own) is own and own.on_all_ranks


def fail(error):
    raise error


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ConfigError("--a 1 is wrong"), 2, "error: --a 1 is wrong\n"),
        (PermissionError(13, "Permission denied", "a.idx"), 2, "error: a.idx: Permission denied; "),
        (CommError("rank 1 is gone"), 1, "error on rank 0: rank 1 is gone\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_exit_code(error, code, line, capsys):
    assert exit_code(lambda: fail(error)) == code
    printed = capsys.readouterr()
    assert printed.err.startswith(line) and printed.err.count("\n") == bool(line) and printed.out == ""


def test_exit_code_of_work_that_ends():
    assert [exit_code(lambda: None), exit_code(lambda: 0), exit_code(lambda: 1)] == [0, 0, 1]
    with pytest.raises(ZeroDivisionError):
        exit_code(lambda: 1 // 0)


def test_other_ranks_leave_it_to_the_first_to_say(capsys):
    assert exit_code(lambda: fail(ConfigError("x")), 1) == 2
    assert capsys.readouterr().err == ""
    assert exit_code(lambda: fail(FileNotFoundError(2, "No such file", "only/here")), 1) == 2
    assert capsys.readouterr().err.startswith("error: only/here: No such file")


@pytest.mark.parametrize(
    ("name", "reason"), [("folder", "it is a folder"), ("file/x", "is not a folder"), ("loop", "no permission")]
)
def test_an_output_that_cannot_be_written(name, reason, tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(ConfigError, match=reason) as error:
        check_output("--png", str(tmp_path / name))
    assert str(error.value).startswith(f"--png {tmp_path / name} cannot be written: ")


def test_the_root_of_the_disk_is_a_folder():
    with pytest.raises(ConfigError, match="--json / cannot be written: it is a folder"):
        check_output("--json", "/")


def test_an_output_that_can_be_written(tmp_path):
    (tmp_path / "file").touch()
    for name in ("file", "new", "none/new"):
        check_output("--png", str(tmp_path / name))
    check_output("--png", None)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("other", ["rows.csv", "link.csv", "folder/../rows.csv"])
def test_an_input_is_not_written_over(tmp_path, other):
    """By any of its names, and before anything is written; a file that is not there yet is no input."""
    rows = tmp_path / "rows.csv"
    rows.write_text("id")
    (tmp_path / "link.csv").symlink_to(rows)
    (tmp_path / "folder").mkdir()
    inputs = {"--profile": None, "--cluster": "h100:1x8", "--rows": str(rows)}
    with pytest.raises(ConfigError, match="is the file of --rows, which would be lost; give another file"):
        check_output("--out", str(tmp_path / other), inputs)
    check_output("--out", str(tmp_path / "out.csv"), {**inputs, "--rows": str(tmp_path / "out.csv")})
    assert rows.read_text() == "id"


def start(code, **options):
    lines = ["import sys", "from megatron.command_line.exits import exit_code", f"sys.exit(exit_code({code}))"]
    return subprocess.Popen(
        [sys.executable, "-c", "\n".join(lines)],
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[3],
        **options,
    )


def test_a_reader_that_goes_away_is_no_traceback():
    reader, writer = os.pipe()
    os.close(reader)
    with start("lambda: print('x' * 10**6)", stdout=writer) as process:
        assert (process.communicate(timeout=60)[1], process.returncode) == ("", 141)
    with start("lambda: print('x')", stdout=writer) as process:  # which is written at the end only
        assert (process.communicate(timeout=60)[1], process.returncode) == ("", 141)
    os.close(writer)


def test_a_terminal_that_knows_ascii_alone_gets_escapes():
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    with start("lambda: print('größer')", stdout=subprocess.PIPE, env=environment) as process:
        assert process.communicate(timeout=60) == ("gr\\xf6\\xdfer\n", "")
