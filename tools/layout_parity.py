"""Check that a model trains equally under every layout: python tools/layout_parity.py -- <pretrain_gpt.py's flags>

Runs the flags' model at reduced size for some steps on CPU processes under a grid of tensor-, sequence-, pipeline-,
context- and data-parallel layouts, and compares losses and first gradients with one process. Exit code 1 if a layout
differs by more than the limit, 2 if the flags are invalid.
"""

import argparse
import sys
from collections.abc import Sequence

from megatron.command_line.exits import exit_code
from megatron.command_line.flag_parser import FlagParser, within
from megatron.command_line.read import parse
from megatron.config.interval import COUNT, NOT_NEGATIVE
from megatron.tooling.layout_parity import GRID, compare, reduced, run_layout

LIMIT = 1e-5


def build_parser() -> FlagParser:
    """Returns a parser of the tool's flags."""
    parser = FlagParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    steps, limit = within(int, COUNT), within(float, NOT_NEGATIVE)
    parser.add_argument("--steps", type=steps, default=20, help="training steps per layout (default 20)")
    parser.add_argument("--limit", type=limit, default=LIMIT, help=f"largest relative difference (default {LIMIT})")
    parser.add_argument("flags", nargs=argparse.REMAINDER, help="after --: the flags of pretrain_gpt.py")
    return parser


def run(args: argparse.Namespace) -> int:
    """Prints one row per layout; returns the exit code. Raises UserErrors."""
    flags = args.flags[1:] if args.flags[:1] == ["--"] else args.flags
    model = reduced(parse(flags, description="the model to check"), args.steps)
    reference = run_layout(model, GRID[0])
    print(f"{'layout':26s} {'max loss difference':>20s} {'max gradient difference':>24s}  worst parameter")
    print(f"{GRID[0]!s:26s} {'reference':>20s} {'reference':>24s}  final loss {reference.losses[-1]:.6f}", flush=True)
    failed = []
    for layout in GRID[1:]:
        found = compare(reference, run_layout(model, layout))
        print(f"{layout!s:26s} {found.loss:20.2e} {found.gradient:24.2e}  {found.parameter}", flush=True)
        if not (found.loss <= args.limit and found.gradient <= args.limit):
            failed.append(str(layout))
    verdict = f"differ by more than {args.limit:g}: {', '.join(failed)}" if failed else f"all within {args.limit:g}"
    print(f"{len(GRID) - 1} layouts against {GRID[0]} over {args.steps} steps: {verdict}")
    return 1 if failed else 0


def main(argv: Sequence[str]) -> int:
    """Returns the exit code, see `exit_code`."""
    return exit_code(lambda: run(build_parser().parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
