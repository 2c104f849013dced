"""A real training job on emulated hosts: torchrun with one agent and one rank per host; records every rank's output."""

from __future__ import annotations

import contextlib
import shlex
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from benchmarks.cluster.fleet import PORT, ROOT, host_environment
from benchmarks.cluster.hosts import Cluster

# A few million parameters: large enough to measure a step's traffic, small enough for a slow link.
SHAPE = (
    "--num-layers 4 --hidden-size 192 --num-attention-heads 4 --ffn-hidden-size 512 --swiglu --normalization RMSNorm "
    "--position-embedding-type rope --disable-bias-linear --attention-dropout 0 --hidden-dropout 0 "
    "--untie-embeddings-and-output-weights --seq-length 128 --vocab-size 2048 --tokenizer-type NullTokenizer"
)
TRAINING = "--mock-data --micro-batch-size 2 --lr 1e-3 --lr-decay-style constant --log-interval 1 --eval-iters 0"


@dataclass
class Rank:
    """The agent and the rank of one host."""

    agent: subprocess.Popen[str]
    lines: list[tuple[float, str]] = field(default_factory=list)  # (monotonic seconds, printed line)
    started: bool = False  # the rank's process has been seen
    ended: float | None = None  # monotonic seconds when it had ended

    def look(self) -> None:
        """Records whether the rank's process runs: the agent's only child."""
        children = ""
        if self.agent.poll() is None:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                children = Path(f"/proc/{self.agent.pid}/task/{self.agent.pid}/children").read_text().strip()
        self.started |= bool(children)
        if self.ended is None and not children and (self.started or self.agent.poll() is not None):
            self.ended = time.monotonic()


class JobError(Exception):
    """A job did not reach an expected state."""


class Job:
    """A job with one rank per host of the cluster. A context manager; running processes are killed on exit."""

    def __init__(self, cluster: Cluster, python: str, flags: Sequence[str], *, iterations: int, timeout: float) -> None:
        """`timeout` is the limit for a collective in seconds (--distributed-timeout-minutes)."""
        self.cluster = cluster
        self.ranks: list[Rank] = []
        batch = str(2 * cluster.hosts)
        self._command = [python, "-m", "torch.distributed.run", "--nproc-per-node", "1", "--nnodes", str(cluster.hosts)]
        self._command += ["--master-addr", cluster.address(0), "--master-port", str(PORT), "--max-restarts", "0"]
        self._flags = [
            *shlex.split(f"{SHAPE} {TRAINING}"),
            "--global-batch-size",
            batch,
            "--train-iters",
            str(iterations),
        ]
        self._flags += ["--distributed-timeout-minutes", str(timeout / 60), "--device", "cpu", *flags]
        self._readers: list[threading.Thread] = []

    def __enter__(self) -> Job:
        for host in range(self.cluster.hosts):
            environment = host_environment(self.cluster, host, threads=1)
            for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):  # torchrun sets these
                del environment[name]
            command = [*self._command, "--node-rank", str(host), str(ROOT / "pretrain_gpt.py"), *self._flags]
            agent = subprocess.Popen(
                self.cluster.command(host, command),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                cwd=ROOT,
                env={**environment, "PYTHONUNBUFFERED": "1"},
            )
            rank = Rank(agent)
            self.ranks.append(rank)
            self._readers.append(threading.Thread(target=_read, args=(rank,), daemon=True))
            self._readers[-1].start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for rank in self.ranks:
            rank.agent.kill()
            rank.agent.wait()

    def wait_for(self, text: str, seconds: float) -> None:
        """Waits until rank 0 has printed `text`."""
        deadline = time.monotonic() + seconds
        while not any(text in said for _, said in self.ranks[0].lines):
            if self.ranks[0].agent.poll() is not None or time.monotonic() > deadline:
                raise JobError(f"rank 0 did not print {text!r} within {seconds:.0f} s; its last lines:\n{self.tail(0)}")
            time.sleep(0.02)

    def wait(self, seconds: float) -> bool:
        """Waits until every rank's process has ended (the agents may take longer); returns False if some still run."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            for rank in self.ranks:
                rank.look()
            if all(rank.ended is not None for rank in self.ranks):
                return True
            time.sleep(0.02)
        return False

    def tail(self, rank: int, count: int = 15) -> str:
        """Returns the last lines that a rank or its agent printed."""
        return "\n".join(text for _, text in self.ranks[rank].lines[-count:])


def _read(rank: Rank) -> None:
    assert rank.agent.stdout
    for text in rank.agent.stdout:
        rank.lines.append((time.monotonic(), text.rstrip()))
