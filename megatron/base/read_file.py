"""Reads small files that anybody may have written: whole, if they are files and small."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

MOST_BYTES = 2**30


def read_regular(path: Path, most: int = MOST_BYTES) -> bytes:
    """Returns the content of a file. Raises OSError, and ValueError for a pipe or a device, which may never end, and
    for more than `most` bytes.
    """
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError("it is not a regular file")
        content = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"it has more than {most} bytes")
    return content


def read_json(path: Path) -> Any:
    """Returns the content of a JSON file. Raises OSError, and ValueError for one that cannot be read as JSON."""
    return parse_json(read_regular(path))


def parse_json(text: str | bytes) -> Any:
    """Returns the value of a JSON text. Raises ValueError, also for one that is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
