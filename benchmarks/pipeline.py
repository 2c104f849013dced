"""Pipeline schedules with sleeps for compute: the engine, the simulator and torch.distributed.pipelining.

Ranks are processes with gloo on this machine. A stage sleeps a fixed time in its forward and in each half of its
backward, and sends a small tensor; so a pipeline of 8 ranks runs on 2 cores, and the result shows the waits between
ranks and the engine's own cost. Both libraries run the same stages alternately, in the same processes. A step lasts
from the moment at which all ranks begin until the last one is done. Medians are shown.

With --exchange SHARE a forward and a backward also exchange tokens at four places, which takes SHARE of the time of the
computation. The table then compares each schedule with and without forwards that run together with backwards
(--overlap-moe-expert-parallel-comm), and both with the simulator.

Other programs on the machine disturb the result, because ranks wake up late. With --real-time they get a priority above
them, while using almost no CPU time.
"""

from __future__ import annotations

import argparse
import dataclasses
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
from megatron.core.streams.turns import Turns
from megatron.core.timeline import Timeline
from megatron.schedule.costs import Costs
from megatron.schedule.passes import with_transfers
from megatron.schedule.registry import SCHEDULES
from megatron.schedule.schedule import Schedule
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


EXCHANGE_HEADER = (
    "| p | m | schedule | exchange / compute | alone: simulated ms | ours ms | ours / simulated | kept: promised | ours "
    "| together: simulated ms | ours ms | ours / simulated | kept: promised | ours | exposed, together / alone |"
)
EXCHANGES = 4


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
    exchange: float = 0.0  # time of the exchanges of tokens / time of the computation
    pairs: bool = False

    @property
    def exchanges(self) -> int:
        """Exchanges of a microbatch in a stage, in each direction."""
        return EXCHANGES if self.exchange else 0

    @property
    def costs(self) -> Costs:
        """Seconds of the actions, for the simulator."""
        f, exchanged = self.stage_seconds, 1.5 * self.exchange * self.stage_seconds
        return Costs.uniform(
            self.p * self.chunks,
            forward=f,
            input_grad=f,
            weight_grad=f,
            forward_exchange=exchanged,
            backward_exchange=exchanged,
        )

    def schedule(self) -> Schedule:
        """The computations and messages of all ranks."""
        computations = SCHEDULES[self.name].build(self.p, self.m, v=self.chunks, group=self.group, pairs=self.pairs)
        return with_transfers(computations, overlap=True)

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
    """The work of a rank's stages, which sleep instead of computing, and its statistics.

    exchanges, exchange_seconds: in each direction, and the time of each on the wire. turns: of two computations.
    whole_backward: I and W run as one computation, in which the exchanges are.
    """

    def __init__(
        self,
        seconds: float,
        *,
        exchanges: int = 0,
        exchange_seconds: float = 0.0,
        whole_backward: bool = False,
        turns: Turns | None = None,
    ) -> None:
        self.seconds, self.busy, self.alive, self.kept = seconds, 0.0, 0, 0
        self._exchanges, self._exchange_seconds, self._turns = exchanges, exchange_seconds, turns
        self._whole_backward = whole_backward and exchanges > 0
        self._wire_free = 0.0

    def forward(self) -> None:
        """Runs F."""
        self.alive += 1
        self.kept = max(self.kept, self.alive)
        self._in_parts(self.seconds)

    def input_grad(self) -> None:
        """Runs I, or the first half of B."""
        self._in_parts(2 * self.seconds if self._whole_backward else self.seconds)
        self.alive -= 1

    def weight_grad(self) -> None:
        """Runs W, or the second half of B."""
        if not self._whole_backward:
            self._sleep(self.seconds)

    def _in_parts(self, seconds: float) -> None:
        """Computes until each exchange, and waits for it."""
        parts = self._exchanges + 1
        for part in range(parts):
            if part:
                arrival = self._wire_free = max(time.perf_counter(), self._wire_free) + self._exchange_seconds
                assert self._turns is not None
                self._turns.yield_turn()
                sleep_until(arrival)
            self._sleep(seconds / parts)

    def _sleep(self, seconds: float) -> None:
        started = time.perf_counter()
        sleep_until(started + seconds)
        self.busy += time.perf_counter() - started


