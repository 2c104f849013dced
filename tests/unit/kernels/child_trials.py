"""What child processes try in test_child_trial.py: libraries that work, fail, and end the process that uses them."""

import os
import signal
import sys
from functools import partial
from pathlib import Path

import torch

from megatron.kernels.child_trial import failure_in_child

CPU, LIBRARY = torch.device("cpu"), "torch"


def works(log=None):
    """log: a file that gets a line for each time."""
    if log is not None:
        with open(log, "a") as file:
            file.write("tried\n")


def multiplies():
    """Leaves what it computes on the current CUDA device."""
    x = torch.full((64, 64), 0.5, device="cuda")
    if not (x @ x).eq(16).all():
        raise RuntimeError("its results are wrong")


def deterministic():
    if not torch.are_deterministic_algorithms_enabled():
        raise RuntimeError("its algorithms are not deterministic")


def raises():
    raise RuntimeError("no kernel for heads of 64 channels\nand more")


def exits(code):
    """As the macro CHECK_CUDA of FlashAttention-3, which calls C's exit."""
    print("CUDA error (flash_fwd_launch_template.h:180): invalid device function\n", file=sys.stderr, flush=True)
    os._exit(code)


def crashes():
    os.kill(os.getpid(), signal.SIGSEGV)


def hangs(log=None):
    """log: a file that gets the number of the process."""
    if log is not None:
        Path(log).write_text(f"{os.getpid()}\n")
    while True:
        signal.pause()


def failure_of(rank, world, folder, log):
    """For a pool: what this rank learns from a trial."""
    return failure_in_child(partial(works, log), CPU, LIBRARY, folder=folder)


def wait_for_one_that_hangs(log, folder):
    """A rank that is ended during its trial."""
    failure_in_child(partial(hangs, log), CPU, LIBRARY, folder=Path(folder))
