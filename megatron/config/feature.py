"""A row of the start-up table."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Feature:
    """A feature as asked for and as in effect. `why` is empty if the run does what was requested."""

    name: str
    asked: str
    in_effect: str
    why: str
