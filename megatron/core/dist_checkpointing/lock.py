"""One job at a time writes to a folder of checkpoints or exports.

[Note: the lock]
A POSIX record lock on FOLDER/lock.json. It belongs to the process, and the kernel gives it up when that ends, however it
ends: a restart finds the folder free at once, and there is no age to judge. Forked children do not have it, so a data
loader that outlives its run holds nothing. Between hosts it is as good as the file system's locks: NFS and Lustre forward
them unless mounted with `nolock` or `localflock`, and NFS keeps those of a lost host until its lease ends. The file says
who holds it, and stays: whoever deleted it could take it from under the next holder.
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

LOCK = "lock.json"
log = get_logger(__name__)


@contextlib.contextmanager
def hold(folder: Path) -> Iterator[None]:
    """Make `folder`, and let nobody else hold it within the body. At most once in a process.

    Raises CheckpointError naming the process that holds it; OSError when the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # Opened once: closing any other descriptor of the file would give the lock up.
    with open(folder / LOCK, "a+b", buffering=0) as file:
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
        return f"{file.name} does not say which"  # it has just begun
