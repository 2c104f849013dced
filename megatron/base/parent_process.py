"""Ends a child process together with its parent."""

from __future__ import annotations

import ctypes
import os
import signal

_SIGNAL_AT_PARENTS_END = 1  # PR_SET_PDEATHSIG of Linux


def end_with_parent(parent: int) -> None:
    """Lets the system kill this process as soon as the thread that started it ends, also while this process computes.

    `parent` is the process that started this one. If it has ended before, this process ends immediately.
    """
    ctypes.CDLL(None).prctl(_SIGNAL_AT_PARENTS_END, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
