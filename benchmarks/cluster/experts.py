"""The exchange of tokens between emulated hosts, with and without another microbatch to hide it.

A small model (2 layers, hidden 256, 8 experts, 2 per token, 1024 tokens, fp32) whose experts are shared by the hosts,
one process each, computes 16 microbatches. Links get a rate at which the exchanges of a step take a given share of the
time that it takes on a fast link. The two orders alternate in the same processes. Prints one table.
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

WORKER = "benchmarks.cluster.experts_worker"
WAYS = ("alone", "together")
FREE_RATE = 10_000.0  # Mbit/s, while compute alone is measured
LEGEND = (
    "free: median seconds of a step on a fast link, in the same order, slowest rank. wire: its bytes at the rate of the "
    "link.\nexposed: step - free; of all: in units of what is exposed one after the other. step / max: of the larger of "
    "free and wire."
)
HEADER = (
    f"{'hosts':>5} {'Mbit/s':>6} {'wire / free':>11}  {'order':34} {'free s':>7} {'step s':>7} {'exposed s':>9} "
    f"{'of all':>7} {'step / max':>10}"
)


@dataclass(frozen=True)
class Row:
    """One order of the microbatches on one link. Seconds."""

    hosts: int
    rate: float  # Mbit/s
    share: float
    order: str
    free: float
    step: float
    wire: float
    exposed_alone: float

    @property
    def exposed(self) -> float:
        """The time that a link without cost would save."""
        return self.step - self.free


def main() -> int:
    """Prints the table, two rows per share."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--share", type=float, nargs="+", default=[0.5, 1.0], help="exchange / compute")
    parser.add_argument("--rounds", type=int, default=5, help="steps of each order")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/experts"))
    args = parser.parse_args()
    rows: list[Row] = []
    print(LEGEND + "\n\n" + HEADER, flush=True)
    try:
        with (
            Cluster(args.hosts, FREE_RATE) as cluster,
            Fleet(cluster, WAYS, sys.executable, args.output, WORKER) as fleet,
        ):
            fleet.ask({"rounds": 1}, "first steps")
            free = fleet.ask({"rounds": args.rounds}, "fast link")
            for share in args.share:
                measured = measure(cluster, fleet, free, share, args.rounds)
                print("\n".join(map(line, measured)), flush=True)
                rows += measured
    except (ClusterError, FleetError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ClusterError) else 1
    path = args.output / "experts.json"
    path.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    print(f"\nfigures: {path}")
    return 0


def measure(cluster: Cluster, fleet: Fleet, free: list[dict[str, Any]], share: float, rounds: int) -> list[Row]:
    """Measures both orders. free: what the ranks measured on a fast link. Raises FleetError if they compute different
    gradients."""
    seconds = {way: median(free, way) for way in WAYS}
    nbytes = max(statistics.median(rank[WAYS[0]]["sent"]) for rank in free)
    wire = share * seconds[WAYS[0]]
    rate = nbytes * 8e-6 / wire
    cluster.set_rate(rate)
    fleet.ask({"rounds": 1}, f"{rate:.0f} Mbit/s")  # connections adapt to the rate
    ranks = fleet.ask({"rounds": rounds}, f"{rate:.0f} Mbit/s")
    for number, rank in enumerate(ranks):
        for field in ("loss", "gradient"):
            if len({value for way in WAYS for value in rank[way][field]}) > 1:
                raise FleetError(f"the two orders compute another {field} on rank {number}")
    exposed = median(ranks, WAYS[0]) - seconds[WAYS[0]]
    return [
        Row(len(ranks), rate, share, fleet.titles[way], seconds[way], median(ranks, way), wire, exposed) for way in WAYS
    ]


def median(ranks: list[dict[str, Any]], way: str) -> float:
    """Returns the median seconds of a step of the slowest rank."""
    return statistics.median(slowest([rank[way]["seconds"] for rank in ranks]))


def line(row: Row) -> str:
    """Formats a row of the table."""
    return (
        f"{row.hosts:5} {row.rate:6.0f} {row.share:11.0%}  {row.order:34} {row.free:7.3f} {row.step:7.3f} "
        f"{row.exposed:9.3f} {row.exposed / row.exposed_alone:7.0%} {row.step / max(row.free, row.wire):10.2f}"
    )


if __name__ == "__main__":
    sys.exit(main())
