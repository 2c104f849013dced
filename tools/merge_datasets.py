"""Join all `.bin/.idx` datasets of a folder, by name, into one. See docs/data.md."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from megatron.core.datasets.indexed import merge_datasets
from megatron.core.errors import USER_ERROR_EXIT_CODE, DataError, UserError
from megatron.core.log import get_logger, setup_logging
from megatron.training.arguments import FlagParser

LOGGER = get_logger(__name__)


def main(argv: Sequence[str]) -> int:
    """0, or 2 after one line on stderr for a mistake of the user's."""
    setup_logging(rank=0)
    parser = FlagParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--input", required=True, metavar="DIR", help="folder of the datasets")
    parser.add_argument("--output-prefix", required=True, metavar="PREFIX", help="writes PREFIX.bin and PREFIX.idx")
    try:
        args = parser.parse_args(argv)
        prefixes = sorted(
            {path.with_suffix("") for kind in ("idx", "bin") for path in Path(args.input).glob(f"*.{kind}")}
        )
        if not prefixes:
            raise DataError(f"--input {args.input} holds no .bin/.idx pair; give the folder of the datasets")
        merge_datasets(prefixes, args.output_prefix)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return USER_ERROR_EXIT_CODE
    LOGGER.info("merged %s into %s", ", ".join(prefix.name for prefix in prefixes), args.output_prefix)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
