"""Warm gloo worker processes for parallel tests: starting torch takes seconds per process, so each world starts once.

`run(4, fn, *args)` calls `fn(rank, world_size, *args)` in four processes and returns their results in rank order; `fn`
must be a module-level function. Inside, `groups(tp=2)` returns the process groups of a mesh over that world.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import multiprocessing
import os
import random
import signal
import socket
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import wait
from typing import Any

import torch
import torch.distributed as dist

from megatron.base.heartbeat import Heartbeat
from megatron.base.mesh import Mesh
from megatron.core.groups import Groups, create_groups, with_experts, with_shared_heads

# Of the process groups. It runs on for a message that is in flight when its processes are stopped, and gloo closes the
# connections of a group whose wait took longer; a test that hangs is ended by the timeout of `Pool.run` instead.
TIMEOUT_SECONDS = 24 * 3600.0
# For every use of multiprocessing's fork server: a process has only one, and the first use starts it. A process of a
# pool imports the files of the tests that it runs, and they import pytest, some transformers.
PRELOAD = [
    *("tests.warm", "torch.distributed", "megatron.training.setup", "tests.pool"),
    *("pytest", "transformers.modeling_utils"),
]
_POOLS: dict[int, Pool] = {}
_SET_PARENT_DEATH_SIGNAL = 1  # prctl's PR_SET_PDEATHSIG


class Pool:
    """`world_size` processes that have joined one gloo world and wait for functions.

    In between they are stopped: gloo's threads wake up a hundred times per second, which adds up over dozens of
    processes.
    """

    def __init__(self, world_size: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        port = free_port()
        self._processes, self._pipes = [], []
        for rank in range(world_size):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, world_size, port, there), daemon=True)
            process.start()
            self._processes.append(process)
            self._pipes.append(here)

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float = 120.0) -> list[Any]:
        """Returns the results in rank order. A failure in any rank raises here with every failed rank's traceback."""
        self._signal(signal.SIGCONT)
        for pipe in self._pipes:
            pipe.send((fn, args))
        results: dict[int, Any] = {}
        errors: dict[int, str] = {}
        deadline = time.monotonic() + timeout
        waiting = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        while waiting:
            for pipe in wait(waiting, 1.0):
                rank = waiting.pop(pipe)
                try:
                    ok, value = pipe.recv()
                except EOFError:
                    ok, value = False, f"process exited with {self._processes[rank].exitcode}"
                (results if ok else errors)[rank] = value
            # One failed rank leaves the others waiting in a collective: give them a moment to fail, too, then stop
            # waiting.
            if errors and time.monotonic() < deadline - 5:
                deadline = time.monotonic() + 5
            if time.monotonic() > deadline:
                break
        if len(results) < len(self._pipes):
            self.close()
            report = "\n".join(f"--- rank {rank}\n{text}" for rank, text in sorted(errors.items()))
            silent = [r for r in range(len(self._pipes)) if r not in results and r not in errors]
            raise AssertionError(f"{fn.__name__} failed; ranks without an answer: {silent}\n{report}")
        self._signal(signal.SIGSTOP)
        return [results[rank] for rank in range(len(self._pipes))]

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes:
            assert process.pid is not None
            os.kill(process.pid, number)

    def close(self) -> None:
        """Kills the processes."""
        for process in self._processes:
            process.kill()
        for size, pool in list(_POOLS.items()):
            if pool is self:
                del _POOLS[size]


def run(world_size: int, fn: Callable[..., Any], *args: Any, timeout: float = 120.0) -> list[Any]:
    """Runs `fn(rank, world_size, *args)` on a warm pool; a world of one runs in this process."""
    if world_size == 1:
        return [fn(0, 1, *args)]
    if world_size not in _POOLS:
        _POOLS[world_size] = Pool(world_size)
    return _POOLS[world_size].run(fn, *args, timeout=timeout)


def groups(
    tp: int = 1,
    cp: int = 1,
    pp: int = 1,
    ep: int = 1,
    etp: int | None = None,
    instances: int | None = None,
    inner: int = 1,
    holders: int = 1,
    experts: bool = False,
    contexts: tuple[int, ...] = (),
) -> Groups:
    """Returns the process groups of a mesh over this worker's world (cached: created once per mesh and process).

    `instances` is the number of instances of the sharded optimizer; None shards nothing. `inner` is the size of
    cp_inner, `holders` the size of tp_inner. `experts`: with the groups of a model with experts. `contexts`: sizes of
    groups that share a sequence in place of cp.
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    return _groups(
        Mesh.create(world, tp=tp, cp=cp, pp=pp, ep=ep, etp=etp), instances, inner, holders, experts, contexts
    )


@functools.cache
def _groups(
    mesh: Mesh, instances: int | None, inner: int, holders: int, experts: bool, contexts: tuple[int, ...]
) -> Groups:
    rank = dist.get_rank() if dist.is_initialized() else 0
    groups = create_groups(
        mesh,
        rank,
        Heartbeat(rank),
        TIMEOUT_SECONDS,
        optimizer_instances=instances,
        context_inner=inner,
        context_sizes=contexts,
    )
    groups = with_shared_heads(groups, holders, TIMEOUT_SECONDS)
    return with_experts(groups, TIMEOUT_SECONDS) if experts else groups


def free_port() -> int:
    """A free TCP port on loopback for processes that listen on it some time later.

    Nothing takes it in between: it is below the range from which Linux assigns ports to connections and to port 0, and
    each worker of pytest-xdist draws from a thousand ports of its own.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    while True:
        port = 20_000 + 1000 * (worker % 12) + random.SystemRandom().randrange(1000)
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", port))
            return port


def _serve(rank: int, world_size: int, port: int, pipe: Any) -> None:
    # A stopped process does not notice that the tests are killed: it ends with the fork server, which does.
    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    gc.freeze()  # 300,000 objects of imported modules, which every collection would walk through
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world_size))
    timeout = timedelta(seconds=TIMEOUT_SECONDS)
    dist.init_process_group("gloo", rank=rank, world_size=world_size, timeout=timeout)
    while True:
        try:
            fn, args = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, fn(rank, world_size, *args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))


@atexit.register
def _close_all() -> None:
    for pool in list(_POOLS.values()):
        pool.close()
