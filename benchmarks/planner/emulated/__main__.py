"""Measures the steps of many layouts on an emulated cluster.

Its ranks are processes that are held to a share of a core each, on 2 and 4 hosts. It needs root, iproute2 and the cpu
controller of cgroups.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path
from types import FrameType

from benchmarks.cluster.hosts import ClusterError
from benchmarks.cluster.quota import QuotaError
from benchmarks.planner.emulated.grid import cases
from benchmarks.planner.emulated.measure import measure


def main() -> int:
    """Returns 0; 1 if a run failed; 2 if the machine cannot emulate the cluster."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--folder", type=Path, default=Path("out/emulated"), help="of the table measured.csv")
    add("--only", nargs="*", default=[], metavar="TEXT", help="layouts whose name contains one of these")
    add("--repeats", type=int, default=2, help="runs of each layout")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, _end)
    args.folder.mkdir(parents=True, exist_ok=True)
    try:
        return 1 if measure(cases(args.only), args.repeats, args.folder / "measured.csv") else 0
    except (ClusterError, QuotaError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _end(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
