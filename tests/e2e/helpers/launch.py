"""Runs of the training program as processes: ranks forked from a warm process, or under a real torchrun."""

import atexit
import functools
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from tests.pool import free_port

ROOT = Path(__file__).parents[3]


@dataclass
class Result:
    """How a run ended. stdout and stderr are by rank; under torchrun there is one of each."""

    codes: list[int]
    stdout: list[str]
    stderr: list[str]
    seconds: float  # from the start to the end of the last process

    @property
    def text(self):
        return "\n".join([*self.stdout, *self.stderr])


@dataclass
class Job:
    """Processes of one run. `text` reads what has been written so far."""

    pids: list[int]
    folder: Path
    started: float = field(default_factory=time.monotonic)
    codes: dict[int, int] = field(default_factory=dict)

    def text(self, rank=0, kind="out"):
        return (self.folder / f"{rank}.{kind}").read_text(errors="backslashreplace")

    def wait_for(self, text, rank=0, kind="out", timeout=60.0):
        """Until a rank has written `text`."""
        deadline = time.monotonic() + timeout
        while text not in self.text(rank, kind):
            assert not self.ended(), f"ended with {self.codes} before {text!r}\n{self._all_text()}"
            assert time.monotonic() < deadline, f"no {text!r} within {timeout} s\n{self._all_text()}"
            time.sleep(0.02)

    def wait(self, timeout=60.0):
        """The result. Processes that outlive the timeout are killed, and the test fails.

        As torchrun does: when a rank fails, the others get SIGTERM.
        """
        deadline, told = time.monotonic() + timeout, False
        while not self.ended():
            if any(self.codes.values()) and not told:
                told = True
                for rank in self._running():
                    os.kill(self.pids[rank], signal.SIGTERM)
            if time.monotonic() > deadline:
                left = self.kill()
                raise AssertionError(f"ranks {left} still ran after {timeout} s\n{self._all_text()}")
            time.sleep(0.02)
        ranks = range(len(self.pids))
        return Result(
            [self.codes[rank] for rank in ranks],
            [self.text(rank) for rank in ranks],
            [self.text(rank, "err") for rank in ranks],
            time.monotonic() - self.started,
        )

    def kill(self):
        """Kill what still runs; returns those ranks."""
        left = self._running()
        for rank in left:
            os.kill(self.pids[rank], signal.SIGKILL)
        while not self.ended():
            time.sleep(0.01)
        return left

    def _running(self):
        return [rank for rank in range(len(self.pids)) if rank not in self.codes]

    def ended(self):
        """Whether every process has ended."""
        for rank, pid in enumerate(self.pids):
            if rank not in self.codes:
                code = _ask({"poll": pid})
                if code is not None:
                    self.codes[rank] = code
        return len(self.codes) == len(self.pids)

    def _all_text(self):
        files = sorted(self.folder.glob("*.out")) + sorted(self.folder.glob("*.err"))
        return "\n".join(f"--- {path.name}\n{path.read_text()[-3000:]}" for path in files)


def start(argv, folder, world_size=1, driver=None, env=None):
    """Start `world_size` ranks that run the program, or `driver` ("module:function" of argv), and return at once."""
    folder.mkdir(parents=True, exist_ok=True)
    port, pids = str(free_port()), []
    for rank in range(world_size):
        own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
        own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1, **(env or {})}
        job = {
            "argv": [str(word) for word in argv],
            "env": {name: str(value) for name, value in own.items()},
            "out": str(folder / f"{rank}.out"),
            "err": str(folder / f"{rank}.err"),
            "driver": driver,
        }
        for path in (job["out"], job["err"]):
            Path(path).touch()
        pids.append(_ask(job))
    return Job(pids, folder)


def run(argv, folder, world_size=1, driver=None, env=None, timeout=60.0):
    """As `start`, waited for."""
    return start(argv, folder, world_size, driver, env).wait(timeout)


HF_TOKENIZER = "transformers.models.auto.tokenization_auto"  # what a run with a tokenizer of Hugging Face imports


@functools.cache
def warm(module):
    """Import a module into the process that ranks are forked from, once: importing it in every rank takes longer."""
    _ask({"import": module})


class Torchrun:
    """The program under a real torchrun."""

    def __init__(self, argv, folder, world_size, launcher_flags=()):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.started = time.monotonic()
        with open(folder / "0.out", "w") as out, open(folder / "0.err", "w") as err:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "torch.distributed.run"),
                    *("--nproc-per-node", str(world_size), "--master-port", str(free_port()), *launcher_flags),
                    *("pretrain_gpt.py", *map(str, argv)),
                ],
                cwd=ROOT,
                stdout=out,
                stderr=err,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        atexit.register(self.process.terminate)  # for a test that failed on the way; torchrun then ends its workers

    def text(self, kind="out"):
        return (self.folder / f"0.{kind}").read_text()

    def wait_for(self, text, timeout=120.0):
        """Until stdout holds `text`."""
        deadline = time.monotonic() + timeout
        while text not in self.text():
            ended = self.process.poll()
            assert ended is None, f"torchrun ended with {ended}\n{self.text()}\n{self.text('err')}"
            assert time.monotonic() < deadline, f"no {text!r} within {timeout} s\n{self.text()}\n{self.text('err')}"
            time.sleep(0.02)

    def wait(self, timeout=120.0):
        """The result, with torchrun's exit code."""
        code = self.process.wait(timeout)
        return Result([code], [self.text()], [self.text("err")], time.monotonic() - self.started)


def _ask(request):
    server = _server()
    server.stdin.write(json.dumps(request) + "\n")
    server.stdin.flush()
    return json.loads(server.stdout.readline())


@functools.cache
def _server():
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.e2e.helpers.zygote"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(process.stdin.close)  # it then ends, and its children with it
    return process
