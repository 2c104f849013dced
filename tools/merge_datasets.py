"""Join all `.bin/.idx` datasets of a folder, by name, into one. See docs/data.md."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron.base.errors import DataError
from megatron.base.log import get_logger, setup_logging
from megatron.command_line.exits import exit_code
from megatron.command_line.flag_parser import FlagParser, path_word
from megatron.core.datasets.indexed import merge_datasets

LOGGER = get_logger(__name__)


def build_parser() -> FlagParser:
    """Returns a parser of the tool's flags."""
    parser = FlagParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--input", type=path_word, required=True, metavar="DIR", help="folder of the datasets")
    parser.add_argument(
        "--output-prefix", type=path_word, required=True, metavar="PREFIX", help="writes PREFIX.bin and PREFIX.idx"
    )
    return parser


def main(argv: Sequence[str]) -> int:
    """Returns the exit code, see `exit_code`."""
    setup_logging(rank=0)
    return exit_code(lambda: run(build_parser().parse_args(argv)))


def run(args: argparse.Namespace) -> None:
    """Merges the datasets and logs their names. Raises UserErrors."""
    prefixes = sorted({path.with_suffix("") for kind in ("idx", "bin") for path in Path(args.input).glob(f"*.{kind}")})
    if not prefixes:
        raise DataError(f"--input {args.input} holds no .bin/.idx pair; give the folder of the datasets")
    merge_datasets(prefixes, args.output_prefix)
    LOGGER.info("merged %s into %s", ", ".join(prefix.name for prefix in prefixes), args.output_prefix)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
