"""A lock that lets only one job at a time write to a folder of checkpoints or exports.

[Note: the lock]
The lock is a POSIX record lock on FOLDER/lock.json. It belongs to the process, and the kernel releases it when the
process ends for any reason: a restart finds the folder free immediately, and no lock ever becomes stale. Forked
children do not inherit it, so a data loader that outlives its run holds nothing. Between hosts it is as reliable as the
file system's locks: NFS and Lustre forward them unless mounted with `nolock` or `localflock`, and NFS keeps the locks
of a lost host until its lease ends. The file names the holder and is never deleted, because deleting it could let two
jobs lock different files.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import BinaryIO

from megatron.base.errors import CheckpointError
from megatron.base.log import get_logger
from megatron.base.plain_file import open_plain

LOCK = "lock.json"
log = get_logger(__name__)


@contextlib.contextmanager
def hold(folder: Path) -> Iterator[None]:
    """Creates `folder` and holds its lock during the body. Use it at most once in a process.

    Raises CheckpointError naming the process that holds the lock; UserError if the lock is a symbolic link; OSError if
    the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # Open the file only once: closing any other descriptor of it would release the lock.
    with open(folder / LOCK, "a+b", buffering=0, opener=open_plain) as file:
        if _is_taken(file, folder):
            raise CheckpointError(
                f"{folder} is in use by another job: {_holder(file)}; end that job or give another folder. If it has "
                f"ended and only the file system of a lost host does not know, delete {folder / LOCK}"
            )
        file.truncate(0)
        me = {"host": socket.gethostname(), "pid": os.getpid(), "since": f"{datetime.now():%Y-%m-%d %H:%M:%S}"}
        file.write(json.dumps(me).encode() + b"\n")
        yield


def _is_taken(file: BinaryIO, folder: Path) -> bool:
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return True
        log.warning("%s cannot be locked (%s): let no other job write there", folder, error.strerror)
    return False


def _holder(file: BinaryIO) -> str:
    file.seek(0)
    try:
        holder = json.loads(file.read())
        return f"process {holder['pid']} on {holder['host']}, since {holder['since']}"
    except (ValueError, KeyError, TypeError):
        return f"{file.name} does not name it"  # the holder has just begun
