"""Measuring on a GPU or the CPU: times, errors, poisoned memory, and packages that may be missing."""

from __future__ import annotations

import importlib
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.gpu.case import Setting, check
from benchmarks.gpu.record import MissingError

WARM_UP, REPEATS = 3, 2
SECONDS = {"cuda": 0.06, "cpu": 0.002}  # of one repeat
MOST_RUNS = 50  # of one repeat: their kernels fit into the queue between host and device
CLOCK = 2e9  # cycles per second, at most
POISON_BYTES = {"cuda": 1 << 30, "cpu": 1 << 20}


class Timing(NamedTuple):
    """ms: median of all runs. spread: distance of the medians of the two repeats, relative to the smaller; the
    noise."""

    ms: float
    spread: float

    def __str__(self) -> str:
        return f"{self.ms:.3g} ms"

    def rate(self, amount: float) -> float:
        """Returns `amount` per second."""
        return amount / (self.ms / 1e3)


def timed(run: Callable[[], Any], setting: Setting) -> Timing:
    """Returns the time of `run`, without its first runs. On a GPU CUDA events measure the stream, not the host, which
    has a start: otherwise the time of small kernels would be that of their launches.
    """
    if not setting.cuda:
        _clock(run, 1)
        once = max(_clock(run, 1)[0], 1e-4)
        return combine([_clock(run, _count(once, setting)) for _ in range(REPEATS)])
    _events(run, WARM_UP)
    host = _clock(run, 1)[0]
    count = _count(max(_events(run, 1, 1.5 * host)[0], 1e-4), setting)
    return combine([_events(run, count, 1.2 * host * count) for _ in range(REPEATS)])


def _count(ms: float, setting: Setting) -> int:
    return min(MOST_RUNS, max(3, int(1e3 * SECONDS[setting.device] / ms)))


def combine(repeats: Sequence[Sequence[float]]) -> Timing:
    """Returns the timing of repeats, which are lists of ms."""
    medians = [statistics.median(repeat) for repeat in repeats]
    everything = [ms for repeat in repeats for ms in repeat]
    return Timing(statistics.median(everything), (max(medians) - min(medians)) / max(min(medians), 1e-9))


def _events(run: Callable[[], Any], count: int, start_ms: float = 0.0) -> list[float]:
    """start_ms: of the host, before the device begins."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    torch.cuda._sleep(int(start_ms / 1e3 * CLOCK))
    marks[0].record()
    for mark in marks[1:]:
        run()
        mark.record()
    torch.cuda.synchronize()
    return [begun.elapsed_time(ended) for begun, ended in itertools.pairwise(marks)]


def _clock(run: Callable[[], Any], count: int) -> list[float]:
    times = []
    for _ in range(count):
        begun = time.perf_counter()
        run()
        times.append(1e3 * (time.perf_counter() - begun))
    return times


def poison(setting: Setting) -> None:
    """Fills freed memory with NaN, so that an output that a kernel does not write completely shows."""
    numel = POISON_BYTES[setting.device] // 4
    torch.full((numel,), float("nan"), device=setting.device)
    # Blocks of this size are served from another pool of the allocator.
    for _ in range(8):
        torch.full((1 << 16,), float("nan"), device=setting.device)


def error(found: Tensor, expected: Tensor) -> float:
    """Returns the largest difference relative to the largest element of `expected`; NaN if there is one."""
    exact = expected.double()
    return float((found.double() - exact).abs().max() / exact.abs().max().clamp(min=1e-30))


def check_error(found: Tensor, expected: Tensor, limit: float, what: str) -> float:
    """Returns the error. Raises CheckError if it is above the limit or NaN."""
    value = error(found, expected)
    check(value <= limit, f"{what}: error {value:.2e} is not within {limit:.2e}")
    return value


def random(*shape: int, setting: Setting, seed: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> Tensor:
    """Returns normal random numbers of a fixed seed. Products of zeros would draw less power than real ones."""
    generator = torch.Generator(setting.device).manual_seed(seed)
    return (torch.randn(*shape, device=setting.device, generator=generator) * scale).to(dtype)


def package(name: str) -> ModuleType:
    """Imports a module. Raises MissingError if it is not installed; one that is installed and broken raises its
    error."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise MissingError(error.name) from error
        raise


def copy_rate(setting: Setting) -> float:
    """Returns the GB/s of a copy inside the device's memory, counting bytes read and bytes written."""
    numel = setting.size(1 << 29, 1 << 20)
    source = random(numel, setting=setting, seed=0)
    target = torch.empty_like(source)
    return timed(lambda: target.copy_(source), setting).rate(2 * source.nbytes) / 1e9
