"""What a part is made of: cases, and the setting that they run in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu.record import NotRunError

TOY_SECONDS = 180.0  # the time limit of a case of a dry run, on a machine that may be busy
LIMIT_SECONDS = 15.0  # what a case may take beyond its plan
COMPILE_SECONDS = 1.0  # of a Triton kernel, or of cuDNN's plans for a shape, at its first use on a machine
TIMING_SECONDS = 0.25  # of `measure.timed`: warm-up and two repeats


def measuring(timings: int, compiled: int = 0) -> float:
    """Returns the seconds to plan for so many timings and so many kernels that are compiled first."""
    return 0.5 + timings * TIMING_SECONDS + compiled * COMPILE_SECONDS


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

    seconds: planned on a GPU, without the start of a process. A case that is planned to take longer than is left is
    skipped. limit: its process is ended, and another one runs the cases after this one, when it takes longer.
    """

    name: str
    run: Callable[[], Result]
    seconds: float = 2.0
    limit: float = 0.0  # 0: LIMIT_SECONDS more than three times what is planned

    def time_limit(self, *, toy: bool) -> float:
        """Returns the seconds after which the case has hung."""
        if self.limit:
            return self.limit
        return TOY_SECONDS if toy else LIMIT_SECONDS + 3.0 * self.seconds


class CheckError(Exception):
    """A check failed. values: figures for the record."""

    def __init__(self, message: str, values: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.values = values or {}


def check(holds: bool, message: str, values: dict[str, Any] | None = None) -> None:
    """Raises CheckError unless the condition holds. A comparison with NaN does not."""
    if not holds:
        raise CheckError(message, values)
