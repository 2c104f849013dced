"""Pipeline schedules with sleeps for compute: the engine, the simulator and torch.distributed.pipelining.

Ranks are processes with gloo on this machine. A stage sleeps a fixed time in its forward and in each half of its
backward, and sends a small tensor; so a pipeline of 8 ranks runs on 2 cores, and the result shows the waits between
ranks and the engine's own cost. Both libraries run the same stages alternately, in the same processes. A step lasts
from the moment at which all ranks begin until the last one is done. Medians are shown.

Other programs on the machine disturb the result, because ranks wake up late. With --real-time they get a priority above
them, while using almost no CPU time.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import platform
import socket
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules

from megatron.base.heartbeat import Heartbeat
from megatron.base.mesh import Mesh
from megatron.core.comm.collectives import barrier, gather_objects
from megatron.core.comm.pipeline_messages import Mailbox
from megatron.core.groups import Groups, create_groups
from megatron.core.pipeline_parallel.engine import PipelineEngine
from megatron.core.streams.streams import Streams
from megatron.core.timeline import Timeline
from megatron.schedule.costs import Costs
from megatron.schedule.passes import with_transfers
from megatron.schedule.registry import SCHEDULES
from megatron.schedule.simulate import simulate
from megatron.schedule.spec import Times
from megatron.schedule.validate import memory_in_flight

CPU = torch.device("cpu")
SHAPE = (16,)
SPIN = 3e-4  # seconds at the end of a sleep
# Ours -> theirs. Their zero-bubble schedule with one stage a rank is the paper's ZB-H1, which it calls ZB1P.
THEIRS: dict[str, Any] = {
    "gpipe": schedules.ScheduleGPipe,
    "1f1b": schedules.Schedule1F1B,
    "interleaved": schedules.ScheduleInterleaved1F1B,
    "zb-h1": schedules.ScheduleInterleavedZeroBubble,
    "zb-v": schedules.ScheduleZBVZeroBubble,
}
HEADER = (
    "| p | m | schedule | simulated ms | ours ms | ours / simulated | bubble: formula | simulated | ours "
    "| kept: promised | ours | theirs | theirs ms | ours / theirs |"
)


@dataclass(frozen=True)
class Case:
    """One row of the table.

    `unit` is the time in seconds of F, I and W of a rank's layers for a microbatch, each. `group` is the group of
    microbatches in the interleaved schedule. `numbers` is the number of elements of a message.
    """

    p: int
    m: int
    name: str
    unit: float
    group: int | None = None
    numbers: int = SHAPE[0]

    @property
    def chunks(self) -> int:
        """Stages per rank: two where the schedule leaves the choice."""
        return SCHEDULES[self.name].virtual_stages or 2

    @property
    def stage_seconds(self) -> float:
        """Seconds of each of F, I and W of a stage."""
        return self.unit / self.chunks


@dataclass(frozen=True)
class Measured:
    """A step on one rank. `start` and `stop` are of a clock shared by all processes; `busy` is the time asleep in
    seconds.
    """

    start: float
    stop: float
    busy: float
    kept: int


class Work:
    """The work of a rank's stages, which sleep instead of computing, and its statistics."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.busy, self.alive, self.kept = seconds, 0.0, 0, 0

    def forward(self) -> None:
        """Runs F."""
        self._sleep()
        self.alive += 1
        self.kept = max(self.kept, self.alive)

    def input_grad(self) -> None:
        """Runs I, or the first half of B."""
        self._sleep()
        self.alive -= 1

    def weight_grad(self) -> None:
        """Runs W, or the second half of B."""
        self._sleep()

    def _sleep(self) -> None:
        started = time.perf_counter()
        # A process wakes up a tenth of a millisecond late, so busy waiting makes the end exact.
        time.sleep(max(0.0, self.seconds - SPIN))
        while time.perf_counter() < started + self.seconds:
            pass
        self.busy += time.perf_counter() - started


