"""Check that a model trains equally under every layout: python tools/layout_parity.py -- <pretrain_gpt.py's flags>

Runs the flags' model at reduced size for some steps on CPU processes under a grid of tensor-, sequence-, pipeline-,
context-, data- and expert-parallel layouts, and compares losses and first gradients with one process. Of a model with
experts their choices, biases and balance losses are compared, too. Exit code 1 if a layout differs by more than the
limit, 2 if the flags are invalid.
"""

import argparse
import dataclasses
import sys
from collections.abc import Sequence

from megatron.command_line.exits import exit_code
from megatron.command_line.flag_parser import FlagParser, within
from megatron.command_line.read import parse
from megatron.config.interval import COUNT, NOT_NEGATIVE
from megatron.config.run import RunConfig
from megatron.tooling.layout_parity import Difference, Measurement, compare, reduced, run_layout
from megatron.tooling.layouts import EXPERT_GRID, GRID, ParityLayout

LIMIT = 1e-5
TIE = 1e-5  # margin of a choice, of the spread of the scores or of a weight, below which rounding decides


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
    requested = parse(flags, description="the model to check")
    grid = GRID if requested.model.num_experts is None else EXPERT_GRID
    references = dict[int, tuple[RunConfig, Measurement]]()
    print(f"{'layout':44s} {'max loss difference':>20s} {'max gradient difference':>24s}  worst parameter")
    failed = []
    for layout in grid:
        if layout.layers not in references:
            model = reduced(requested, args.steps, layout.layers)
            reference = run_layout(model, grid[0])
            references[layout.layers] = model, reference
            end = f"{layout.layers} layers, final loss {reference.losses[-1]:.6f}"
            print(f"{grid[0]!s:44s} {'reference':>20s} {'reference':>24s}  {end}", flush=True)
        if layout == grid[0]:
            continue
        difference, note = compare_choices(*references[layout.layers], layout)
        print(
            f"{layout!s:44s} {difference.loss:20.2e} {difference.gradient:24.2e}  {difference.parameter}{note}",
            flush=True,
        )
        numbers = (difference.loss, difference.gradient, difference.norm, difference.balance)
        if (
            difference.choice is not None
            or not difference.same_biases
            or not all(number <= args.limit for number in numbers)
        ):
            failed.append(str(layout))
    verdict = f"differ by more than {args.limit:g}: {', '.join(failed)}" if failed else f"all within {args.limit:g}"
    print(f"{len(grid) - 1} layouts against {grid[0]} over {args.steps} steps: {verdict}")
    return 1 if failed else 0


def compare_choices(model: RunConfig, reference: Measurement, layout: ParityLayout) -> tuple[Difference, str]:
    """Returns the difference of a layout, and a note about tokens that it sends to other experts.

    If only ties differ, experts of a token or tokens of an expert at its capacity whose scores are equal up to rounding,
    the layout is compared again with the choices of the reference, and the biases are not compared.
    """
    difference = compare(reference, run_layout(model, layout))
    if difference.choice is None:
        return difference, "" if difference.same_biases else "; the biases differ"
    step, layer, place, margin = difference.choice
    note = f"; step {step}, layer {layer}, place {place} has other experts (margin {margin:.1e} of the scores)"
    if margin > TIE:
        return difference, note
    forced = compare(reference, run_layout(model, layout, reference))
    return dataclasses.replace(forced, same_biases=True), f"{note}: a tie, compared with the choices of the reference"


def main(argv: Sequence[str]) -> int:
    """Returns the exit code, see `exit_code`."""
    return exit_code(lambda: run(build_parser().parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
