"""Tries kernels of a library from outside in a process of its own, before this process uses them.

A library may end the process that uses it: FlashAttention-3 calls C's exit where the GPU does not take its kernels, and
one that was built for another torch may crash. No exception tells of it, so a child process tries first. Its answer is
kept (child_answer.py), and ranks of a host that need the same answer wait for one child.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch

from megatron.kernels.child_answer import TrialAnswer, answer_path, cache_folder, one_child, read, write

SECONDS = 120.0  # until a child is ended: it imports torch, perhaps from a network file system, and the library
_CHILD, _ROOT = "megatron.kernels.child_process", Path(__file__).parents[2]
_LINE = 200  # characters of the child's last line that the start-up table shows


def failure_in_child(
    trial: partial[None],
    device: torch.device,
    library: str,
    *,
    folder: Path | None = None,
    seconds: float = SECONDS,
) -> str | None:
    """Returns why `library`, the name of an importable module, must not be used in this process, or None.

    trial: uses it on the current CUDA device, which is `device` in the child. If it raises an error, the first line is
    returned. It is pickled, and its arguments say what is tried: ranks of a host whose trials are equal get one answer.
    folder: holds the answers; if it cannot be written, each rank runs its own child. Also None if the child
    gets no memory on the device, for example where a GPU takes one process: this says nothing of the library.
    """
    folder = cache_folder() if folder is None else folder
    deterministic = torch.are_deterministic_algorithms_enabled()
    question = (trial.func.__module__, trial.func.__qualname__, trial.args, trial.keywords, deterministic)
    path = answer_path(folder, question, device, library)
    answer = read(path)
    if answer is None:
        with one_child(folder, 2 * seconds):
            answer = read(path)  # of the child that this one waited for
            if answer is None:
                answer = _run((trial, device, deterministic), seconds)
                write(path, answer)
    return answer.failure


def _run(work: tuple[partial[None], torch.device, bool], seconds: float) -> TrialAnswer:
    """Runs a child, and returns its answer, or how it ended without one."""
    try:
        with tempfile.TemporaryDirectory(prefix="megatron-trial-", ignore_cleanup_errors=True) as name:
            folder = Path(name)
            (folder / "work").write_bytes(pickle.dumps(work))
            how = _wait(folder, seconds)
            answer = read(folder / "answer")
            return answer or TrialAnswer(
                f"its trial in a process of its own {how}{_last_line(folder)}", {}, time.time()
            )
    except OSError as error:  # no process, or no space
        return TrialAnswer(f"its trial in a process of its own could not be started: {error.strerror}", {}, time.time())


def _wait(folder: Path, seconds: float) -> str:
    """Runs the child in `folder`, and returns how it ended."""
    # The child imports what this process would. A current folder with another `megatron` must not come first.
    paths = os.pathsep.join(os.path.abspath(path) for path in sys.path)
    command = [sys.executable, "-m", _CHILD, str(folder), str(os.getpid())]
    with open(folder / "output", "wb") as output:
        try:
            ended = subprocess.run(
                command, cwd=_ROOT, env=os.environ | {"PYTHONPATH": paths}, stdin=subprocess.DEVNULL,
                stdout=output, stderr=subprocess.STDOUT, timeout=seconds, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return f"took longer than {seconds:g} s"
    if ended.returncode >= 0:
        return f"ended with exit code {ended.returncode}"
    number = -ended.returncode
    with suppress(ValueError):
        return f"was ended by {signal.Signals(number).name}"
    return f"was ended by signal {number}"


def _last_line(folder: Path) -> str:
    text = (folder / "output").read_text(encoding="utf-8", errors="replace").strip()
    line = "".join(c for c in text.rpartition("\n")[2].strip() if c.isprintable())[:_LINE]
    return f": {line}" if line else ""
