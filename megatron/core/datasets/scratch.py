"""Temporary files that tell whether their writer still lives.

A writer holds a lock on its file, and the system drops a lock with the process that held it, however that ended. So what
a killed run left behind is found by the next one: a file that can be locked. (A process id in a name would not tell: it
may be another host's, or a later process's.) Locks are POSIX's, which processes that are forked do not inherit and
which network file systems know; on one that does not, nothing is removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path
from typing import BinaryIO


def open_held(path: Path) -> BinaryIO:
    """A new file that is_left does not report for as long as this process has it open. Raises OSError."""
    # Locked before it has its name: nobody sees it without its lock.
    unnamed = path.with_name(f"{path.name}.new")
    file = open(unnamed, "wb")  # noqa: SIM115, the caller's
    with contextlib.suppress(OSError):
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.replace(unnamed, path)
    return file


def is_left(path: Path) -> bool:
    """Whether a file of open_held is there and its writer is gone. Not to be asked about files of this process."""
    try:
        with open(path, "r+b") as file:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
