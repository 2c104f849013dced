"""Ends a training process after an error: one rank prints it, to stderr and to torchrun. No torch."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import NoReturn

# A rank that does not print the error waits this long for the launcher to end it: rank 0 may start more slowly.
SILENT_SECONDS = 30.0


def end(message: str, code: int) -> NoReturn:
    """Prints the error to stderr, reports it to torchrun, and exits immediately.

    Tearing down process groups would wait for ranks that may never answer.
    """
    print(message, file=sys.stderr)
    _tell_torchrun(message)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def let_rank_0_speak(local_rank: int, code: int, seconds: float = SILENT_SECONDS) -> None:
    """Waits until the launcher ends this process, so that rank 0, which prints the error, ends first.

    The launcher ends all ranks when the first one ends. Returns on one rank of each host if that does not happen,
    because rank 0 may be on a host without the error.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    time.sleep(seconds)
    if local_rank != 0:
        os._exit(code)


def as_lines(error: BaseException) -> str:
    """Returns the messages of a user's mistakes, one line per mistake."""
    return "\n".join(f"error: {line}" for line in str(error).splitlines())


def _tell_torchrun(message: str) -> None:
    """Passes the message to torchrun, whose own report of the failure then quotes it.

    The file's format is that of torch.distributed.elastic.multiprocessing.errors.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    try:
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"message": {"message": message, "extraInfo": {"timestamp": str(int(time.time()))}}}, file)
    except OSError:
        pass  # the message is on stderr anyway
