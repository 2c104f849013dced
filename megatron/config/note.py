"""A flag on the command line that has no effect on the results."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Note:
    """A flag that is accepted but not in effect: a row of the start-up table, and an error with --strict-flags."""

    flag: str
    asked: str  # the behaviour in effect instead
    here: str  # the behaviour in effect instead
    why: str

    @property
    def refusal(self) -> str:
        """The error line with --strict-flags."""
        words = "" if self.asked == "on" else f" {self.asked}"
        return f"{self.flag}{words} is not in effect: {self.here} ({self.why}), and --strict-flags refuses that"
