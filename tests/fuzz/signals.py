"""A request to stop in every phase of a run: SIGTERM to torchrun, SIGUSR1 to one rank, and --exit-duration-in-mins.

Each phase is made long in the worker itself. Whenever the request comes, the job ends within 20 s with the documented
code: while it trains with a whole checkpoint of its last iteration, in set-up with the one before, untouched.

By hand: `python -m tests.fuzz.signals [PHASE ...]` prints a table of all phases and requests under torchrun with 2
ranks.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.base.launch import block_exit_signals
from megatron.command_line.entry import run_of
from megatron.core.dist_checkpointing import storage
from megatron.core.dist_checkpointing.folders import folder_name
from megatron.core.dist_checkpointing.store import verify
from megatron.core.models.hf import export as hf_export
from megatron.training import setup, trainer
from megatron.training.main import main
from tests.fuzz.campaign import Failure
from tests.pool import free_port

ROOT = Path(__file__).parents[2]
PHASE = "SLOW_PHASE"  # the variable that names the phase to a worker
LIMIT_SECONDS = 20.0
_LONG = 600.0
_SAVES = {"--save-interval": 3}
MODEL: dict[str, Any] = {
    "--num-layers": 2,
    "--hidden-size": 32,
    "--num-attention-heads": 4,
    "--position-embedding-type": "rope",
    "--swiglu": None,
    "--disable-bias-linear": None,
    "--normalization": "RMSNorm",
    "--seq-length": 16,
    "--micro-batch-size": 2,
    "--global-batch-size": 4,
    "--mock-data": None,
    "--tokenizer-type": "NullTokenizer",
    "--vocab-size": 64,
    "--lr": 1e-3,
    "--lr-decay-style": "constant",
    "--train-iters": 100000,
    "--save-interval": 100000,
    "--eval-iters": 0,
    "--log-interval": 1,
    "--num-workers": 0,
    "--device": "cpu",
}


@dataclass(frozen=True)
class Phase:
    """A phase of a run. begins: what a worker prints when it is there. flags: those that lead there. trains: whether
    training has begun, so that a new checkpoint is due. seconds: after which --exit-duration-in-mins ends the phase.
    """

    name: str
    begins: str
    trains: bool
    flags: dict[str, Any] = field(default_factory=dict)
    seconds: float = 12.0


_SLOW = "slow: "
PHASES = {
    phase.name: phase
    for phase in (
        Phase("import", "", trains=False, seconds=0.01),
        Phase("datasets", f"{_SLOW}datasets", trains=False),
        Phase("load", f"{_SLOW}load", trains=False),
        Phase("step", "iteration        5/", trains=True),
        Phase("evaluation", f"{_SLOW}evaluation", True, {"--eval-interval": 3, "--eval-iters": 100000}),
        Phase("save", f"{_SLOW}save", True, _SAVES),
        Phase("owed export", f"{_SLOW}export", False, {"--save-hf": "hf"}),
        Phase("export", f"{_SLOW}export", True, {**_SAVES, "--save-hf": "hf"}),
        Phase("last evaluation", f"{_SLOW}evaluation", True, {"--train-iters": 4, "--eval-iters": 100000}),
        Phase("evaluation only", f"{_SLOW}evaluation", False, {"--skip-train": None, "--eval-iters": 100000}),
    )
}
REQUESTS = ("SIGTERM", "SIGUSR1", "time limit")


def argv_of(phase: Phase, folder: Path, request: str) -> list[str]:
    """Returns the command line of the phase's run, which goes on from the checkpoint of `prepare`."""
    given = MODEL | {"--save": folder / "run", "--load": folder / "run"} | phase.flags
    if "--save-hf" in given:
        given["--save-hf"] = folder / "hf"
    if request == "time limit":
        given["--exit-duration-in-mins"] = phase.seconds / 60
    return [str(word) for name, value in given.items() for word in (name, value) if word is not None]


def slowed(argv: Sequence[str]) -> None:
    """Runs the program with the phase that the variable names made long."""
    phase, rank = os.environ[PHASE], os.environ["RANK"]

    def slow(module: Any, name: str, seconds: float, says: str, only: str | None = None) -> None:
        plain: Callable[..., Any] = getattr(module, name)

        def called(*arguments: Any, **keywords: Any) -> Any:
            print(_SLOW + says, flush=True)
            if only is None or rank == only:
                _sleep(seconds)
            return plain(*arguments, **keywords)

        setattr(module, name, called)

    if phase == "datasets":
        slow(setup, "build_readers", _LONG, "datasets", only="0")  # rank 1 waits in a collective
    elif phase == "load":
        slow(setup, "load_checkpoint", _LONG, "load", only="1")
    elif "evaluation" in phase:
        slow(trainer, "evaluate", 0.0, "evaluation")
    elif phase == "save":
        slow(storage, "write_tensor_file", 4.0, "save")
    elif "export" in phase:
        slow(hf_export, "gather", 1.0, "export")  # of some thirty tensors
    block_exit_signals()
    main(run_of(argv, description="test"))


