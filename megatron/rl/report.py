"""What a source of batches reports to the log."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class LearningReport:
    """Figures of some steps by name. iteration: steps before them. steps: their number."""

    iteration: int
    steps: int
    numbers: dict[str, float]

    @property
    def last_iteration(self) -> int:
        """Steps of the run when those of the report are done."""
        return self.iteration + self.steps