class Sleep(torch.autograd.Function):
    """Returns its input. The weight gives the first stage something to differentiate."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, work: Work) -> Tensor:
        """Runs F."""
        ctx.work = work
        work.forward()
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        """Runs I."""
        ctx.work.input_grad()
        return grads[0], grads[0].sum(), None


class Ours:
    """A Program of sleeping stages, and the step that runs it."""

    def __init__(self, case: Case, groups: Groups) -> None:
        computations = SCHEDULES[case.name].build(case.p, case.m, v=case.chunks, group=case.group)
        self._schedule = with_transfers(computations, overlap=True)
        self._groups, self._mailbox = groups, Mailbox(groups, Streams(CPU, Timeline(CPU)))
        self._last = case.p * case.chunks - 1
        self._weight = torch.zeros((), requires_grad=True)
        self._shape = (case.numbers,)
        self._input = torch.ones(self._shape)
        self.work = Work(case.stage_seconds)

    def step(self) -> None:
        """One training step."""
        self.work.kept = 0
        PipelineEngine(self._schedule, self._groups.pp.rank, self, self._mailbox, torch.float32, self).run()

    def forward(self, stage: int, microbatch: int, received: Tensor | None) -> Tensor:
        """Runs the forward of a stage; see Program."""
        out: Tensor = Sleep.apply(self._input if received is None else received, self._weight, self.work)
        return out.sum() if stage == self._last else out

    def backward(self, stage: int, microbatch: int, run: Callable[[], None], *, last: bool) -> None:
        """Runs the backward of a stage; see Program."""
        run()
        self.work.weight_grad()

    def input_grad(self, stage: int, microbatch: int, run: Callable[[], None]) -> None:
        """Runs the input gradient of a stage; see Program."""
        run()

    def weight_grad(self, stage: int, microbatch: int, *, last: bool) -> None:
        """Runs the weight gradient of a stage; see Program."""
        self.work.weight_grad()

    def shape(self, microbatch: int) -> tuple[int, ...]:
        """Returns the shape of a message; see Program."""
        return self._shape


class Theirs:
    """The same stages under torch.distributed.pipelining, which calls `dw_builder`'s function for W."""

    def __init__(self, case: Case, groups: Groups) -> None:
        self.work = Work(case.stage_seconds)
        chunks, rank, p = case.chunks, groups.pp.rank, case.p
        numbers = [rank, 2 * p - 1 - rank] if case.name == "zb-v" else [rank + p * chunk for chunk in range(chunks)]
        example = torch.zeros(1, *SHAPE)
        stages = [
            PipelineStage(
                _Stage(self.work),
                number,
                p * chunks,
                CPU,
                input_args=example.clone().requires_grad_(number > 0),
                output_args=example.clone().requires_grad_(),
                group=groups.pp.process_group,
                dw_builder=lambda: self.work.weight_grad,
            )
            for number in numbers
        ]
        single = case.name in ("gpipe", "1f1b")
        self._schedule = THEIRS[case.name](
            stages[0] if single else stages, case.m, loss_fn=lambda out, target: out.sum(), scale_grads=False
        )
        self._arguments = (torch.ones(case.m, *SHAPE),) if rank == 0 else ()
        has_loss = numbers[-1] == p * chunks - 1
        self._target = torch.zeros(case.m, *SHAPE) if has_loss else None

    def step(self) -> None:
        """Runs one training step."""
        self.work.kept = 0
        losses: list[Tensor] | None = None if self._target is None else []
        self._schedule.step(*self._arguments, target=self._target, losses=losses, return_outputs=False)


class _Stage(nn.Module):
    def __init__(self, work: Work) -> None:
        super().__init__()
        self.weight, self._work = nn.Parameter(torch.zeros(())), work

    def forward(self, x: Tensor) -> Tensor:
        return Sleep.apply(x, self.weight, self._work)


def measure(side: Ours | Theirs, groups: Groups) -> Measured:
    """Measures one step that begins on all ranks together."""
    side.work.busy = 0.0
    barrier(groups.pp)
    start = time.perf_counter()
    side.step()
    return Measured(start, time.perf_counter(), side.work.busy, side.work.kept)


class Step:
    """The combined result of all ranks for one step."""

    def __init__(self, ranks: list[Measured]) -> None:
        self.seconds = max(rank.stop for rank in ranks) - min(rank.start for rank in ranks)
        self.bubble = 1 - statistics.mean(rank.busy for rank in ranks) / self.seconds
        self.kept = [rank.kept for rank in ranks]


def rounds_of(case: Case, groups: Groups, rounds: int) -> list[tuple[Step, Step]]:
    """Measures both libraries alternately, after a warm-up round."""
    sides = Ours(case, groups), Theirs(case, groups)
    found = []
    for _ in range(rounds + 1):
        ours, theirs = (Step(gather_objects(measure(side, groups), groups.pp)) for side in sides)
        found.append((ours, theirs))
    return found[1:]


