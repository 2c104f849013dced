"""The worker processes of a cluster, one per host, and the communication with them."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.cluster.hosts import Cluster

ROOT = Path(__file__).resolve().parents[2]
PORT = 29500
WORKER = "benchmarks.cluster.worker"


class FleetError(Exception):
    """A worker has ended or sent an unexpected answer."""


class Fleet:
    """Workers that have built their systems and wait for requests. A context manager; the cluster kills remaining
    ones."""

    def __init__(self, cluster: Cluster, systems: Sequence[str], python: str, logs: Path, module: str = WORKER) -> None:
        """`python` runs the workers, which are `module`; their output goes to files in `logs`."""
        self.cluster = cluster
        self.titles: dict[str, str] = {}
        self._systems, self._python, self._logs, self._module = list(systems), python, logs, module
        self._workers: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Fleet:
        hosts = self.cluster.hosts
        threads = max(1, (os.cpu_count() or 1) // hosts)
        self._logs.mkdir(parents=True, exist_ok=True)
        command = [
            self._python,
            "-m",
            self._module,
            "--threads",
            str(threads),
            "--systems",
            *self._systems,
        ]
        for rank in range(hosts):
            with open(self._log(rank), "w") as log:
                self._workers.append(
                    subprocess.Popen(
                        self.cluster.command(rank, command),
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=log,
                        text=True,
                        cwd=ROOT,
                        env=host_environment(self.cluster, rank, threads),
                    )
                )
        self.titles = self._answers("ready", f"{hosts} hosts")[0]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self._workers:
            assert worker.stdin
            with contextlib.suppress(BrokenPipeError):
                worker.stdin.close()
        for worker in self._workers:
            try:
                worker.wait(timeout=20 if error is None else 0)
            except subprocess.TimeoutExpired:
                worker.kill()
                worker.wait()

    def ask(self, request: dict[str, Any], where: str) -> list[dict[str, Any]]:
        """Sends a request to all workers; returns their answers in rank order. `where` is shown with the progress."""
        return self.ask_each([request] * len(self._workers), where)

    def ask_each(self, requests: Sequence[dict[str, Any]], where: str) -> list[Any]:
        """Sends each worker its own request; returns their answers. See `ask`."""
        for worker, request in zip(self._workers, requests, strict=True):
            assert worker.stdin
            worker.stdin.write(json.dumps(request) + "\n")
            worker.stdin.flush()
        return self._answers("measured", where)

    def _answers(self, key: str, where: str) -> list[Any]:
        found = []
        for rank, worker in enumerate(self._workers):
            assert worker.stdout
            for text in worker.stdout:
                said = json.loads(text)
                if key in said:
                    found.append(said[key])
                    break
                if rank == 0:
                    show_progress(f"{where}: {said['progress']}")
            else:
                tail = self._log(rank).read_text().strip().splitlines()[-1:]
                raise FleetError(f"rank {rank} ended ({' '.join(tail) or 'without a word'}); see {self._log(rank)}")
        show_progress("")
        return found

    def _log(self, rank: int) -> Path:
        return self._logs / f"rank_{rank}.log"


def host_environment(cluster: Cluster, rank: int, threads: int) -> dict[str, str]:
    """Returns the environment that a process on host `rank` needs to join the others, one process per host."""
    return {
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": str(cluster.hosts),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": cluster.address(0),
        "MASTER_PORT": str(PORT),
        "GLOO_SOCKET_IFNAME": "eth0",
        "OMP_NUM_THREADS": str(threads),
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }


def show_progress(text: str) -> None:
    """Shows one line that is overwritten, on a terminal only."""
    if sys.stderr.isatty():
        print(f"\r{text[:110]:110}", end="\r" if not text else "", file=sys.stderr, flush=True)
