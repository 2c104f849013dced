"""The outcomes of flags of Megatron-LM, its forks and its older releases: flag_table.csv as objects.

A row is about one or more flags, or some of their values. It may apply only together with another flag. Of the
applicable rows, one for certain values takes precedence, then one that requires another flag. Flags are listed by name,
because a pattern such as `--moe-*` would also answer misspelled flags, and names of other programs. The names are those
in the sources of Megatron-LM (since 2020), Megatron-DeepSpeed, MindSpeed, FlagScale, Pai-Megatron-Patch, zero-bubble
pipeline parallelism and the forks that docs/migrating.md names, and some in public launch scripts. Columns of the file:

  subject    the topic of the flags around it, for the reader
  flag       as typed; several flags are separated by spaces
  arity      the number of values: a number, `+` one or more, `*` any
  value      the words of the values to which the row applies, separated by spaces; empty: all others
  beside     other flags (or `--flag=value`), separated by spaces, that must be on the command line, too
  outcome    read: a flag of this program
             same: asks for the behaviour of every run; accepted
             noop: changes no result; accepted, with a row in the start-up table
             refuse: would change results; the run stops
             alias: another name
  instead    noop: the behaviour in effect instead; refuse: what to do instead; alias: the intended words, with `{}` for
             its values, `{-1}` for a value minus one and `{--load}` for the values of another flag
  text       same, noop: the reason; refuse: the effect of the flag
"""

from __future__ import annotations

import csv
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

READ, SAME, NOOP, REFUSE, ALIAS = OUTCOMES = ("read", "same", "noop", "refuse", "alias")
TypedFlags = Mapping[str, Sequence[str]]  # flags of a command line, with their values


@dataclass(frozen=True)
class FlagRow:
    """A row of the table, for one of its flags."""

    subject: str
    flag: str
    arity: str
    values: tuple[str, ...]
    beside: str
    outcome: str
    instead: str
    text: str

    def fits(self, words: Sequence[str], typed: TypedFlags) -> bool:
        """Returns whether the row applies to a flag with these values on this command line."""
        if self.values and not (words and set(words) <= set(self.values)):
            return False
        conditions = (condition.partition("=") for condition in self.beside.split())
        return all(other in typed and (not value or list(typed[other]) == [value]) for other, _, value in conditions)


def is_listed(flag: str) -> bool:
    """Returns whether the table contains the flag, with any value."""
    return flag in _index()


def find_row(flag: str, words: Sequence[str], typed: TypedFlags) -> FlagRow | None:
    """Returns the row for `flag` with the values `words` on a command line with the flags `typed`, or None."""
    return next((row for row in _index().get(flag, ()) if row.fits(words, typed)), None)


@functools.cache
def flag_table() -> tuple[FlagRow, ...]:
    """All rows, one for each of their flags, in the order of the file."""
    with Path(__file__).with_name("flag_table.csv").open(encoding="utf-8", newline="") as file:
        return tuple(row for line in csv.DictReader(file) for row in _rows(**line))


def _rows(flag: str, value: str, **columns: str) -> Iterator[FlagRow]:
    for name in flag.split():
        yield FlagRow(flag=name, values=tuple(value.split()), **columns)


@functools.cache
def read_flags() -> frozenset[str]:
    """Returns Megatron-LM's flags that this program has, too."""
    return frozenset(row.flag for row in flag_table() if row.outcome == READ)


@functools.cache
def _index() -> dict[str, list[FlagRow]]:
    rows_of: dict[str, list[FlagRow]] = {}
    for row in flag_table():
        rows_of.setdefault(row.flag, []).append(row)
    for rows in rows_of.values():
        rows.sort(key=lambda row: (not row.values, not row.beside))
    return rows_of
