"""Measures the steps of many layouts on an emulated cluster, predicts them from a profile of it, and compares both.

Its ranks are processes that are held to a share of a core each, on 2 and 4 hosts. It needs root, iproute2, the cpu
controller of cgroups and an otherwise idle machine. Without a part it does all of them, in this order; all files are in
one folder, so that each part can be repeated alone:

--profile   profile_*.json, of each model at each rate of the links
--measure   measured.csv, the runs
--predict   predicted.csv, from the profiles, and the speed of the processors in each run
--report    report.md and steps.png
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path
from types import FrameType

from benchmarks.cluster.fleet import FleetError
from benchmarks.cluster.hosts import ClusterError
from benchmarks.cluster.quota import QuotaError
from benchmarks.planner.emulated.grid import MODELS, cases
from benchmarks.planner.emulated.measure import measure
from benchmarks.planner.emulated.predict import predict
from benchmarks.planner.emulated.profiles import take_profiles
from benchmarks.planner.emulated.ranks import RunError
from benchmarks.planner.emulated.report import compare, draw, report
from megatron.base.errors import ConfigError

PARTS = ("profile", "measure", "predict", "report")


def main() -> int:
    """Returns 0; 1 if a run failed; 2 if the machine cannot emulate the cluster, or a file is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    for part in PARTS:
        add(f"--{part}", action="store_true", help="do this part")
    add("--folder", type=Path, default=Path("out/emulated"), help="of all files (default %(default)s)")
    add(
        "--only", nargs="*", default=[], metavar="TEXT", help="layouts whose name, such as 'wide: zero-3', contains one"
    )
    add("--repeats", type=int, default=2, help="runs of each layout (default %(default)s)")
    args = parser.parse_args()
    parts = [part for part in PARTS if getattr(args, part)] or list(PARTS)
    signal.signal(signal.SIGTERM, _end)
    args.folder.mkdir(parents=True, exist_ok=True)
    try:
        return 1 if run(parts, args.folder, args.only, args.repeats) else 0
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except (ClusterError, FleetError, QuotaError, ConfigError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def run(parts: list[str], folder: Path, only: list[str], repeats: int) -> int:
    """Does these parts; returns the number of failed runs."""
    chosen = cases(only)
    measured, predicted = folder / "measured.csv", folder / "predicted.csv"
    failed = 0
    if "profile" in parts:
        take_profiles([model for model in MODELS if any(case.model is model for case in chosen)], folder)
    if "measure" in parts:
        failed = measure(chosen, repeats, measured)
    if "predict" in parts:
        predict(chosen, folder, measured, predicted)
    if "report" in parts:
        found, lines = compare(measured, predicted)
        text = report(found, lines)
        (folder / "report.md").write_text(text)
        draw(found, folder / "steps.png")
        print(text)
    return failed


def _end(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
