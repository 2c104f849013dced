"""How a training process ends when something is wrong: said once for all ranks, to stderr and to torchrun. No torch."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import NoReturn

# A rank that others speak for waits this long for the launcher to end it: rank 0 may be slower to start.
SILENT_SECONDS = 30.0


def end(message: str, code: int) -> NoReturn:
    """Say why, on stderr and to torchrun, and end at once: tearing down process groups would wait for ranks that may never
    answer."""
    print(message, file=sys.stderr)
    _tell_torchrun(message)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def let_rank_0_speak(local_rank: int, code: int, seconds: float = SILENT_SECONDS) -> None:
    """Wait to be ended by the launcher, which ends all ranks when the first one ends: that must be the one that speaks.

    Returns if that does not happen (rank 0 may be on a host without the error), on one rank of each host.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    time.sleep(seconds)
    if local_rank != 0:
        os._exit(code)


def as_lines(error: BaseException) -> str:
    """The message of a user's mistakes, one line for each."""
    return "\n".join(f"error: {line}" for line in str(error).splitlines())


def _tell_torchrun(message: str) -> None:
    """Hand the message to torchrun, whose own report of the failure then quotes it.

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
