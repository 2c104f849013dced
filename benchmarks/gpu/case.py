"""What a part is made of: cases, and the setting that they run in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu.record import NotRunError

TOY_SECONDS = 180.0  # the time limit of a case of a dry run, on a machine that may be busy


@dataclass(frozen=True)
class Setting:
    """Where cases run. device: "cuda" or "cpu". toy: toy sizes, for a dry run. out: the folder of the results."""

    device: str
    toy: bool
    out: Path

    @property
    def cuda(self) -> bool:
        """Whether the device is a GPU."""
        return self.device == "cuda"

    def size(self, real: int, toy: int) -> int:
        """Returns one of two sizes."""
        return toy if self.toy else real

    def needs_cuda(self, what: str) -> None:
        """Raises NotRunError on the CPU. `what` exists on CUDA only."""
        if not self.cuda:
            raise NotRunError(f"{what} needs a GPU")


@dataclass
class Result:
    """The figures of a case: a line for people, and the values for programs."""

    text: str
    values: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """One check or measurement. `run` raises an exception if it fails, and NotRunError if it cannot run here.

    seconds: planned on a GPU. A case that is planned to take longer than the part has left is skipped.
    limit: the part's process is ended, and started again for the cases after this one, when it takes longer.
    """

    name: str
    run: Callable[[], Result]
    seconds: float = 3.0
    limit: float = 60.0


class CheckError(Exception):
    """A check failed. values: figures for the record."""

    def __init__(self, message: str, values: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.values = values or {}


def check(holds: bool, message: str, values: dict[str, Any] | None = None) -> None:
    """Raises CheckError unless the condition holds. A comparison with NaN does not."""
    if not holds:
        raise CheckError(message, values)
