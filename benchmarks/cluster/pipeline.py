"""Pipeline messages between emulated hosts: how much of their time is overlapped.

One pipeline rank per host. Stages sleep instead of computing, so that only messages can add time; messages are real and
large enough that, on the link, they keep a rank busy for a given fraction of its compute. Each schedule's step is
compared with its own step on a fast link, in the same processes. Prints one table.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.cluster.fleet import Fleet, FleetError
from benchmarks.cluster.hosts import Cluster, ClusterError
from benchmarks.cluster.tensor_parallel import slowest
from megatron.schedule.costs import Costs
from megatron.schedule.passes import with_transfers
from megatron.schedule.registry import SCHEDULES
from megatron.schedule.schedule import SENDS, Schedule
from megatron.schedule.simulate import simulate

WORKER = "benchmarks.cluster.pipeline_worker"
FREE_RATE = 10_000.0  # Mbit/s
NUMBERS, FP32 = 1 << 18, 4  # elements per message, one megabyte
FEW = 1  # a message of negligible cost
# Title -> schedule, chunks per rank, group of microbatches.
WAYS: dict[str, tuple[str, int, int | None]] = {
    "1f1b": ("1f1b", 1, None),
    "zb-h1": ("zb-h1", 1, None),
    "interleaved, v = 2": ("interleaved", 2, None),
    "interleaved, groups of 2 p": ("interleaved", 2, 2),
    "zb-v": ("zb-v", 2, None),
}
LEGEND = (
    "share: time on the wire, in the direction that carries most, / compute of a rank. step: median seconds, slowest "
    "rank.\nfree: the same with messages that cost nothing, in the same rounds. exposed: step - free, in times of one "
    "message on\nthe wire; simulated: the same in the simulator. The filling and draining of the pipeline is the same "
    "for all m."
)
HEADER = (
    f"{'p':>2} {'m':>3} {'Mbit/s':>7} {'share':>6}  {'schedule':26} {'step s':>7} {'free s':>7} {'exposed':>8} "
    f"{'simulated':>9} {'of step':>8}"
)


@dataclass(frozen=True)
class Row:
    """One schedule on one link. Measured and simulated exposure are in units of one message's time on the link."""

    p: int
    m: int
    way: str
    rate: float
    share: float
    step: float
    free: float
    message: float  # seconds on the link
    exposed: float
    simulated: float


def main() -> int:
    """Prints the table, one row per (number of microbatches, schedule)."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--share", type=float, default=0.2, help="communication / compute")
    parser.add_argument("--microbatches", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--unit", type=float, default=60.0, help="ms of a rank's F, I and W of a microbatch, each")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/pipeline_wire"))
    args = parser.parse_args()
    rows: list[Row] = []
    print(LEGEND + "\n\n" + HEADER, flush=True)
    try:
        with (
            Cluster(args.hosts, FREE_RATE) as cluster,
            Fleet(cluster, list(WAYS), sys.executable, args.output, WORKER) as fleet,
        ):
            for m in args.microbatches:
                for way in WAYS:
                    rows.append(measure(cluster, fleet, way, args.hosts, m, args.unit / 1e3, args.share, args.rounds))
                    print(line(rows[-1]), flush=True)
    except (ClusterError, FleetError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ClusterError) else 1
    path = args.output / "pipeline.json"
    path.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    print(f"\nfigures: {path}")
    return 0


def measure(cluster: Cluster, fleet: Fleet, way: str, p: int, m: int, unit: float, share: float, rounds: int) -> Row:
    """Measures one row: the link's rate follows from the schedule's number of messages."""
    name, v, groups = WAYS[way]
    group = None if groups is None else groups * p
    schedule = with_transfers(SCHEDULES[name].build(p, m, v=v, group=group), overlap=True)
    message = share * 3 * unit * m / busiest(schedule)
    rate = NUMBERS * FP32 * 8e-6 / message
    case: dict[str, Any] = {"p": p, "m": m, "name": name, "unit": unit, "group": group}
    ways = {"real": {**case, "numbers": NUMBERS}, "free": {**case, "numbers": FEW}}
    named = {f"{way} {m} {kind}": fields for kind, fields in ways.items()}
    cluster.set_rate(rate)
    fleet.ask({"rounds": 1, "ways": named}, f"{rate:.0f} Mbit/s")  # connections adapt to the rate
    ranks = fleet.ask({"rounds": rounds, "ways": named}, f"{rate:.0f} Mbit/s")
    real, free = (slowest([rank[name] for rank in ranks]) for name in named)
    return Row(
        p=p,
        m=m,
        way=way,
        rate=rate,
        share=share,
        step=statistics.median(real),
        free=statistics.median(free),
        message=message,
        exposed=statistics.median(one - other for one, other in zip(real, free, strict=True)) / message,
        simulated=simulated_exposure(schedule, unit / v, message),
    )


def busiest(schedule: Schedule) -> int:
    """Returns the number of messages in the busiest direction between two ranks."""
    counts: dict[tuple[int, int], int] = {}
    for rank, actions in enumerate(schedule.actions):
        for action in actions:
            if action.kind in SENDS:
                way = rank, schedule.peer(action)
                counts[way] = counts.get(way, 0) + 1
    return max(counts.values())


def simulated_exposure(schedule: Schedule, unit: float, message: float) -> float:
    """Returns the simulated exposure of messages that take `message` seconds, in units of one message."""
    stages = schedule.placement.num_stages

    def makespan(transfer: float) -> float:
        costs = Costs.uniform(stages, forward=unit, input_grad=unit, weight_grad=unit, transfer=transfer)
        return simulate(schedule, costs).makespan

    return (makespan(message) - makespan(0.0)) / message


def line(row: Row) -> str:
    """Formats a row of the table."""
    return (
        f"{row.p:2} {row.m:3} {row.rate:7.0f} {row.share:6.0%}  {row.way:26} {row.step:7.3f} {row.free:7.3f} "
        f"{row.exposed:8.2f} {row.simulated:9.2f} {row.exposed * row.message / row.step:8.1%}"
    )


if __name__ == "__main__":
    sys.exit(main())
