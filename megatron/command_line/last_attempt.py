"""The end of a job's last attempt, where another one would end the same way. No torch.

torchrun with --max-restarts starts all ranks again after every error. Flags that cannot work and weights that are not
finite would end each attempt like the one before. So such an end leaves its reason in the folder of --save, and the
ranks of the next attempt end with it before they import torch.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import psutil

from megatron.base.write_file import replace_file

FILE = "last_attempt.json"


def leave_reason(folder: str | None, message: str, code: int) -> None:
    """Leaves the reason of this attempt's end, and its exit code, for the next one. `folder` is that of --save."""
    job = _job()
    if folder is None or job is None:
        return
    path = Path(folder, FILE)
    left = json.dumps({"job": job, "time": time.time(), "message": message, "code": code})
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, left.encode())
    except OSError:
        pass  # the next attempt finds out by itself


def reason_left(folder: str | None) -> tuple[str, int] | None:
    """Returns (message, exit code) that the last attempt of this job left, or None.

    A reason of an earlier job with the same name is older than the torchrun that started this process.
    """
    job = _job()
    if folder is None or job is None:
        return None
    try:
        left = json.loads(Path(folder, FILE).read_text(encoding="utf-8"))
        if left["job"] == job and left["time"] > psutil.Process(os.getppid()).create_time():
            return str(left["message"]), int(left["code"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError, psutil.Error):
        pass
    return None


def _job() -> list[str] | None:
    """Returns what all attempts of a job have in common: its name, which others may have, too, and its command line."""
    name = os.environ.get("TORCHELASTIC_RUN_ID")
    return None if name is None else [name, *sys.argv]
