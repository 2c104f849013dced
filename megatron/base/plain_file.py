"""Opens a file that the program itself keeps in a folder, and not what a symbolic link with its name points to."""

from __future__ import annotations

import errno
import os

from megatron.base.errors import UserError


def open_plain(path: str, flags: int) -> int:
    """An `opener` of `open`: others may write to the folder of a run, too, and nothing outside it may be overwritten.

    Raises UserError for a symbolic link, and OSError.
    """
    try:
        return os.open(path, flags | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise UserError(
            f"{path} is a symbolic link to {os.path.realpath(path)}, which would be overwritten; remove the link"
        ) from None
