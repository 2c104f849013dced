"""One of two ranks on one device: takes requests as JSON lines on stdin, and answers on stdout after a first line.

Each request is a job of its own, with its own rendezvous and process groups: they are made as a run makes them.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.case import Setting
from benchmarks.gpu.runs import DECODER, configured
from megatron.base.heartbeat import Call
from megatron.core.comm.collectives import all_gather
from megatron.core.device import synchronize
from megatron.core.groups import Groups, disconnect
from megatron.kernels.backends.cpu_allocator import CpuMemory
from megatron.training.process import start_process
from megatron.training.setup import build

WORLD, FEW_BYTES = 2, 64
# Less than the other side waits, so that an error names the collective.
TIMEOUT = {"cuda": "--distributed-timeout-minutes 0.25", "cpu": "--distributed-timeout-minutes 2"}


def main() -> None:
    """Answers until stdin ends. Output of libraries goes to stderr."""
    rank, device = int(sys.argv[1]), sys.argv[2]
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    setting = Setting(device, True, Path())
    works: dict[str, Callable[..., dict[str, Any]]] = {
        work.__name__: work for work in (train, overlap, gathers, contexts)
    }
    print(json.dumps({"ready": True}), file=answers)
    for line in sys.stdin:
        request = json.loads(line)
        work, port = works[request.pop("work")], request.pop("port")
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(WORLD))
        try:
            answer = work(rank, setting, **request)
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers)


def train(rank: int, setting: Setting, flags: str, steps: int) -> dict[str, Any]:
    """Trains some steps; returns their losses."""
    return {"losses": _train(rank, setting, flags, steps, lambda: None)}


def overlap(rank: int, setting: Setting, flags: str) -> dict[str, Any]:
    """Takes a step; returns the number of reductions that began before the last gradient arrived, and that of all."""
    groups, device = _join(rank, setting, flags)
    trainer = build(configured(f"{flags} {TIMEOUT[setting.device]}", setting, WORLD), groups, device)
    begun: list[int] = []
    with groups.heartbeat.record() as calls:
        for parameter in trainer.parameters.values():
            parameter.register_post_accumulate_grad_hook(lambda _: begun.append(_reductions(calls)))
        trainer.train_step()
    disconnect(groups.heartbeat)
    return {"early": begun[-1], "all": _reductions(calls)}


def _reductions(calls: list[Call]) -> int:
    """Returns the number of reductions of buckets: those of numbers are of few bytes."""
    return sum("reduce" in call.op and call.nbytes > FEW_BYTES for call in calls)


def contexts(rank: int, setting: Setting, flags: str, steps: int) -> dict[str, Any]:
    """Trains some steps; returns the number of GPUs that nvidia-smi lists this process on, and MiB in use on GPU 0."""
    found: dict[str, Any] = {}

    def look() -> None:
        listed = _nvidia_smi("--query-compute-apps=pid,gpu_uuid")
        found["gpus"] = sum(line.split(",")[0].strip() == str(os.getpid()) for line in listed)
        free, total = torch.cuda.mem_get_info(0)
        found["used_mib"] = (total - free) >> 20

    _train(rank, setting, flags, steps, look)
    return found


def gathers(rank: int, setting: Setting, count: int, nbytes: int) -> dict[str, Any]:
    """Gathers a tensor of `nbytes` again and again, and drops the results; returns the bytes that are still
    allocated."""
    groups, device = _join(rank, setting, f"{DECODER} --tensor-model-parallel-size {WORLD}")
    shard = torch.zeros(nbytes // 4 // WORLD, device=device)
    cpu = None if setting.cuda else CpuMemory()

    def allocated() -> int:
        gc.collect()
        synchronize(device)
        return torch.cuda.memory_allocated() if cpu is None else cpu.allocated

    all_gather(shard, groups.tp)
    before = allocated()
    for _ in range(count):
        all_gather(shard, groups.tp)
    held = allocated() - before
    disconnect(groups.heartbeat)
    return {"held": held}


def _train(rank: int, setting: Setting, flags: str, steps: int, at_end: Callable[[], None]) -> list[float]:
    groups, device = _join(rank, setting, flags)
    trainer = build(configured(f"{flags} {TIMEOUT[setting.device]}", setting, WORLD), groups, device)
    losses = [trainer.train_step().loss for _ in range(steps)]
    trainer.data_parallel.synchronize()
    at_end()
    disconnect(groups.heartbeat)
    return losses


def _join(rank: int, setting: Setting, flags: str) -> tuple[Groups, torch.device]:
    """Joins the other rank. Both have local rank 0: they share the device."""
    return start_process(
        configured(f"{flags} {TIMEOUT[setting.device]}", setting, WORLD).parallel, rank, WORLD, 0, WORLD
    )


def _nvidia_smi(query: str) -> list[str]:
    try:
        command = ["nvidia-smi", query, "--format=csv,noheader"]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return []


if __name__ == "__main__":
    main()
