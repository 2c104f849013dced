"""tools/plan.py predict: predicts the runs of a table."""

from __future__ import annotations

import argparse
import csv
from collections.abc import Sequence
from pathlib import Path

from megatron.base.errors import ConfigError
from megatron.command_line.exits import check_output
from megatron.command_line.flag_parser import path_word
from megatron.planner.time.constants import fitted
from megatron.planner.time.predict import ANCHORS, COLUMNS, predict


def add_predict_command(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `predict`."""
    add = parser.add_argument
    add("--rows", type=path_word, required=True, metavar="FILE", help="CSV with the columns of docs/planner.md")
    add("--out", type=path_word, required=True, metavar="FILE", help="CSV to write")
    add(
        "--anchor",
        choices=ANCHORS,
        help="correct the predictions by the rows that have use=anchor: one factor per source (factor), or the six "
        "factors of the machine (machine)",
    )
    parser.set_defaults(work=plan_predict)


def plan_predict(args: argparse.Namespace, others: Sequence[str]) -> None:
    """Writes a row for each row. Raises UserErrors."""
    if others:
        raise ConfigError(f"unrecognized arguments: {' '.join(others)}; python tools/plan.py predict --help lists all")
    check_output("--out", args.out, {"--rows": args.rows})
    rows = read_rows(args.rows)
    found = predict(rows, fitted(), args.anchor)
    with Path(args.out).open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(found)
    planned = sum(not row["reason"] for row in found)
    print(f"{args.out} written: {planned} of {len(found)} rows are planned, the others say why not")


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
