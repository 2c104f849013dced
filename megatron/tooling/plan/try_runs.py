"""Runs planned layouts for a few steps through the normal entry, and corrects the predictions by what they took."""

from __future__ import annotations

import math
import re
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.base.errors import ConfigError

STEPS = 8
_WARM_UP = 3  # steps that do not count: memory reaches its peak, and --grad-reduce-mode auto decides
_STEP = re.compile(r"elapsed time per iteration \(ms\): ([0-9.]+)")
_LAST = 400  # characters of a failed run that are shown


@dataclass(frozen=True)
class Corrected:
    """factor: measured over predicted time, the geometric mean over the layouts that were tried. seconds: of all layouts,
    measured ones as they are and the others times the factor. order: places of the layouts, the fastest first."""

    factor: float
    seconds: tuple[float, ...]
    order: tuple[int, ...]


def try_layout(
    flags: Sequence[str],
    world_size: int,
    *,
    steps: int = STEPS,
    program: str = "pretrain_gpt.py",
    port: int | None = None,
) -> float:
    """Returns seconds of a step of a run with these flags on this host: the median behind some steps of warm-up.

    The flags win over those that are added: a short run with a line per step. Raises ConfigError if the run ends with an
    error, which may be that its memory did not suffice.
    """
    added = ["--log-interval", "1", "--eval-iters", "0", "--no-progress-bar", "--exit-interval", str(steps)]
    rendezvous = ["--standalone"] if port is None else ["--master-port", str(port)]
    launch = ["-m", "torch.distributed.run", *rendezvous, "--nproc-per-node", str(world_size)] if world_size > 1 else []
    ended = subprocess.run(
        [sys.executable, *launch, str(_ROOT / program), *flags, *added], capture_output=True, text=True, check=False
    )
    if ended.returncode:
        last = " ".join(ended.stderr.split())[-_LAST:]
        raise ConfigError(f"a run of the layout {' '.join(flags)} ended with code {ended.returncode}: {last}")
    return step_seconds_of(ended.stdout)


def step_seconds_of(log: str) -> float:
    """Returns the median of the steps in a run's log, without those of warm-up. Raises ConfigError for a log without."""
    found = [float(milliseconds) / 1e3 for milliseconds in _STEP.findall(log)][_WARM_UP:]
    if not found:
        raise ConfigError(f"a run that was tried printed no times of more than {_WARM_UP} steps; give it more steps")
    return statistics.median(found)


def corrected(predicted: Sequence[float], measured: Mapping[int, float]) -> Corrected:
    """Returns the layouts in a new order.

    predicted: seconds of each. measured: of those that were tried, at least one, by their place.
    """
    logarithms = [math.log(seconds / predicted[place]) for place, seconds in measured.items()]
    factor = math.exp(statistics.fmean(logarithms))
    seconds = tuple(measured.get(place, factor * each) for place, each in enumerate(predicted))
    return Corrected(factor, seconds, tuple(sorted(range(len(seconds)), key=lambda place: seconds[place])))


_ROOT = Path(__file__).parents[3]
