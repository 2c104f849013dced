"""The process of one host: it has imported all that a rank needs, and each rank is a fork of it.

So a run starts within a second, and not after the imports of all its ranks. Apart from that a rank is a process of
`pretrain_gpt.py`. Requests and answers: see `serve`.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import torch

import megatron.training.main  # noqa: F401  imports what a run imports
from benchmarks.cluster.fleet import ROOT
from benchmarks.cluster.stdio import run_worker
from benchmarks.planner.emulated.reference import measure_in_run


def serve(lines: Iterable[str], answer: Callable[[dict[str, object]], None], names: Sequence[str]) -> None:
    """Answers {"start": [a rank's `script`, `flags`, `environment`, `log`, `core`, `reference`]} with the processes'
    ids, and {"wait": ids} with their exit codes when all have ended.
    """
    answer({"ready": {name: name for name in names}})
    for line in lines:
        request: dict[str, Any] = json.loads(line)
        if "start" in request:
            answer({"measured": [start(**rank) for rank in request["start"]]})
        else:
            codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in request["wait"]]
            answer({"measured": codes})


def start(script: str, flags: list[str], environment: dict[str, str], log: str, core: int, *, reference: bool) -> int:
    """Returns the id of a new process that runs a script of the repository on a core. reference: see reference.py."""
    pid = os.fork()
    if not pid:
        _run(script, flags, environment, log, core, reference=reference)
    return pid


def _run(
    script: str, flags: list[str], environment: dict[str, str], log: str, core: int, *, reference: bool
) -> NoReturn:
    code = 1
    try:
        os.sched_setaffinity(0, {core})
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.environ.update(environment)
        torch.set_num_threads(1)
        if reference:
            measure_in_run(flags)
        sys.argv = [script, *flags]
        runpy.run_path(str(ROOT / script), run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    run_worker(__doc__, serve)