def sleep_until(end: float) -> None:
    """A process wakes up a tenth of a millisecond late, so busy waiting makes the end exact."""
    time.sleep(max(0.0, end - time.perf_counter() - SPIN))
    while time.perf_counter() < end:
        pass


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
        self._schedule, self._streams = case.schedule(), Streams(CPU, Timeline(CPU))
        self._groups, self._mailbox = groups, Mailbox(groups, self._streams)
        self._last = case.p * case.chunks - 1
        self._weight = torch.zeros((), requires_grad=True)
        self._shape = (case.numbers,)
        self._input = torch.ones(self._shape)
        self.work = Work(
            case.stage_seconds,
            exchanges=case.exchanges,
            exchange_seconds=1.5 * case.exchange * case.stage_seconds / EXCHANGES,
            whole_backward=not SCHEDULES[case.name].splits_backward,
            turns=self._streams.turns,
        )

    def step(self) -> None:
        """One training step."""
        self.work.kept = 0
        PipelineEngine(
            self._schedule,
            self._groups.pp.rank,
            self,
            self._mailbox,
            torch.float32,
            self,
            turns=self._streams.turns,
        ).run()

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


def exchange_rounds_of(case: Case, groups: Groups, rounds: int) -> list[tuple[Step, Step]]:
    """Measures the schedule without and with pairs alternately, after a warm-up round."""
    sides = Ours(case, groups), Ours(dataclasses.replace(case, pairs=True), groups)
    steps = [[Step(gather_objects(measure(side, groups), groups.pp)) for side in sides] for _ in range(rounds + 1)]
    return [(alone, together) for alone, together in steps[1:]]


def exchange_row(case: Case, rounds: list[tuple[Step, Step]]) -> str:
    """A line of the table of exchanges."""
    cells = f"{case.p} | {case.m} | {case.name} | {case.exchange:.0%}"
    seconds = []
    for side, pairs in enumerate((False, True)):
        schedule = dataclasses.replace(case, pairs=pairs).schedule()
        simulated = simulate(schedule, case.costs, exchanges=EXCHANGES).makespan
        measured = statistics.median(pair[side].seconds for pair in rounds)
        promised = max(rank.activations for rank in memory_in_flight(schedule))
        kept = max(rounds[0][side].kept)
        seconds.append(measured)
        cells += f" | {simulated * 1e3:.0f} | {measured * 1e3:.1f} | {measured / simulated:.3f} | {promised} | {kept}"
    computed = simulate(schedule, dataclasses.replace(case, exchange=0.0).costs).makespan
    exposed = (seconds[1] - computed) / (seconds[0] - computed)
    return f"| {cells} | {exposed:.0%} |"


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
        if case.exchange:
            line = exchange_row(case, exchange_rounds_of(case, groups, rounds))
        else:
            line = row(case, rounds_of(case, groups, rounds))
        if rank == 0:
            pipe.send(line)
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
    parser.add_argument(
        "--exchange", type=float, default=0.0, metavar="SHARE", help="exchanges of tokens / computation"
    )
    parser.add_argument("--real-time", action="store_true", help="run ranks above other programs (needs the right to)")
    args = parser.parse_args()
    priority = "real-time priority, " if args.real_time else ""
    print(
        f"F = I = W = {args.unit:g} ms per rank and microbatch, interleaved v = 2; medians of {args.rounds} rounds; "
        f"{priority}{os.cpu_count()} cores, Linux {platform.release()}, torch {torch.__version__}\n"
    )
    header = EXCHANGE_HEADER if args.exchange else HEADER
    print(header)
    print("|" + "---|" * (header.count("|") - 1), flush=True)
    sizes = [tuple(map(int, size.split("x"))) for size in args.sizes]
    for p in dict.fromkeys(p for p, _ in sizes):
        names = [name for name in args.schedules if p > 1 or SCHEDULES[name].virtual_stages == 1]
        if args.exchange:
            names = [name for name in names if SCHEDULES[name].has_pairs]
        cases = [
            Case(p, m, name, args.unit / 1e3, exchange=args.exchange) for q, m in sizes if q == p for name in names
        ]
        run(p, cases, args.rounds, args.real_time)


if __name__ == "__main__":
    main()
