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
from megatron.command_line.read import words_without
from megatron.config.run import flag_fields

STEPS = 8
_WARM_UP = 3  # steps that do not count: memory reaches its peak, and --grad-reduce-mode auto decides
_STEP = re.compile(r"elapsed time per iteration \(ms\): ([0-9.]+)")
_LAST = 400  # characters of a failed run that are shown
# A run that is tried neither reads nor writes checkpoints, and logs to its output alone.
_LEFT_OUT = frozenset(name for name, (part, _) in flag_fields().items() if part in ("checkpoint", "logging"))
_ROOT = Path(__file__).parents[3]


@dataclass(frozen=True)
class Corrected:
    """Step times of all layouts after some were run.

    factor: measured over predicted time, the geometric mean over the layouts that were tried. seconds: the step time of
    each layout: as measured, or the prediction times the factor. order: places of the layouts, the fastest first.
    """

    factor: float
    seconds: tuple[float, ...]
    order: tuple[int, ...]


@dataclass(frozen=True)
class Trial:
    """The layouts that were run.

    predicted: seconds of each layout. measured: place -> seconds of the layouts that ran. failed: place -> the reason
    why a layout did not run.
    """

    predicted: tuple[float, ...]
    measured: Mapping[int, float]
    failed: Mapping[int, str]
    corrected: Corrected


def try_layouts(flags: Sequence[Sequence[str]], predicted: Sequence[float], count: int, world_size: int) -> Trial:
    """Runs the first `count` layouts, each with its flags, on this host. Raises ConfigError if none of them runs."""
    measured: dict[int, float] = {}
    failed: dict[int, str] = {}
    for place, words in enumerate(flags[:count]):
        try:
            measured[place] = try_layout(words, world_size)
        except ConfigError as error:
            failed[place] = str(error)
    if not measured:
        raise ConfigError(*failed.values())
    return Trial(tuple(predicted), measured, failed, corrected(predicted, measured))


def try_layout(
    flags: Sequence[str],
    world_size: int,
    *,
    steps: int = STEPS,
    program: str = "pretrain_gpt.py",
    port: int | None = None,
) -> float:
    """Returns seconds of a step of a run with these flags on this host: the median behind some steps of warm-up.

    Flags about checkpoints and logs are left out, and those of a short run with a line per step are added. Raises
    ConfigError if the run ends with an error, which may be that its memory did not suffice.
    """
    words = words_without(flags, _LEFT_OUT)
    added = ["--log-interval", "1", "--eval-iters", "0", "--no-progress-bar", "--exit-interval", str(steps)]
    rendezvous = ["--standalone"] if port is None else ["--master-port", str(port)]
    launch = ["-m", "torch.distributed.run", *rendezvous, "--nproc-per-node", str(world_size)] if world_size > 1 else []
    ended = subprocess.run(
        [sys.executable, *launch, str(_ROOT / program), *words, *added], capture_output=True, text=True, check=False
    )
    if ended.returncode:
        last = " ".join(ended.stderr.split())[-_LAST:]
        raise ConfigError(f"a run of the layout {' '.join(words)} ended with code {ended.returncode}: {last}")
    return step_seconds_of(ended.stdout)


def step_seconds_of(log: str) -> float:
    """Returns the median of the steps in a run's log, without those of warm-up. Raises ConfigError for a log
    without."""
    seconds = [float(milliseconds) / 1e3 for milliseconds in _STEP.findall(log)][_WARM_UP:]
    if not seconds:
        raise ConfigError(f"a run that was tried printed no times of more than {_WARM_UP} steps; give it more steps")
    return statistics.median(seconds)


def corrected(predicted: Sequence[float], measured: Mapping[int, float]) -> Corrected:
    """Returns the layouts in a new order.

    predicted: seconds of each layout. measured: place -> seconds of the layouts that were tried, at least one.
    """
    logarithms = [math.log(seconds / predicted[place]) for place, seconds in measured.items()]
    factor = math.exp(statistics.fmean(logarithms))
    seconds = tuple(measured.get(place, factor * prediction) for place, prediction in enumerate(predicted))
    return Corrected(factor, seconds, tuple(sorted(range(len(seconds)), key=lambda place: seconds[place])))
