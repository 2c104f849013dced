"""Named timers of the parts of a step, and the block that prints them over ranks.

The device runs asynchronously to the host, so timers synchronize before and after, which costs speed: they are off
unless --timing-log-level requests them. Rare phases (saving, loading) are timed by the host's clock alone, see
timed_phase.py.

Names, as in Megatron-LM. Level 1: forward-backward, all-grads-sync, optimizer. Level 2: batch-generator,
forward-compute, backward-compute.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType


class Timers:
    """Seconds per name since the last `take`. `with timers("optimizer", level=1):` times the block.

    `level` is --timing-log-level; timers above it cost one comparison. `synchronize` waits for the device. Blocks of
    different names may nest; a block may not nest in one of its own name.
    """

    def __init__(self, level: int, synchronize: Callable[[], None]) -> None:
        self._level = level
        self._synchronize = synchronize
        self._seconds: dict[str, float] = {}
        self._blocks: dict[str, _Block] = {}

    def __call__(self, name: str, level: int) -> AbstractContextManager[None]:
        if level > self._level:
            return _OFF
        block = self._blocks.get(name)
        if block is None:
            block = self._blocks[name] = _Block(name, self._seconds, self._synchronize if level else None)
        return block

    def take(self) -> dict[str, float]:
        """Returns name -> seconds since the last call, in order of first use, and resets them."""
        taken = dict(self._seconds)
        self._seconds.clear()
        return taken


class _Block(AbstractContextManager[None]):
    """Adds the time between its entry and exit to `seconds[name]`. A block that raises is not counted."""

    def __init__(self, name: str, seconds: dict[str, float], synchronize: Callable[[], None] | None) -> None:
        self._name = name
        self._seconds = seconds
        self._synchronize = synchronize
        self._start: float | None = None

    def __enter__(self) -> None:
        assert self._start is None, f"timer {self._name} is already running"
        self._start = self._now()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._start is not None, f"timer {self._name} was not started"
        start, self._start = self._start, None
        if kind is not None:
            return  # after a failure, waiting for the device could hang or hide the first error
        self._seconds[self._name] = self._seconds.get(self._name, 0.0) + self._now() - start

    def _now(self) -> float:
        if self._synchronize is not None:
            self._synchronize()
        return time.perf_counter()


_OFF: AbstractContextManager[None] = nullcontext()


def format_timers(ranks: list[dict[str, float]], iterations: int = 1) -> str:
    """Formats the times over ranks: one `take()` per rank, summed over `iterations` steps; "" if nothing was timed.

    A name's minimum and maximum are over the ranks that have it: a pipeline stage has names that others lack.
    """
    names = dict.fromkeys(name for rank in ranks for name in rank)  # a set that keeps the order
    lines = ["(min, max) time across ranks (ms):"]
    for name in names:
        times = [rank[name] * 1000 / iterations for rank in ranks if name in rank]
        lines.append(f"    {(name + ' ').ljust(48, '.')}: ({min(times):.2f}, {max(times):.2f})")
    return "\n".join(lines) if names else ""


def slowest(ranks: list[dict[str, float]], iterations: int) -> dict[str, float]:
    """Returns name -> seconds per step of the slowest rank, which Megatron-LM writes to TensorBoard."""
    names = dict.fromkeys(name for rank in ranks for name in rank)
    return {name: max(rank[name] for rank in ranks if name in rank) / iterations for name in names}