def _sleep(seconds: float) -> None:
    """As work in Python does: a signal's handler may run, and the work goes on."""
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        time.sleep(min(left, 0.1))


@dataclass(frozen=True)
class Ended:
    """How a job ended. seconds: since the request; for the time limit since it was due, or the start of its phase."""

    code: int
    seconds: float
    newest: int
    text: str


def check(phase: Phase, request: str, ended: Ended, folder: Path, before: bytes) -> str:
    """Returns what became of the checkpoint. Raises Failure for a broken promise. before: the metadata of the old
    one."""
    if ended.seconds > LIMIT_SECONDS:
        raise Failure(f"{phase.name}, {request}: {ended.seconds:.0f} s\n{ended.text}")
    if ended.code != (1 if request == "SIGTERM" else 0):  # torchrun's own code after a signal is 1
        raise Failure(f"{phase.name}, {request}: exit code {ended.code}\n{ended.text}")
    newest = folder / "run" / folder_name(ended.newest)
    verify(newest)
    if not phase.trains:
        if ended.newest != 2 or (newest / "metadata.json").read_bytes() != before:
            raise Failure(f"{phase.name}, {request}: the checkpoint of iteration 2 is not as it was\n{ended.text}")
        return "untouched"
    trained = [int(number) for number in re.findall(r"iteration +(\d+)/", ended.text)]
    if ended.newest != max(trained):
        raise Failure(f"{phase.name}, {request}: iteration {ended.newest} is saved of {max(trained)}\n{ended.text}")
    return f"iteration {ended.newest}"


def prepare(folder: Path) -> bytes:
    """Trains two iterations in this process's place and returns the metadata of their checkpoint."""
    given = MODEL | {"--save": folder / "run", "--train-iters": 2}
    words = [str(word) for name, value in given.items() for word in (name, value) if word is not None]
    subprocess.run([sys.executable, "pretrain_gpt.py", *words], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return (folder / "run" / folder_name(2) / "metadata.json").read_bytes()


def under_torchrun(phase: Phase, request: str, folder: Path) -> Ended:
    """Runs the phase under torchrun with 2 ranks, and asks it to stop."""
    is_plain = phase.name in ("import", "step")
    program = ["pretrain_gpt.py"] if is_plain else ["-m", "tests.fuzz.signals"]
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--master-port",
        str(free_port()),
    ]
    log_path = folder / "log"
    with open(log_path, "w") as log:
        job = subprocess.Popen(
            [*launcher, *program, *argv_of(phase, folder, request)],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", PHASE: phase.name},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        workers = _wait(lambda: _children(job.pid) if len(_children(job.pid)) == 2 else None, job, log_path)
        began = time.monotonic()
        if phase.name == "import":  # from the first lines of the program on
            _wait(lambda: all(map(_blocks_signals, workers)) or None, job, log_path)
        else:
            _wait(lambda: phase.begins in log_path.read_text() or None, job, log_path)
        asked = time.monotonic()
        if request == "SIGTERM":
            job.send_signal(signal.SIGTERM)
        elif request == "SIGUSR1":
            os.kill(workers[-1], signal.SIGUSR1)
        else:
            asked = max(asked, began + phase.seconds)
        code = job.wait(timeout=120)
        seconds = time.monotonic() - asked
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
    tracker = (folder / "run" / "latest_checkpointed_iteration.txt").read_text()
    return Ended(code, max(seconds, 0.0), int(tracker), log_path.read_text())


def _children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _blocks_signals(pid: int) -> bool:
    masks = re.findall(r"^SigBlk:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.M)
    return bool(int(masks[0], 16) >> (signal.SIGTERM - 1) & 1)


def _wait(ask: Callable[[], Any], job: subprocess.Popen[bytes], log: Path) -> Any:
    deadline = time.monotonic() + 90
    while (answer := ask()) is None:
        if job.poll() is not None or time.monotonic() > deadline:
            raise Failure(f"the job ended with {job.poll()} before its phase\n{log.read_text()}")
        time.sleep(0.02)
    return answer


def table(names: Sequence[str]) -> None:
    """Prints a row for every phase and request."""
    print("| phase | request | seconds to the end | exit code of torchrun | newest checkpoint |")
    print("|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(prefix="signals-") as name:
        first = Path(name) / "first"
        before = prepare(first)
        for phase in (PHASES[each] for each in names or PHASES):
            for request in REQUESTS:
                folder = Path(name) / f"{phase.name} {request}"
                shutil.copytree(first, folder)
                if phase.name == "export":  # that of the first checkpoint is not owed
                    (folder / "hf" / folder_name(2)).mkdir(parents=True)
                ended = under_torchrun(phase, request, folder)
                kept = check(phase, request, ended, folder, before)
                print(f"| {phase.name} | {request} | {ended.seconds:.1f} | {ended.code} | {kept} |", flush=True)


if __name__ == "__main__":
    if PHASE in os.environ:
        slowed(sys.argv[1:])
    else:
        table(sys.argv[1:])
