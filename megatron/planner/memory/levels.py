"""Memory of K sizes of a microbatch at once: sums of the bytes of all kinds, without names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

ManyBytes = NDArray[np.float64]
_Item = TypeVar("_Item")
_UNNAMED = nullcontext()


@dataclass(frozen=True)
class Levels:
    """Bytes of some work, whatever was in use before it: what it leaves behind, and the most at once. Each is [K]."""

    kept: ManyBytes
    peak: ManyBytes

    def then(self, other: Levels) -> Levels:
        """Returns this work and then the other."""
        return Levels(self.kept + other.kept, np.maximum(self.peak, self.kept + other.peak))


class ArrayTrace:
    """Bytes in use, now and at most, [K] each. zero: [K] zeros."""

    def __init__(self, zero: ManyBytes) -> None:
        self._zero = self.level = self.peak = zero

    def doing(self, name: str) -> AbstractContextManager[None]:
        """Names are not kept."""
        return _UNNAMED

    def take(self, kind: str, size: ManyBytes | int) -> None:
        """See MemoryTrace."""
        self.level = self.level + size
        self.peak = np.maximum(self.peak, self.level)

    def free(self, kind: str, size: ManyBytes | int) -> None:
        """See MemoryTrace."""
        self.level = self.level - size

    def use(self, kind: str, size: ManyBytes | int) -> None:
        """See MemoryTrace."""
        self.peak = np.maximum(self.peak, self.level + size)

    def replay(self, profile: Levels) -> None:
        """See MemoryTrace."""
        self.peak = np.maximum(self.peak, self.level + profile.peak)
        self.level = self.level + profile.kept

    def repeat(self, alike: Sequence[_Item], work: Callable[[Any, _Item], None]) -> None:
        """See MemoryTrace. Only the first of the items is looked at."""
        first, *others = alike
        if not others:
            work(self, first)
            return
        once = levels_of(lambda trace: work(trace, first), self._zero)
        before = once.kept * len(others)
        self.replay(Levels(once.kept + before, np.maximum(once.peak, before + once.peak)))


def levels_of(work: Callable[[ArrayTrace], None], zero: ManyBytes) -> Levels:
    """Returns the levels of the events that `work` reports."""
    trace = ArrayTrace(zero)
    work(trace)
    return Levels(trace.level, trace.peak)
