"""Measures a machine for the planner: layers, messages, copies and updates. docs/planner.md explains the file.

Its name is not profile.py: that is a module of the standard library, which torch imports, and Python would find it
here.

python tools/profile_machine.py --out machine.json <the flags of the run>
torchrun --nproc-per-node 8 tools/profile_machine.py --out machine.json <the flags of the run>
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence

from megatron.base.launch import launch_environment
from megatron.base.log import setup_logging
from megatron.command_line.exits import exit_code
from megatron.command_line.flag_parser import FlagParser
from megatron.tooling.profile.measure import add_flags, profile
from megatron.tooling.tool import end


def build_parser() -> FlagParser:
    """Returns a parser of the tool's flags."""
    parser = FlagParser(
        description=__doc__,
        usage="%(prog)s --out FILE [flags] FLAGS OF THE RUN",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_flags(parser)
    return parser


def run(argv: Sequence[str]) -> None:
    """Takes a profile. Raises UserErrors."""
    with contextlib.redirect_stdout(sys.stderr):
        setup_logging(launch_environment()[0])
    args, flags = build_parser().parse_known_args(argv)
    profile(args, flags)


def main(argv: Sequence[str]) -> int:
    """Returns the exit code, see `exit_code`."""
    if code := exit_code(_check_launch):
        return code
    return exit_code(lambda: run(argv), launch_environment()[0])


def _check_launch() -> None:
    launch_environment()


if __name__ == "__main__":
    if code := main(sys.argv[1:]):
        end(code)
