"""Predicts the runs of a table, which may be of any framework. See docs/planner.md.

python -m benchmarks.planner.predict --rows runs.csv --out predicted.csv [--anchor factor|machine]
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.planner.calibration.prediction import ANCHORS, COLUMNS, predict
from megatron.base.errors import ConfigError
from megatron.command_line.exits import check_output, exit_code
from megatron.command_line.flag_parser import FlagParser, path_word
from megatron.planner.time.constants import fitted


def build_parser() -> FlagParser:
    """Returns the parser of the flags."""
    parser = FlagParser(
        prog="python -m benchmarks.planner.predict",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--rows", type=path_word, required=True, metavar="FILE", help="CSV with the columns of docs/planner.md")
    add("--out", type=path_word, required=True, metavar="FILE", help="CSV to write")
    add(
        "--anchor",
        choices=ANCHORS,
        help="correct the predictions by the rows that have use=anchor: one factor per source (factor), or the six "
        "factors of the machine (machine)",
    )
    return parser


def main(argv: Sequence[str]) -> int:
    """Returns the exit code, see `exit_code`."""
    return exit_code(lambda: write_predictions(argv))


def write_predictions(argv: Sequence[str]) -> None:
    """Writes a row for each row. Raises UserErrors."""
    args = build_parser().parse_args(argv)
    check_output("--out", args.out, {"--rows": args.rows})
    rows = read_rows(args.rows)
    predictions = predict(rows, fitted(), args.anchor)
    with Path(args.out).open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(predictions)
    planned = sum(not row["reason"] for row in predictions)
    print(f"{args.out} written: {planned} of {len(predictions)} rows are planned, the others say why not")


def read_rows(path: str) -> list[dict[str, str]]:
    """Returns the rows of a CSV file. Raises ConfigError."""
    try:
        with Path(path).open(newline="", encoding="utf-8-sig") as file:
            rows = [{key: value or "" for key, value in row.items() if key is not None} for row in csv.DictReader(file)]
    except (UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"--rows {path} is no CSV file in UTF-8: {' '.join(str(error).split())}") from None
    if not rows:
        raise ConfigError(f"--rows {path} has no rows below its heading; give at least one")
    return rows


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
