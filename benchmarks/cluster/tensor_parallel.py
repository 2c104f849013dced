"""Tensor parallelism between emulated hosts: how much of its communication is overlapped.

Two decoder layers (hidden 1024, fp32, 2 x 512 tokens) under sequence parallelism, sharded over the hosts, one process
and one core each. The links' rate is set so that the communication of a step takes a given fraction of its compute
time. The methods alternate in the same processes, so that other load on the machine affects all equally. Prints one
table.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.cluster.fleet import Fleet, FleetError
from benchmarks.cluster.hosts import Cluster, ClusterError

WORKER = "benchmarks.cluster.tensor_worker"
WAYS = ("compute", "serial", "bulk", "pieces")
LAYERS, SEQUENCE, MICRO_BATCH, HIDDEN, FP32 = 2, 512, 2, 1024, 4  # equal to the worker's; a test compares them
FREE_RATE = 10_000.0  # Mbit/s, while compute alone is measured
CALIBRATION_ROUNDS = 5

LEGEND = (
    "step: median seconds, slowest rank; fastest: of all rounds. wire: seconds that a step's bytes take at the links'\n"
    "rate; comm: wire / compute only. exposed: step - compute only, in the same rounds. of serial: share of the time "
    "that\nis exposed without overlap. ratio: step / max(compute, wire). sent: bytes per rank and step by the "
    "interface's\ncounter; ratio: over the bytes that the collectives must send."
)
HEADER = (
    f"{'comm':>5} {'Mbit/s':>7}  {'way':20} {'step s':>7} {'fastest':>7} {'wire s':>7} {'exposed s':>9} "
    f"{'of serial':>9} {'ratio':>6} {'sent MB':>8} {'ratio':>6}"
)


@dataclass(frozen=True)
class Row:
    """One method at one rate."""

    share: float  # time of communication on the link as a fraction of compute
    rate: float  # Mbit/s
    way: str
    step: float
    compute: float
    wire: float
    exposed: float
    of_serial: float
    sent: float
    least: float  # bytes that have to be sent
    fastest: float
    slowest: float


def main() -> int:
    """Prints the table, one row per (share, method)."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.5, 1.0], help="communication / compute")
    parser.add_argument("--rounds", type=int, default=7, help="steps of every way at each rate")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/tensor_parallel"))
    args = parser.parse_args()
    rows: list[Row] = []
    print(LEGEND + "\n\n" + HEADER, flush=True)
    try:
        with (
            Cluster(args.hosts, FREE_RATE) as cluster,
            Fleet(cluster, WAYS, sys.executable, args.output, WORKER) as fleet,
        ):
            for share in args.shares:
                cluster.set_rate(FREE_RATE)
                alone = fleet.ask({"rounds": CALIBRATION_ROUNDS, "ways": ["compute"]}, "compute")
                compute = statistics.median(slowest([rank["compute"]["seconds"] for rank in alone]))
                rate = rate_for(share, compute, step_bytes(args.hosts))
                cluster.set_rate(rate)
                # Run one step each without measuring it, so that connections adapt to the new rate.
                fleet.ask({"rounds": 1, "ways": list(WAYS)}, f"{rate:.0f} Mbit/s")
                ranks = fleet.ask({"rounds": args.rounds, "ways": list(WAYS)}, f"{rate:.0f} Mbit/s")
                rows += make_rows(share, rate, args.hosts, fleet.titles, ranks)
                for row in rows[-len(WAYS) :]:
                    print(line(row), flush=True)
    except (ClusterError, FleetError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ClusterError) else 1
    path = args.output / "tensor_parallel.json"
    path.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    print(f"\nfigures: {path}")
    return 0


def step_bytes(hosts: int) -> float:
    """Returns the bytes that a rank sends in forward and backward: five collectives per pair of linears, two pairs per
    layer.
    """
    hidden = FP32 * SEQUENCE * MICRO_BATCH * HIDDEN
    return LAYERS * 2 * 5 * hidden * (hosts - 1) / hosts


def rate_for(share: float, compute: float, nbytes: float) -> float:
    """Returns the rate in Mbit/s at which `nbytes` take `share` of `compute` seconds."""
    return nbytes * 8e-6 / (share * compute)


def make_rows(
    share: float, rate: float, hosts: int, titles: Mapping[str, str], ranks: Sequence[Mapping[str, Any]]
) -> list[Row]:
    """Returns one row per method from every rank's figures, by method; "compute" and "serial" must be included.

    The exposed time is the median over rounds of a method's step minus compute alone in the same round.
    """
    steps = {name: slowest([rank[name]["seconds"] for rank in ranks]) for name in ranks[0]}
    exposed = {
        name: statistics.median(step - alone for step, alone in zip(times, steps["compute"], strict=True))
        for name, times in steps.items()
    }
    least = step_bytes(hosts)
    return [
        Row(
            share=share,
            rate=rate,
            way=titles[name],
            step=statistics.median(times),
            compute=statistics.median(steps["compute"]),
            wire=least * 8e-6 / rate,
            exposed=exposed[name],
            of_serial=exposed[name] / exposed["serial"],
            sent=max(statistics.median(rank[name]["sent"]) for rank in ranks),
            least=least if name != "compute" else 0.0,
            fastest=min(times),
            slowest=max(times),
        )
        for name, times in steps.items()
    ]


def slowest(times: Sequence[Sequence[float]]) -> list[float]:
    """[rank][step] -> the maximum of each step."""
    return [max(step) for step in zip(*times, strict=True)]


def line(row: Row) -> str:
    """Formats a row of the table."""
    text = f"{row.wire / row.compute:5.0%} {row.rate:7.0f}  {row.way:20} {row.step:7.3f} {row.fastest:7.3f} {row.wire:7.3f}"
    if not row.least:
        return text
    return (
        f"{text} {row.exposed:9.3f} {row.of_serial:9.0%} {row.step / max(row.compute, row.wire):6.3f} "
        f"{row.sent / 1e6:8.1f} {row.sent / row.least:6.3f}"
    )


if __name__ == "__main__":
    sys.exit(main())