def row(case: Case, rounds: list[tuple[Step, Step]]) -> str:
    """A line of the table."""
    computations = SCHEDULES[case.name].build(case.p, case.m, v=case.chunks)
    f = case.stage_seconds
    played = simulate(computations, Costs.uniform(case.p * case.chunks, forward=f, input_grad=f, weight_grad=f))
    ours, theirs = (statistics.median(pair[side].seconds for pair in rounds) for side in (0, 1))
    ratio = statistics.median(pair[0].seconds / pair[1].seconds for pair in rounds)
    bubble = statistics.median(pair[0].bubble for pair in rounds)
    simulated_bubble = statistics.mean(played.bubble(rank) for rank in range(case.p))
    promised = [rank.awaiting_input_grad for rank in memory_in_flight(computations)]
    cells = (
        f"{case.p} | {case.m} | {case.name} | {played.makespan * 1e3:.0f} | {ours * 1e3:.1f} | "
        f"{ours / played.makespan:.3f} | {formula(case):.1%} | {simulated_bubble:.1%} | {bubble:.1%} | "
        f"{_listed(promised)} | {_listed(rounds[0][0].kept)} | {_listed(rounds[0][1].kept)} | {theirs * 1e3:.1f} | "
        f"{ratio:.3f}"
    )
    return f"| {cells} |"


def formula(case: Case) -> float:
    """Idle share of a step with F = I = W and m >= p, as docs/pipeline.md has it; NaN for other m."""
    spec = SCHEDULES[case.name]
    found = spec.bubble(spec.sizes(case.p, case.m, case.chunks), Times(case.unit, case.unit, case.unit))
    return math.nan if found is None else found.value


def _listed(numbers: list[int]) -> str:
    return " ".join(map(str, numbers)) if len(set(numbers)) > 1 else str(numbers[0])


def worker(rank: int, p: int, port: int, cases: list[Case], rounds: int, real_time: bool, pipe: Connection) -> None:
    """Runs a rank of all cases of one size. The first rank sends a row for each."""
    if real_time:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))  # before gloo creates its threads, which inherit it
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(p))
    dist.init_process_group("gloo", rank=rank, world_size=p)
    groups = create_groups(Mesh.create(p, pp=p), rank, Heartbeat(rank), 60.0)
    for case in cases:
        found = rounds_of(case, groups, rounds)
        if rank == 0:
            pipe.send(row(case, found))
    dist.destroy_process_group()


def run(p: int, cases: list[Case], rounds: int, real_time: bool) -> None:
    """Prints the rows of one size."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed.pipelining", "megatron.core.comm.pipeline_messages"])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    here, there = context.Pipe()
    processes = [
        context.Process(target=worker, args=(rank, p, port, cases, rounds, real_time, there), daemon=True)
        for rank in range(p)
    ]
    for process in processes:
        process.start()
    for _ in cases:
        while not here.poll(1.0):
            if any(process.exitcode for process in processes):
                raise SystemExit("a rank failed; its error is above")
        print(here.recv(), flush=True)
    for process in processes:
        process.join()


def main() -> None:
    """Prints one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--sizes", nargs="+", default=["4x8", "4x16", "8x16"], metavar="PxM", help="ranks x microbatches"
    )
    parser.add_argument("--schedules", nargs="+", default=list(THEIRS), choices=list(THEIRS))
    parser.add_argument("--unit", type=float, default=60.0, help="ms of a rank's F, I and W of a microbatch, each")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--real-time", action="store_true", help="run ranks above other programs (needs the right to)")
    args = parser.parse_args()
    priority = "real-time priority, " if args.real_time else ""
    print(
        f"F = I = W = {args.unit:g} ms per rank and microbatch, interleaved v = 2; medians of {args.rounds} rounds; "
        f"{priority}{os.cpu_count()} cores, Linux {platform.release()}, torch {torch.__version__}\n"
    )
    print(HEADER)
    print("|" + "---|" * (HEADER.count("|") - 1), flush=True)
    sizes = [tuple(map(int, size.split("x"))) for size in args.sizes]
    for p in dict.fromkeys(p for p, _ in sizes):
        cases = [Case(p, m, name, args.unit / 1e3) for q, m in sizes if q == p for name in args.schedules]
        run(p, cases, args.rounds, args.real_time)


if __name__ == "__main__":
    main()
