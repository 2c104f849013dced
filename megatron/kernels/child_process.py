"""The child process of child_trial.py: tries, and leaves an answer. Without one its parent tells how it ended.

    python -m megatron.kernels.child_process FOLDER PARENT

FOLDER/work holds the trial, its device and whether algorithms are deterministic, pickled. PARENT is the process that
waits.
"""

from __future__ import annotations

import os
import pickle
import sys
import time
from pathlib import Path

import torch

from megatron.base.errors import first_line
from megatron.base.parent_process import end_with_parent
from megatron.kernels.child_answer import TrialAnswer, stamps, write


def main(folder: Path, parent: int) -> None:
    """Ends this process, without the exit handlers of the library."""
    end_with_parent(parent)
    trial, device, deterministic = pickle.loads((folder / "work").read_bytes())
    torch.use_deterministic_algorithms(deterministic)
    failure, files = None, dict[str, tuple[int, int]]()
    if _is_free(device):
        try:
            trial()
            files = stamps(_loaded())
        except Exception as error:
            failure = first_line(error)
    write(folder / "answer", TrialAnswer(failure, files, time.time()))
    os._exit(0)


def _is_free(device: torch.device) -> bool:
    """Makes a CUDA device the current one. False if this process gets no memory there: it is full or takes one
    process."""
    try:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        torch.zeros(1, device=device).item()
    except RuntimeError:
        return False
    return True


def _loaded() -> set[str]:
    """Returns the paths of the libraries that this process has loaded, also those that others have loaded."""
    lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    paths = {line[line.index("/") :] for line in lines if "/" in line}
    return {path for path in paths if ".so" in Path(path).name}


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
