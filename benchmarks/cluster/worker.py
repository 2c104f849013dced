"""The process of one host: builds the systems once, then measures on request, line by line.

Requests come as JSON lines on stdin and answers go as JSON lines to stdout; output of libraries goes to stderr.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from benchmarks.cluster.ours import ComputeOnly
from benchmarks.cluster.stdio import run_worker
from benchmarks.cluster.systems import System, build_system, make_batches
from megatron.base.launch import launch_environment
from megatron.base.mesh import Mesh
from megatron.core.comm.collectives import barrier
from megatron.core.groups import Group, connect, create_groups, disconnect
from megatron.training.batch import Batch

TIMEOUT_SECONDS = 600.0
SENT = Path("/sys/class/net/eth0/statistics/tx_bytes")
FIRST_STEPS = 2  # for every system, not measured: DDP and FSDP2 arrange their buckets then


@dataclass(frozen=True)
class Request:
    """Measures every system with this many microbatches per step: each round has a warm-up step and some timed ones."""

    accumulation: int
    rounds: list[int]  # timed steps of each round


@dataclass
class Measured:
    """One system on one rank."""

    seconds: list[float] = field(default_factory=list)  # of each timed step, from its start to the next one's
    sent: list[int] = field(default_factory=list)  # bytes per step, one figure per round
    loss: float = 0.0  # loss of the last step
    memory: int = 0  # bytes
    wire_bytes: float = 0.0  # bytes sent by the system's formula
    forward: float = 0.0  # compute only: seconds of one microbatch
    backward: float = 0.0


class Runner:
    """A system and its position in the batches."""

    def __init__(self, system: System, batches: Sequence[Batch]) -> None:
        self.system, self._batches, self._next = system, batches, 0

    def step(self, accumulation: int) -> float:
        """Trains on the next microbatches."""
        chosen = [self._batches[(self._next + n) % len(self._batches)] for n in range(accumulation)]
        self._next += accumulation
        return self.system.step(chosen)

    def round(self, accumulation: int, timed: int, world: Group, into: Measured) -> None:
        """Runs a warm-up step and `timed` timed ones without a pause. Collective over `world`.

        A step may leave communication to the next one, so it lasts until the next one starts; `finish` ends the last.
        """
        barrier(world)
        sent = int(SENT.read_text())
        self.step(accumulation)
        stamps = [time.perf_counter()]
        for number in range(timed):
            into.loss = self.step(accumulation)
            if number == timed - 1:
                self.system.finish()
            stamps.append(time.perf_counter())
        barrier(world)  # wait until all data of this rank is sent
        into.sent.append((int(SENT.read_text()) - sent) // (timed + 1))
        into.seconds += [end - start for start, end in itertools.pairwise(stamps)]


def measure(
    runners: dict[str, Runner], request: Request, world: Group, tell: Callable[[str], None]
) -> dict[str, object]:
    """Returns name -> figures of every system, alternating. Collective over `world`."""
    measured = {name: Measured() for name in runners}
    for number, timed in enumerate(request.rounds, 1):
        for name, runner in runners.items():
            tell(f"round {number}/{len(request.rounds)} {name}")
            runner.round(request.accumulation, timed, world, measured[name])
    for name, runner in runners.items():
        into = measured[name]
        into.memory = runner.system.memory()
        into.wire_bytes = runner.system.wire_bytes(request.accumulation)
        if isinstance(runner.system, ComputeOnly):
            into.forward, into.backward = runner.system.take_seconds()
    return {name: asdict(into) for name, into in measured.items()}


def serve(lines: Iterable[str], answer: Callable[[dict[str, object]], None], names: Sequence[str]) -> None:
    """Joins the world, builds, and measures for every line."""
    rank, world_size, _ = launch_environment()
    torch.manual_seed(0)
    heartbeat = connect(rank, world_size, backend="gloo", timeout_seconds=TIMEOUT_SECONDS)
    groups = create_groups(Mesh.create(world_size), rank, heartbeat, TIMEOUT_SECONDS)
    batches = make_batches(rank, 16)
    runners = {}
    for name in names:
        answer({"progress": f"building {name}"})
        runners[name] = Runner(build_system(name, groups), batches)
        for _ in range(FIRST_STEPS):
            runners[name].step(1)
        runners[name].system.finish()
    answer({"ready": {name: runner.system.title for name, runner in runners.items()}})
    for line in lines:
        request = Request(**json.loads(line))
        answer({"measured": measure(runners, request, groups.world, lambda text: answer({"progress": text}))})
    disconnect(heartbeat)


if __name__ == "__main__":
    run_worker(__doc__, serve)
