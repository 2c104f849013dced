"""Checks and measures everything that needs a GPU, in cases that cannot spoil each other.

  python -m benchmarks.gpu.checklist --out results --first --minutes 8         # what matters most comes first
  python -m benchmarks.gpu.checklist --out more --resume results/results.jsonl --first --minutes 2.5
  python -m benchmarks.gpu.checklist --out again --only-failed results/results.jsonl
  python -m benchmarks.gpu.checklist --out speed --parts G,H --cases "G 8B|H this"
  python -m benchmarks.gpu.checklist --out /tmp/toy --dry-run                  # toy sizes, on the CPU

Each case appends a line to DIR/results.jsonl at once, and DIR/report.md is rewritten. A failure stops nothing; a case
that would pass the time limit is skipped. Everything that cases print goes to DIR/log.txt. benchmarks/results/gpu.md
says what each part proves. Exit code: 0, 1 if a case failed, 2 for bad arguments.
"""

from __future__ import annotations

import argparse
import re
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.driver import LOG, Driver
from benchmarks.gpu.parts import PARTS, Part, Planned, by_worth, chosen, planned_seconds, that_fit
from benchmarks.gpu.record import BAD, ENDED, Record, read_records, titles
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
    add("--minutes", type=within(float, MINUTES), default=8.0, help="time limit of the whole run (default 8)")
    add("--parts", default=f"A-{max(PARTS)}", help="letters and ranges of letters, such as A-F (default: all)")
    add("--cases", metavar="REGEX", help='only cases whose title, such as "G 1B", has a match of this expression')
    add("--first", action="store_true", help="run the cases that are worth most first")
    add("--site", type=path_word, metavar="DIR", help="a folder of packages that the cases may import")
    old = parser.add_mutually_exclusive_group()
    old.add_argument("--only-failed", type=path_word, metavar="FILE", help="only what failed in this results.jsonl")
    old.add_argument(
        "--resume", type=path_word, metavar="FILE",
        help="leave out what ended in this results.jsonl, well or not, and take over its records",
    )  # fmt: skip
    add("--dry-run", action="store_true", help="play every case at toy size on the CPU")
    return parser


def selected(cases: Sequence[Planned], args: argparse.Namespace, earlier: Sequence[Record]) -> list[Planned]:
    """Returns the cases to run, in their order. earlier: the records of --only-failed or --resume. Raises
    UserErrors."""
    try:
        pattern = re.compile(args.cases or "")
    except re.error as error:
        raise ConfigError(f"--cases {args.cases} is no regular expression: {error}") from None
    wanted = [case for case in cases if pattern.search(case.title)]
    if args.only_failed:
        failed = titles(earlier, BAD)
        wanted = [case for case in wanted if case.title in failed or Record.start(case.part) in failed]
    if args.resume:
        ended = titles(earlier, ENDED)
        wanted = [case for case in wanted if case.title not in ended]
    return by_worth(wanted) if args.first else wanted


def plan(cases: Sequence[Planned], minutes: float) -> str:
    """Returns a line for each case that fits into the time, with its seconds as planned, and one for all others."""
    fitting = that_fit(cases, 60.0 * minutes)
    lines = [f"{case.seconds:6.1f} s  {case.title}" for case in fitting]
    lines.append(
        f"{len(fitting)} of {len(cases)} cases fit into {minutes:g} minutes: {planned_seconds(fitting):.0f} s with the "
        "start of their processes; others run if time is left"
    )
    return "\n".join(lines)


def run(args: argparse.Namespace) -> int:
    """Returns 1 if a case failed. Raises UserErrors."""
    begun = time.monotonic()
    parts: list[Part] = chosen(args.parts)
    old = args.only_failed or args.resume
    earlier = read_records(Path(old)) if old else []
    out, site = Path(args.out).resolve(), Path(args.site).resolve() if args.site else None
    if site is not None and not site.is_dir():
        raise ConfigError(f"--site {args.site} is no folder; give one with unpacked packages")
    selected([], args, earlier)  # a wrong expression is said before anything is written
    out.mkdir(parents=True, exist_ok=True)
    (out / LOG).write_bytes(b"")
    driver = Driver(out, "cpu" if args.dry_run else "cuda", args.dry_run, site)
    listing = driver.listed(parts)
    if not args.dry_run and not listing.gpu:
        raise ConfigError("torch sees no CUDA device; add --dry-run to play every case at toy size on the CPU")
    cases = selected(listing.cases, args, earlier)
    print(plan(cases, args.minutes), flush=True)
    kind = "a dry run at toy size on the CPU" if args.dry_run else "on a GPU"
    report = Report(out, f"Checklist, {kind}, {time.strftime('%Y-%m-%d')}", earlier if args.resume else ())
    for record in listing.broken:
        report.add(record)
    records = [*listing.broken, *driver.run(cases, begun + 60.0 * args.minutes, report.add)]
    print(f"\n{table(records, time.monotonic() - begun)}")
    return 1 if any(record.bad for record in records) else 0


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def main(argv: Sequence[str]) -> int:
    """Returns the exit code, see `exit_code`."""
    return exit_code(lambda: run(build_parser().parse_args(argv)))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _interrupt)  # the running case is then ended, as on Ctrl-C
    sys.exit(main(sys.argv[1:]))
