"""What was asked for on the command line and has no effect on the results."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Note:
    """A flag that is accepted and not in effect: a row of the start-up table, and a refusal with --strict-flags."""

    flag: str
    asked: str  # its values as they were typed; "on" for a switch
    here: str  # what is in effect instead
    why: str

    @property
    def refusal(self) -> str:
        """The line that --strict-flags ends the run with."""
        words = "" if self.asked == "on" else f" {self.asked}"
        return f"{self.flag}{words} is not in effect: {self.here} ({self.why}); remove it, or --strict-flags"
