"""Context parallelism between emulated hosts: balance of the attention and overlap of its communication.

torch's own ring attention runs on the same layer. One decoder layer (hidden 128, 4 heads, fp32, 8192 tokens) has its
sequence sharded over 2 and over 4 hosts, one process each. The links' rate is set so that a hop of the ring takes a
given fraction of the time of the attention that overlaps it. The methods alternate in the same processes, each step
once with and once without communication. Prints one table.
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
from benchmarks.cluster.tensor_parallel import slowest

WORKER = "benchmarks.cluster.context_worker"
WAYS = ("p2p", "all_gather", "a2a", "torch-alltoall", "torch-allgather")
SEQUENCE, HIDDEN, FP32 = 8192, 128, 4  # equal to the worker's; a test compares them
FREE_RATE = 10_000.0  # Mbit/s, while compute alone is measured
CALIBRATION_ROUNDS = 5
SAME = 1e-4  # maximum relative difference between the gradients of the methods

LEGEND = (
    "step: median seconds of forward and backward, slowest rank. alone: without communication, in the same rounds.\n"
    "exposed: median of step - alone; share: exposed / step. at best: the share by the fastest step and the fastest "
    "alone.\nsent: bytes per rank and step by the interface's counter.\n"
    "GFLOPs: of one rank's attention, counted; apart: the difference between ranks."
)
HEADER = (
    f"{'cp':>2} {'Mbit/s':>6}  {'way':24} {'step s':>7} {'(of steps)':>13} {'alone s':>7} {'exposed s':>9} "
    f"{'share':>6} {'at best':>7} {'sent MB':>7} {'GFLOPs':>7} {'apart':>6}"
)


@dataclass(frozen=True)
class Row:
    """One method over one number of hosts."""

    hosts: int
    rate: float  # Mbit/s
    way: str
    step: float
    fastest: float
    slowest: float
    alone: float
    fastest_alone: float
    exposed: float
    sent: float
    flops: Sequence[int]  # of each rank; empty if not counted

    @property
    def share(self) -> float:
        """Exposed communication as a fraction of the step."""
        return self.exposed / self.step

    @property
    def at_best(self) -> float:
        """The same fraction for the fastest steps, which a busy machine disturbs least."""
        return 1.0 - self.fastest_alone / self.fastest


def main() -> int:
    """Prints the table, one row per (hosts, method)."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--hop", type=float, default=0.7, help="time of a ring hop / time of the attention")
    parser.add_argument("--rounds", type=int, default=7, help="steps of every way")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/context_parallel"))
    args = parser.parse_args()
    rows: list[Row] = []
    print(LEGEND + "\n\n" + HEADER, flush=True)
    try:
        for hosts in args.hosts:
            found = measure(hosts, args.hop, args.rounds, args.output)
            print("\n".join(line(row) for row in found), flush=True)
            rows += found
    except (ClusterError, FleetError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ClusterError) else 1
    path = args.output / "context_parallel.json"
    path.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    print(f"\nfigures: {path}")
    return 0


def measure(hosts: int, hop: float, rounds: int, output: Path) -> list[Row]:
    """Measures all methods over `hosts`. Raises ClusterError and FleetError, also if methods compute different
    results."""
    with Cluster(hosts, FREE_RATE) as cluster, Fleet(cluster, WAYS, sys.executable, output, WORKER) as fleet:
        flops = fleet.ask({"flops": True}, f"{hosts} hosts, counting")
        alone = fleet.ask({"ring": CALIBRATION_ROUNDS}, f"{hosts} hosts, attention alone")
        rate = rate_for(hop, statistics.median(slowest([rank["seconds"] for rank in alone])), hosts)
        cluster.set_rate(rate)
        # Run one step each without measuring it, so that connections adapt to the new rate.
        fleet.ask({"rounds": 1}, f"{hosts} hosts, {rate:.0f} Mbit/s")
        ranks = fleet.ask({"rounds": rounds}, f"{hosts} hosts, {rate:.0f} Mbit/s")
        check_same(ranks)
        return make_rows(hosts, rate, fleet.titles, ranks, flops)


def rate_for(hop: float, seconds: float, hosts: int) -> float:
    """Returns the rate in Mbit/s at which a rank's keys and values take `hop` of the `seconds` of a ring step's
    attention.
    """
    nbytes = 2 * SEQUENCE // hosts * HIDDEN * FP32
    return nbytes * 8e-6 / (hop * seconds)


def check_same(ranks: Sequence[Mapping[str, Any]]) -> None:
    """Raises FleetError unless all methods computed the same gradient of the layer's input."""
    for number, rank in enumerate(ranks):
        expected = rank[WAYS[0]]["gradient"]
        for name in WAYS:
            if abs(rank[name]["gradient"] - expected) > SAME * abs(expected):
                raise FleetError(f"{name} computes another gradient on rank {number} than {WAYS[0]}")


def make_rows(
    hosts: int,
    rate: float,
    titles: Mapping[str, str],
    ranks: Sequence[Mapping[str, Any]],
    flops: Sequence[Mapping[str, int]],
) -> list[Row]:
    """Returns one row per method from every rank's figures, by method."""
    rows = []
    for name, title in titles.items():
        steps, alone = (slowest([rank[name][field] for rank in ranks]) for field in ("seconds", "alone"))
        rows.append(
            Row(
                hosts=hosts,
                rate=rate,
                way=title,
                step=statistics.median(steps),
                fastest=min(steps),
                slowest=max(steps),
                alone=statistics.median(alone),
                fastest_alone=min(alone),
                exposed=statistics.median(a - b for a, b in zip(steps, alone, strict=True)),
                sent=max(statistics.median(rank[name]["sent"]) for rank in ranks),
                flops=[rank[name] for rank in flops if name in rank],
            )
        )
    return rows


def line(row: Row) -> str:
    """Formats a row of the table."""
    text = (
        f"{row.hosts:2} {row.rate:6.0f}  {row.way:24} {row.step:7.3f} {f'{row.fastest:.3f}-{row.slowest:.3f}':>13} "
        f"{row.alone:7.3f} {row.exposed:9.3f} {row.share:6.1%} {row.at_best:7.1%} {row.sent / 1e6:7.1f}"
    )
    if not row.flops:
        return text
    return f"{text} {max(row.flops) / 1e9:7.2f} {max(row.flops) / min(row.flops) - 1:6.2%}"


if __name__ == "__main__":
    sys.exit(main())
