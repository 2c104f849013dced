"""Checks and measures everything that needs a GPU, in parts that each run in a process of their own.

  python -m benchmarks.gpu.checklist --out results/correct --parts A-F --minutes 9.3
  python -m benchmarks.gpu.checklist --out results/speed --parts G-J --minutes 9.3
  python -m benchmarks.gpu.checklist --out results/again --only-failed results/correct/results.jsonl
  python -m benchmarks.gpu.checklist --out /tmp/toy --dry-run          # every part at toy size, on the CPU

Each case appends a line to DIR/results.jsonl at once, and DIR/report.md is rewritten. A failure stops nothing; a case that
would pass the time limit is skipped. Everything that parts print goes to DIR/log.txt. Results of an earlier run in DIR
are replaced. benchmarks/results/gpu.md says what each part proves. Exit code: 0, 1 if a case failed, 2 for bad arguments.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.driver import LOG, ROOT, Driver
from benchmarks.gpu.parts import PARTS, Part, chosen
from benchmarks.gpu.record import failed_cases, read_records
from benchmarks.gpu.report import Report, table
from megatron.base.errors import ConfigError
from megatron.command_line.exits import exit_code
from megatron.command_line.flag_parser import FlagParser, path_word, within
from megatron.config.interval import MINUTES


def build_parser() -> FlagParser:
    """Returns the parser of the flags."""
    parser = FlagParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add = parser.add_argument
    add("--out", type=path_word, required=True, metavar="DIR", help="folder of the results; made if it is not there")
    add("--minutes", type=within(float, MINUTES), default=9.3, help="time limit of the whole run (default 9.3)")
    add("--parts", default=f"A-{max(PARTS)}", help="letters and ranges of letters, such as A-F (default: all)")
    add("--only-failed", type=path_word, metavar="FILE", help="only the cases that failed in this results.jsonl")
    add("--dry-run", action="store_true", help="play every part at toy size on the CPU")
    return parser


def selection(parts: str, only_failed: str | None) -> list[tuple[Part, set[str]]]:
    """Returns the parts to run, with the cases to run of each; none stands for all of them. Raises UserErrors."""
    found = chosen(parts)
    if only_failed is None:
        return [(part, set()) for part in found]
    again = failed_cases(read_records(Path(only_failed)))
    return [(part, again[part.letter]) for part in found if part.letter in again]


def has_gpu() -> bool:
    """Returns whether torch sees a GPU. It is asked in another process, because this one holds no memory of a GPU."""
    code = "import sys, torch; sys.exit(0 if torch.cuda.is_available() else 3)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False)
    if done.returncode not in (0, 3):
        raise ConfigError(f"{sys.executable} cannot import torch; start the checklist with the Python that has it")
    return done.returncode == 0


def run(args: argparse.Namespace) -> int:
    """Returns 1 if a case failed. Raises UserErrors."""
    begun = time.monotonic()
    parts, out = selection(args.parts, args.only_failed), Path(args.out).resolve()
    if not parts:
        print(f"nothing failed in {args.only_failed} that --parts {args.parts} holds")
        return 0
    if not args.dry_run and not has_gpu():
        raise ConfigError("torch sees no CUDA device; add --dry-run to play every part at toy size on the CPU")
    out.mkdir(parents=True, exist_ok=True)
    (out / LOG).write_bytes(b"")
    kind = "a dry run at toy size on the CPU" if args.dry_run else "on a GPU"
    report = Report(out, f"Checklist, {kind}, {time.strftime('%Y-%m-%d')}")
    driver = Driver(out, "cpu" if args.dry_run else "cuda", args.dry_run)
    records = driver.run(parts, begun + 60.0 * args.minutes, report.add)
    print(f"\n{table(records, time.monotonic() - begun)}")
    return 1 if any(record.bad for record in records) else 0


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def main(argv: Sequence[str]) -> int:
    """Returns the exit code, see `exit_code`."""
    return exit_code(lambda: run(build_parser().parse_args(argv)))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _interrupt)  # the running part is then ended, as on Ctrl-C
    sys.exit(main(sys.argv[1:]))
