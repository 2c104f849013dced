"""A flag on the command line that has no effect on the results."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Note:
    """A flag that is accepted but not in effect: a row of the start-up table, and an error with --strict-flags."""

    flag: str
    requested: str  # the value on the command line
    in_effect: str  # the behaviour in effect instead
    why: str

    @property
    def refusal(self) -> str:
        """The error line with --strict-flags."""
        words = "" if self.requested == "on" else f" {self.requested}"
        return f"{self.flag}{words} is not in effect: {self.in_effect} ({self.why}), and --strict-flags refuses that"
