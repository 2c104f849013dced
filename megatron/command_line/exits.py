"""Ends every program after an error: errors that the user can fix are one line, with an exit code."""

from __future__ import annotations

import errno
import io
import os
import re
import select
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TextIO

from megatron.base.errors import USER_ERROR_EXIT_CODE, CommError, ConfigError, UserError
from megatron.command_line.ending import as_lines

# Matched by message and not by torch's exception class, which is also a RuntimeError, because planning needs no torch.
_NO_MEMORY = re.compile(r"out of memory|can't allocate memory|bad_alloc|Storage size calculation overflowed", re.I)
CLOSED_PIPE_EXIT_CODE = 128 + 13  # as a shell reports a program that SIGPIPE has ended
_OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)


def as_user_error(error: BaseException) -> UserError | None:
    """Returns `error` as an error that the user can fix, or None.

    Such errors are a UserError, a file that the system rejects, and missing memory. This is the only place that
    converts errors of files: code that opens one catches OSError only if it can say more than the file and the reason.
    """
    if isinstance(error, UserError):
        return error
    user_error: UserError | None = None
    if isinstance(error, OSError) and isinstance(error.filename, str | bytes | os.PathLike):
        user_error = UserError(f"{os.fsdecode(error.filename)}: {error.strerror}; give another path, or fix this one")
    elif isinstance(error, OSError) and error.errno in _OF_THE_DISK:
        user_error = UserError(f"the disk: {error.strerror}; make room, or write elsewhere")
    elif _is_about_memory(error):
        user_error = UserError(
            f"there is not enough memory{_amount(str(error))}; reduce sizes or batches, or use more ranks: "
            "tools/plan.py memory prints the memory of a run"
        )
    if user_error is not None:
        user_error.on_all_ranks = False
        user_error.__cause__ = error
    return user_error


def exit_code(work: Callable[[], int | None], rank: int = 0) -> int:
    """Runs a tool's `work` on `rank`; returns its exit code, or 0 if it returns None.

    The code is 2 after a line on stderr for each mistake that the user can fix, 1 after one line for a lost rank, 130
    for Ctrl-C, and 141 if the reader of stdout has gone. Any other exception is raised. Characters that stdout cannot
    encode are written as escapes.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        code = work() or 0
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        if not _is_closed(sys.stdout):
            raise
        return CLOSED_PIPE_EXIT_CODE
    except CommError as error:
        print(f"error on rank {rank}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        user_error = as_user_error(error)
        if user_error is None:
            raise
        if rank == 0 or not user_error.on_all_ranks:
            print(as_lines(user_error), file=sys.stderr)
        return USER_ERROR_EXIT_CODE


def _is_closed(stdout: TextIO) -> bool:
    """Whether nobody reads stdout any more; what is left to write is then discarded."""
    poll = select.poll()
    poll.register(stdout.fileno(), select.POLLOUT)
    if not any(event & select.POLLERR for _, event in poll.poll(0)):
        return False
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stdout.fileno())
    os.close(nowhere)
    return True


def check_output(flag: str, path: str | None, inputs: Mapping[str, str | None] | None = None) -> None:
    """Raises ConfigError unless a file can be written at `path`, whose missing folders are created.

    inputs: the files that the program reads, by flag; none of them may be the one that is written. Call it before the
    work whose result is written there.
    """
    if path is None:
        return
    for name, other in (inputs or {}).items():
        if other is not None and os.path.exists(path) and os.path.exists(other) and os.path.samefile(path, other):
            raise ConfigError(f"{flag} {path} is the file of {name}, which would be lost; give another file")
    folder = next((parent for parent in Path(path).absolute().parents if parent.exists()), Path(path))
    if os.path.isdir(path):
        reason = "it is a folder"
    elif not folder.is_dir():
        reason = f"{folder} is not a folder"
    elif not os.access(path if os.path.lexists(path) else folder, os.W_OK):
        reason = "no permission"
    else:
        return
    raise ConfigError(f"{flag} {path} cannot be written: {reason}; give another file")


def _is_about_memory(error: BaseException) -> bool:
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and bool(_NO_MEMORY.search(str(error))))


def _amount(text: str) -> str:
    """Returns the requested amount of memory, if the message contains it."""
    match = re.search(r"allocate ([\d.]+ \w+)|sizes=(\[[^]]*\])", text)
    if match is None:
        return ""
    return f" for {match[1]}" if match[1] else f" for a tensor of {match[2]}"
