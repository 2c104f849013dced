"""Data parallelism on emulated hosts: seconds per step, bytes sent and memory of this project and other libraries.

One model of about 17M parameters, fp32, micro batch 2 x 256 tokens, one process per host. All systems alternate in the
same processes, so that other load on the machine affects all equally. Writes the table as PNG and every figure as JSON.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path

from benchmarks.cluster.figures import HEADER, LEGEND, Cell, Row, line, losses_agree, make_rows
from benchmarks.cluster.fleet import Fleet, FleetError
from benchmarks.cluster.hosts import Cluster, ClusterError
from benchmarks.cluster.plot import draw
from benchmarks.cluster.systems import NEEDS_DEEPSPEED, SYSTEMS, count_parameters


def main() -> int:
    """Prints the table, one row per (hosts, rate, GA, system)."""
    args = parse()
    rows: list[Row] = []
    print(LEGEND + "\n\n" + HEADER, flush=True)
    try:
        for hosts in args.hosts:
            with (
                Cluster(hosts, args.rates[0]) as cluster,
                Fleet(cluster, args.systems, args.python, args.output) as fleet,
            ):
                for accumulation in args.accumulation:
                    for rate in args.rates:
                        rows += measure(fleet, Cell(hosts, rate, accumulation), args.steps)
                        write(args.output, rows)
    except (ClusterError, FleetError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ClusterError) else 1
    print(f"\nfigures: {args.output / 'data_parallel.json'}\npicture: {args.output / 'data_parallel.png'}")
    return 0


def parse() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    usual = [name for name in SYSTEMS if name not in NEEDS_DEEPSPEED]
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rates", type=float, nargs="+", default=[1000, 400, 200, 100], help="Mbit/s of every link")
    parser.add_argument("--accumulation", type=int, nargs="+", default=[1, 8], help="microbatches per step")
    parser.add_argument("--steps", type=int, default=7, help="timed steps per system and cell, in two rounds")
    parser.add_argument("--systems", nargs="+", default=usual, choices=list(SYSTEMS), help="besides compute alone")
    parser.add_argument("--python", default=sys.executable, help="runs the hosts' processes (one that has DeepSpeed)")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/data_parallel"))
    args = parser.parse_args()
    args.systems = list(dict.fromkeys(["compute", *args.systems]))
    return args


def measure(fleet: Fleet, cell: Cell, steps: int) -> list[Row]:
    """Returns the rows of one cell, and prints them as they are measured."""
    fleet.cluster.set_rate(cell.rate)
    where = f"{cell.hosts} hosts, {cell.rate:g} Mbit/s, GA {cell.accumulation}"
    rounds = [part for part in (-(-steps // 2), steps // 2) if part]
    started = time.monotonic()
    ranks = fleet.ask({"accumulation": cell.accumulation, "rounds": rounds}, where)
    rows = make_rows(cell, count_parameters(), {name: fleet.titles[name] for name in ranks[0]}, ranks)
    for row in rows:
        print(line(row), flush=True)
    if not losses_agree(rows):
        print(f"the systems' losses differ: {', '.join(f'{row.system} {row.loss:.5f}' for row in rows)}", flush=True)
    if sys.stderr.isatty():
        print(f"{where}: {time.monotonic() - started:.0f} s", file=sys.stderr)
    return rows


def write(folder: Path, rows: list[Row]) -> None:
    """Writes all figures so far, and their picture."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "data_parallel.json").write_text(json.dumps([dataclasses.asdict(row) for row in rows], indent=1))
    draw(rows, folder / "data_parallel.png")


if __name__ == "__main__":
    sys.exit(main())
