"""Two ranks on one device, as processes that answer requests (rank.py)."""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import time
from typing import Any

from benchmarks.gpu.case import TOY_SECONDS, Setting
from benchmarks.gpu.driver import ROOT

START_SECONDS, ANSWER_SECONDS = 45.0, 25.0
# With these NCCL takes the ranks for two hosts that are connected by the loopback interface.
ONE_GPU = {
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_NET": "Socket",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MAX_CTAS": "2",
    "GLOO_SOCKET_IFNAME": "lo",
}


class Pair:
    """Starts its processes for the first request, and again for the request after a failure."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._seconds = TOY_SECONDS if setting.toy else ANSWER_SECONDS
        self._ranks: list[subprocess.Popen[str]] = []

    def ask(self, request: dict[str, Any]) -> list[dict[str, Any]]:
        """Returns both ranks' answers. Raises RuntimeError when one fails or does not answer in time."""
        try:
            if not self._ranks:
                self._ranks = [self._start(rank) for rank in range(2)]
                self._answers(max(self._seconds, START_SECONDS))
            line = json.dumps({**request, "port": free_port()}) + "\n"
            for process in self._ranks:
                assert process.stdin is not None
                process.stdin.write(line)
                process.stdin.flush()
            return self._answers(self._seconds)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Ends the processes."""
        for process in self._ranks:
            process.kill()
        for process in self._ranks:
            process.wait()
        self._ranks = []

    def _answers(self, seconds: float) -> list[dict[str, Any]]:
        answers: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + seconds
        while len(answers) < len(self._ranks):
            waiting = {process.stdout: rank for rank, process in enumerate(self._ranks) if rank not in answers}
            ready = select.select(list(waiting), [], [], max(0.0, deadline - time.monotonic()))[0]
            if not ready:
                silent = " and ".join(map(str, waiting.values()))
                raise RuntimeError(f"no answer from rank {silent} within {seconds:.0f} s")
            for stream in ready:
                line = stream.readline()
                answers[waiting[stream]] = json.loads(line) if line else {"error": "the process ended; see log.txt"}
            errors = [f"rank {rank}: {answers[rank]['error']}" for rank in sorted(answers) if "error" in answers[rank]]
            if errors:
                raise RuntimeError("; ".join(errors))
        return [answers[rank] for rank in range(len(self._ranks))]

    def _start(self, rank: int) -> subprocess.Popen[str]:
        """Starts a rank in this process's group, so that it ends with the part."""
        environment = {**os.environ, **ONE_GPU, "NCCL_HOSTID": f"rank{rank}", "OMP_NUM_THREADS": "1"}
        if self._setting.cuda:
            environment["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
        command = [sys.executable, "-m", "benchmarks.gpu.rank", str(rank), self._setting.device]
        return subprocess.Popen(
            command, cwd=ROOT, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )


def free_port() -> int:
    """Returns a free TCP port of the loopback interface."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
