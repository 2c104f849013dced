"""The outcomes of flags of Megatron-LM, its forks and its older releases: flag_table.csv as objects.

There is one row per flag, some of its values, or a family of flags (`--moe-*`). A row may apply only together with
another flag. Of the applicable rows, one for certain values takes precedence, then one that requires another flag.
Columns of the file:

  subject    the topic of the flags around it, for the reader
  flag       as typed; `*` stands for any end
  arity      the number of values: a number, `+` one or more, `*` any
  value      the words of the values to which the row applies, separated by spaces; empty: all others
  beside     another flag (or `--flag=value`) that must be on the command line, too
  outcome    read: a flag of this program
             same: asks for the behaviour of every run; accepted
             noop: changes no result; accepted, with a row in the start-up table
             refuse: would change results; the run stops
             alias: another name
  here       noop: the behaviour in effect instead; refuse: what to do instead; alias: the intended words, with `{}` for
             its values, `{-1}` for a value minus one and `{--load}` for the values of another flag
  text       same, noop: the reason; refuse: the effect of the flag
"""

from __future__ import annotations

import csv
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

READ, SAME, NOOP, REFUSE, ALIAS = OUTCOMES = ("read", "same", "noop", "refuse", "alias")
TypedFlags = Mapping[str, Sequence[str]]  # flags of a command line, with their values


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

    def fits(self, words: Sequence[str], typed: TypedFlags) -> bool:
        """Returns whether the row applies to a flag with these values on this command line."""
        if self.values and not (words and set(words) <= set(self.values)):
            return False
        other, _, value = self.beside.partition("=")
        return not other or (other in typed and (not value or list(typed[other]) == [value]))


def is_listed(flag: str) -> bool:
    """Returns whether the table contains the flag, with any value."""
    exact, families = _index()
    return flag in exact or any(fnmatchcase(flag, row.flag) for row in families)


def find_row(flag: str, words: Sequence[str], typed: TypedFlags) -> FlagRow | None:
    """Returns the row for `flag` with the values `words` on a command line with the flags `typed`, or None."""
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
    """Returns Megatron-LM's flags that this program has, too."""
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
