"""Answers of trials in child processes, in files of this host, so that the next start and other ranks need no child.

A trial that worked holds for as long as no library that it loaded has changed. Any other answer holds for ten minutes:
long enough for the other ranks of the host and for a restart, and a GPU that was full or busy is then tried again. A
file that cannot be read or written is as none.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import importlib.util
import json
import os
import platform
import socket
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

import torch

from megatron.base.write_file import replace_file

_FEW_MINUTES, _POLL = 600.0, 0.1  # seconds
_DRIVER = Path("/proc/driver/nvidia/version")


class TrialAnswer(NamedTuple):
    """The answer of a trial. `failure` is None if nothing speaks against the library.

    files: path -> (bytes, time of the last change in ns) of the libraries that were loaded; empty unless the trial
    worked. time: when the answer was written, in seconds since 1970.
    """

    failure: str | None
    files: dict[str, tuple[int, int]]
    time: float

    def holds(self) -> bool:
        """Whether it is still the answer."""
        if self.files:
            return stamps(self.files) == self.files
        return 0.0 <= time.time() - self.time < _FEW_MINUTES


def cache_folder() -> Path:
    """Returns the folder of answers of this user."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):  # the specification has such a path ignored
        base = os.path.expanduser("~/.cache")
    # A user without a home folder has no cache: nothing can be written below a file.
    return Path(base if os.path.isabs(base) else os.devnull, "megatron-patched", "kernel-trials")


def answer_path(folder: Path, question: tuple[object, ...], device: torch.device, library: str) -> Path:
    """Returns the file of an answer. Its name depends on what was asked, and on the host, device, driver, torch,
    library and search paths."""
    spec = importlib.util.find_spec(library)
    origin = spec.origin if spec is not None else None
    names = [library] if origin is None else [library, origin, stamps([origin])]
    versions = [sys.executable, platform.python_version(), torch.__version__, torch.__file__]
    place = [_name(device), _driver(), os.environ.get("LD_LIBRARY_PATH")]
    key = hashlib.sha256(repr((question, names, versions, place)).encode()).hexdigest()[:32]
    return folder / f"{socket.gethostname()}-{key}.json"


def stamps(paths: Iterable[str]) -> dict[str, tuple[int, int]]:
    """Returns path -> (bytes, time of the last change in ns) of the files that are there."""
    changes = {}
    for path in paths:
        with contextlib.suppress(OSError):
            status = os.stat(path)
            changes[path] = (status.st_size, status.st_mtime_ns)
    return changes


def read(path: Path) -> TrialAnswer | None:
    """Returns the answer in a file, or None if there is none that holds."""
    try:
        failure, files, at = json.loads(path.read_bytes())
        answer = TrialAnswer(
            None if failure is None else str(failure),
            {str(name): (int(size), int(changed)) for name, (size, changed) in files.items()},
            float(at),
        )
    except Exception:  # missing, damaged, or of another version of this program
        return None
    return answer if answer.holds() else None


def write(path: Path, answer: TrialAnswer) -> None:
    """Writes the whole file or none."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, json.dumps(answer).encode())


@contextlib.contextmanager
def one_child(folder: Path, seconds: float) -> Iterator[None]:
    """Lets one process of this host at a time run the body, if files in `folder` can be locked. After `seconds` it
    waits no longer."""
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            _lock(held.enter_context(open(folder / f"{socket.gethostname()}.lock", "ab")), seconds)
        yield


def _lock(file: BinaryIO, seconds: float) -> None:
    """Raises OSError if the lock cannot be had in time. The system releases it when this process ends for any
    reason."""
    until = time.monotonic() + seconds
    while True:
        try:
            return fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN) or time.monotonic() > until:
                raise
        time.sleep(_POLL)


def _name(device: torch.device) -> str:
    """Not its number: the other devices of the same name have the same answer."""
    if device.type != "cuda":
        return device.type
    properties = torch.cuda.get_device_properties(device)
    return f"{properties.name}, sm_{properties.major}{properties.minor}"


def _driver() -> str:
    try:
        return _DRIVER.read_text(encoding="utf-8")
    except OSError:
        return ""
