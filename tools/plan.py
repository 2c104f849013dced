"""Plans a layout before a run. Starts no process and needs no device.

schedule   draws a pipeline schedule and prints its time, idle fraction and peak activations. See docs/pipeline.md.
memory     prints the memory that each pipeline rank of a run needs, by purpose, and at its peak. See docs/memory.md.
time       prints the time of a run's step on a cluster, by part. See docs/planner.md.
search     finds the fastest layouts of a run on a cluster, and prints their commands. See docs/planner.md.

python tools/plan.py schedule --pipeline-model-parallel-size 4 --num-microbatches 8 --schedule zb-v --png zb-v.png
python tools/plan.py memory --world-size 16 <the flags of the run>
python tools/plan.py time --cluster h100:2x8 <the flags of the run>
python tools/plan.py search --cluster h100:2x8 <the flags of the model and the batch>
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from megatron.command_line.exits import exit_code
from megatron.command_line.flag_parser import FlagParser
from megatron.tooling.plan.memory import add_memory_command
from megatron.tooling.plan.schedule import add_schedule_command
from megatron.tooling.plan.search import add_search_command
from megatron.tooling.plan.time import add_time_command


def build_parser() -> FlagParser:
    """Returns a parser with one subcommand per question."""
    parser = FlagParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    commands = parser.add_subparsers(required=True, metavar="command")
    for name, add, text, flags in (
        ("schedule", add_schedule_command, "draw and time a pipeline schedule", None),
        (
            "memory",
            add_memory_command,
            "memory of a run",
            "[--world-size N] [--cpu-multiplies-halves] [--moe-load-imbalance X]",
        ),
        ("time", add_time_command, "time of a run's step", "--cluster NAME|FILE [--profile FILE] [--world-size N]"),
        (
            "search",
            add_search_command,
            "the fastest layouts of a run",
            "--cluster NAME|FILE [--profile FILE] [--space TEXT] [...]",
        ),
    ):
        usage = None if flags is None else f"%(prog)s {flags} FLAGS OF THE RUN"
        add(commands.add_parser(name, help=text, usage=usage, allow_abbrev=False))
    return parser


def main(argv: Sequence[str]) -> int:
    """Returns the exit code, see `exit_code`."""
    return exit_code(lambda: run(argv))


def run(argv: Sequence[str]) -> None:
    """Answers one question. Raises UserErrors."""
    args, flags = build_parser().parse_known_args(argv)
    args.work(args, flags)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
