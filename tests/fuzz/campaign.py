"""What every randomised campaign shares: drawing cases from a seed, running them, and shrinking a failure.

A campaign is a `Campaign`: functions that draw a case, check it, propose simpler ones, and say what a person types to
see it again. A case is a frozen value that prints as Python. Case `i` of seed `S` depends on nothing but `S` and `i`,
so any case can be run alone: `python -m tests.fuzz.<name> --seed S --only i`.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

C = TypeVar("C")


class Failure(Exception):
    """The product broke a promise in this case; the message says which, with the values."""


@dataclass(frozen=True)
class Campaign(Generic[C]):
    """One kind of randomised test.

    draw(rng): a case. check(case, folder): run it in an empty folder; returns a word to count it under ("same",
    "refused") and raises Failure, or anything unexpected, when the product is wrong. simpler(case): cases that are one
    step simpler, the boldest step first; a case is never simpler than itself, so shrinking ends. command(case): what to
    type to run just this case by hand.
    """

    name: str
    draw: Callable[[random.Random], C]
    check: Callable[[C, Path], str]
    simpler: Callable[[C], Iterable[C]]
    command: Callable[[C], str]


@dataclass(frozen=True)
class Found(Generic[C]):
    """A case that failed, the smallest case found that fails too, and the message of that one."""

    number: int
    case: C
    smallest: C
    message: str


def case_of(campaign: Campaign[C], seed: int, number: int) -> C:
    """Case `number` of `seed`."""
    return campaign.draw(random.Random(f"{campaign.name}:{seed}:{number}"))


def outcome(campaign: Campaign[C], case: C) -> tuple[str, str]:
    """(word to count the case under, message): ("failed", why) or (the word of `check`, "")."""
    with tempfile.TemporaryDirectory(prefix=f"fuzz-{campaign.name}-") as folder:
        try:
            return campaign.check(case, Path(folder)), ""
        except Failure as failure:
            return "failed", str(failure)
        except Exception:
            return "failed", traceback.format_exc().strip()


def shrink(campaign: Campaign[C], case: C, message: str, tries: int) -> tuple[C, str]:
    """The smallest case found that still fails, and its message, after `tries` runs at the most."""
    left = tries
    progress = True
    while progress:
        progress = False
        for candidate in campaign.simpler(case):
            if left == 0:
                return case, message
            left -= 1
            word, text = outcome(campaign, candidate)
            if word == "failed":
                case, message, progress = candidate, text, True
                break
    return case, message


def run(
    campaign: Campaign[C],
    seed: int,
    numbers: Iterable[int],
    *,
    shrink_tries: int = 60,
    say: Callable[[str], None] = lambda line: None,
) -> tuple[Counter[str], list[Found[C]]]:
    """Run the cases of these numbers: how many had each outcome, and what failed. `say` gets a line per event."""
    counts: Counter[str] = Counter()
    found: list[Found[C]] = []
    for number in numbers:
        case = case_of(campaign, seed, number)
        began = time.monotonic()
        word, message = outcome(campaign, case)
        counts[word] += 1
        say(f"case {number}: {word} ({time.monotonic() - began:.1f} s)  {case}")
        if word == "failed":
            smallest, message = shrink(campaign, case, message, shrink_tries)
            found.append(Found(number, case, smallest, message))
            say(f"  smallest: {smallest}\n  {message}\n  to see it: {campaign.command(smallest)}")
    return counts, found


def report(campaign: Campaign[C], seed: int, counts: Counter[str], found: Sequence[Found[C]]) -> str:
    """A summary, and each failure with the command that shows it."""
    words = ", ".join(f"{count} {word}" for word, count in sorted(counts.items()))
    lines = [f"{campaign.name}, seed {seed}: {counts.total()} cases: {words}"]
    for failure in found:
        lines.append(f"case {failure.number}: {failure.smallest}\n  {failure.message}")
        lines.append(f"  to see it: {campaign.command(failure.smallest)}")
    return "\n".join(lines)


def expect_none_fails(campaign: Campaign[C], seed: int, cases: int) -> Counter[str]:
    """The bounded sample of `make test`: raises AssertionError with the report when any of the cases fails."""
    counts, found = run(campaign, seed, range(cases), shrink_tries=0)
    assert not found, report(campaign, seed, counts, found)
    return counts


def main(campaign: Campaign[C], argv: Sequence[str] | None = None) -> None:
    """The command line of a campaign. Exits with 1 when a case failed."""
    parser = argparse.ArgumentParser(prog=f"python -m tests.fuzz.{campaign.name}")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cases", type=int, default=50, help="run the cases 0 to N-1 of the seed")
    parser.add_argument("--first", type=int, default=0, help="start at this case, to continue a long campaign")
    parser.add_argument("--only", type=int, metavar="I", help="run just case I of the seed")
    parser.add_argument("--shrink-tries", type=int, default=60, help="most runs spent on shrinking one failure")
    args = parser.parse_args(argv)
    numbers = range(args.first, args.cases) if args.only is None else [args.only]
    counts, found = run(
        campaign, args.seed, numbers, shrink_tries=args.shrink_tries, say=lambda line: print(line, flush=True)
    )
    print(report(campaign, args.seed, counts, found))
    sys.exit(1 if found else 0)
