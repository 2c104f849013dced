"""Writes a small file whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path


def replace_file(path: Path, content: bytes) -> None:
    """Replaces a file at once, so that no reader and no end of this process leaves a part of it. Raises OSError.

    Its folder exists. A link that somebody planted under the name of the temporary file is removed, and not followed.
    """
    temporary = path.with_name(f".{os.getpid()}.new")  # without the old name, by which others may look for files
    temporary.unlink(missing_ok=True)
    temporary.write_bytes(content)
    os.replace(temporary, path)
