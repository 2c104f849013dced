"""What becomes of the flags of Megatron-LM, of its forks and of its older releases: flag_table.csv as objects.

One row for a flag, for some of its values, or for a family of flags (`--moe-*`). A row may hold beside another flag only. Of
the rows that fit, one for certain values goes before others, then one for a flag beside it. Columns of the file:

    subject    what the flags around it are about, for the reader
    flag       as it is typed; `*` stands for any end
    arity      how many values follow: a number, `+` one or more, `*` any
    value      the words that a value which the row is about is made of, separated by spaces; empty: all others
    beside     another flag (or `--flag=value`) that must be on the command line, too
    outcome    read: a flag of this program
               same: asks for what every run does; accepted
               noop: changes no result; accepted, with a row in the start-up table
               refuse: would change results; the run stops
               alias: another name
    here       noop: what is in effect instead; refuse: what to do instead; alias: the words that are meant, with `{}` for
               its values, `{-1}` for a value less one and `{--load}` for the values of another flag
    text       same, noop: why; refuse: what the flag does
"""

from __future__ import annotations

import csv
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

READ, SAME, NOOP, REFUSE, ALIAS = OUTCOMES = ("read", "same", "noop", "refuse", "alias")
Typed = Mapping[str, Sequence[str]]  # flags of a command line, with their values


@dataclass(frozen=True)
class FlagRow:
    """A row of the table."""

    subject: str
    flag: str
    arity: str
    values: tuple[str, ...]
    beside: str
    outcome: str
    here: str
    text: str

    def fits(self, words: Sequence[str], typed: Typed) -> bool:
        """Whether the row is about a flag with these values on this command line."""
        if self.values and not (words and set(words) <= set(self.values)):
            return False
        other, _, value = self.beside.partition("=")
        return not other or (other in typed and (not value or list(typed[other]) == [value]))


def is_listed(flag: str) -> bool:
    """Whether the table knows the flag, with any value."""
    exact, families = _index()
    return flag in exact or any(fnmatchcase(flag, row.flag) for row in families)


def find_row(flag: str, words: Sequence[str], typed: Typed) -> FlagRow | None:
    """The row about `flag` with the values `words` on a command line that holds `typed`, or None."""
    exact, families = _index()
    rows = [*exact.get(flag, ()), *(row for row in families if fnmatchcase(flag, row.flag))]
    return next((row for row in rows if row.fits(words, typed)), None)


@functools.cache
def flag_table() -> tuple[FlagRow, ...]:
    """All rows, in the order of the file."""
    with Path(__file__).with_name("flag_table.csv").open(encoding="utf-8", newline="") as file:
        return tuple(_row(**line) for line in csv.DictReader(file))


def _row(value: str, **columns: str) -> FlagRow:
    return FlagRow(values=tuple(value.split()), **columns)


@functools.cache
def read_flags() -> frozenset[str]:
    """Megatron-LM's flags that this program has, too."""
    return frozenset(row.flag for row in flag_table() if row.outcome == READ)


@functools.cache
def _index() -> tuple[dict[str, list[FlagRow]], list[FlagRow]]:
    exact: dict[str, list[FlagRow]] = {}
    families = []
    for row in flag_table():
        if "*" in row.flag:
            families.append(row)
        else:
            exact.setdefault(row.flag, []).append(row)
    for rows in exact.values():
        rows.sort(key=lambda row: (not row.values, not row.beside))
    families.sort(key=lambda row: not row.beside)
    return exact, families
