"""Temporary files that show whether their writer is still alive.

A writer locks its file, and the system releases a lock when the process that holds it ends for any reason. So the next
run recognises the leftovers of a killed one: a file that can be locked. (A process id in a name would not be enough: it
may belong to another host or a later process.) The locks are POSIX locks, which forked processes do not inherit and
which network file systems support; on a file system without them nothing is removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path
from typing import BinaryIO


def open_held(path: Path) -> BinaryIO:
    """Opens a new file that is_left does not report as long as this process has it open. Raises OSError."""
    # Lock the file before it gets its name, so that no process sees it unlocked.
    unnamed = path.with_name(f"{path.name}.new")
    file = open(unnamed, "wb")  # noqa: SIM115, the caller's
    with contextlib.suppress(OSError):
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.replace(unnamed, path)
    return file


def is_left(path: Path) -> bool:
    """Returns whether a file of open_held exists and its writer is gone. Do not call it for files of this process."""
    try:
        with open(path, "r+b") as file:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
