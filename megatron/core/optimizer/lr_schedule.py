"""Learning rate and weight decay as functions of the position in the run, with Megatron-LM's formulae.

A position is the number of optimizer updates applied so far, in iterations or (with --train-samples) in samples. The
update that follows position p uses the values at p, so the first update of a run uses position 0. Steps that are not
applied (overflow, NaN) do not move the position.

With w = warm-up, D = decay length, W = length of WSD's last phase, and lr_max, lr_min, lr_init the flags:

| style | learning rate at p |
|---|---|
| any, p <= w | lr_init + (lr_max - lr_init) p / w |
| constant | lr_max |
| any other, p > D | lr_min |
| inverse-square-root | max(lr_min, lr_max sqrt(max(w, 1) / max(p, 1))) |
| linear, cosine, WSD | lr_min + c (lr_max - lr_min) |

linear: c = 1 - r; cosine: c = (1 + cos(pi r)) / 2, with r = (p - w) / (D - w). WSD (warm-up, stable, decay): c = 1 up
to D - W, then with r = (p - (D - W)) / W: exponential 2 * 0.5^r - 1, linear 1 - r, cosine as above, minus_sqrt
1 - sqrt(r); W = 0 has no such phase. Sources: cosine annealing arXiv:1608.03983; WSD arXiv:2404.06395; minus_sqrt
arXiv:2405.18392.

Megatron-LM counts iterations x batch size, where this counts iterations: every ratio is the same. Only
inverse-square-root without a warm-up differs, whose 1 is one position.

--decoupled-lr is the lr_max of the word embeddings and the output layer, and --decoupled-min-lr their lr_min, by
default that of the other parameters. Everything else is the same for both rates.

The weight decay goes from start to end over the whole run with r = p / length: linear c = r, cosine
c = (1 + cos(pi (1 - r))) / 2, and stays at end after it.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from megatron.base.errors import CheckpointError
from megatron.base.log import get_logger
from megatron.config.optimizer import OptimizerConfig, ScheduleConfig

_log = get_logger(__name__)

UNITS = ("iterations", "samples")
# Checkpoints from before these settings existed have none of them.
_NOT_DECOUPLED = {"decoupled_max_lr": None, "decoupled_min_lr": 0.0}


@dataclass(frozen=True)
class ScheduleSettings:
    """The settings that determine a schedule, with lengths in `unit`.

    A setting without effect is 0 or empty, so that two schedules with the same values compare equal, for example those
    of two runs of different lengths with a constant learning rate.
    """

    unit: str  # "iterations" or "samples"
    max_lr: float
    min_lr: float
    warmup_init_lr: float
    warmup_length: float  # a fraction of the decay length may end between two steps
    decay_style: str
    decay_length: int
    wsd_decay_style: str
    wsd_decay_length: int
    start_weight_decay: float
    end_weight_decay: float
    weight_decay_style: str
    weight_decay_length: int
    decoupled_max_lr: float | None = None  # of the word embeddings and the output layer; None: max_lr and min_lr
    decoupled_min_lr: float = 0.0


class ParamSchedule:
    """Learning rate and weight decay of a run of `length` iterations or samples, as `unit` says.

    The flags are those that the rules accept (config/rules/training.py, config/rules/files.py).
    """

    def __init__(
        self, schedule: ScheduleConfig, optimizer: OptimizerConfig, length: int, unit: str = "iterations"
    ) -> None:
        self.settings = _resolve_settings(schedule, optimizer, length, unit)
        self._override = schedule.override_opt_param_scheduler
        self._use_checkpoint = schedule.use_checkpoint_opt_param_scheduler

    def learning_rate(self, position: int) -> float:
        """Returns the learning rate of the update that follows `position` updates (or samples)."""
        return self._rate(position, self.settings.max_lr, self.settings.min_lr)

    def decoupled_learning_rate(self, position: int) -> float:
        """Returns the learning rate of the word embeddings and the output layer; see `learning_rate`."""
        s = self.settings
        if s.decoupled_max_lr is None:
            return self.learning_rate(position)
        return self._rate(position, s.decoupled_max_lr, s.decoupled_min_lr)

    def weight_decay(self, position: int) -> float:
        """Returns the weight decay of the update that follows `position` updates (or samples)."""
        s = self.settings
        if s.weight_decay_style == "constant" or position > s.weight_decay_length:
            return s.end_weight_decay
        ratio = position / s.weight_decay_length
        if s.weight_decay_style == "cosine":
            ratio = _half_cosine(1.0 - ratio)
        return s.start_weight_decay + ratio * (s.end_weight_decay - s.start_weight_decay)

    def state(self) -> dict[str, Any]:
        """Returns the settings as JSON-ready numbers and strings, for a checkpoint."""
        return dataclasses.asdict(self.settings)

    def resolve(self, saved: dict[str, Any] | None) -> None:
        """Chooses between the flags and the `state()` of a checkpoint; the flags hold if that is None.

        The same settings pass. Otherwise the flags win with --override-opt_param-scheduler, the checkpoint wins with
        --use-checkpoint-opt_param-scheduler, and without either CheckpointError names every difference.
        """
        if saved is None:
            return
        saved, current = {**_NOT_DECOUPLED, **saved}, self.state()
        if saved.keys() != current.keys():
            raise CheckpointError(
                f"the checkpoint's schedule has the settings {sorted(saved)} but this version has {sorted(current)}; "
                "start from its weights with --finetune"
            )
        changes = [
            f"{name}: {saved[name]} saved, {current[name]} asked" for name in current if saved[name] != current[name]
        ]
        if not changes:
            return
        if self._use_checkpoint:
            self.settings = ScheduleSettings(**saved)
            _log.info("schedule taken from the checkpoint (%s)", "; ".join(changes))
        elif self._override:
            _log.info("schedule taken from the flags (%s)", "; ".join(changes))
        else:
            raise CheckpointError(
                f"the schedule differs from the checkpoint's ({'; '.join(changes)}); give the same flags, or "
                "--override-opt_param-scheduler to take the flags, or --use-checkpoint-opt_param-scheduler to take the "
                "checkpoint's"
            )

    def _rate(self, position: int, max_lr: float, min_lr: float) -> float:
        s = self.settings
        if s.warmup_length > 0 and position <= s.warmup_length:
            return s.warmup_init_lr + (max_lr - s.warmup_init_lr) * position / s.warmup_length
        if s.decay_style == "constant":
            return max_lr
        if position > s.decay_length:
            return min_lr
        if s.decay_style == "inverse-square-root":
            return max(min_lr, max_lr * math.sqrt(max(s.warmup_length, 1) / max(position, 1)))
        return min_lr + self._decay_coefficient(position) * (max_lr - min_lr)

    def _decay_coefficient(self, position: int) -> float:
        """Returns the fraction of (max_lr - min_lr) that is left between warm-up and the end of the decay, from 1 to
        0."""
        s = self.settings
        if s.decay_style != "WSD":
            ratio = (position - s.warmup_length) / (s.decay_length - s.warmup_length)
            return 1.0 - ratio if s.decay_style == "linear" else _half_cosine(ratio)
        start = s.decay_length - s.wsd_decay_length
        if position <= start:
            return 1.0
        ratio = (position - start) / s.wsd_decay_length
        shapes = {
            "exponential": 2.0 * math.pow(0.5, ratio) - 1.0,
            "linear": 1.0 - ratio,
            "cosine": _half_cosine(ratio),
            "minus_sqrt": 1.0 - math.sqrt(ratio),
        }
        return shapes[s.wsd_decay_style]


def _half_cosine(ratio: float) -> float:
    """Returns a cosine that falls from 1 at ratio 0 to 0 at ratio 1."""
    return 0.5 * (1.0 + math.cos(math.pi * ratio))


def _resolve_settings(schedule: ScheduleConfig, optimizer: OptimizerConfig, length: int, unit: str) -> ScheduleSettings:
    assert unit in UNITS and length > 0 and schedule.lr is not None
    in_samples = unit == "samples"
    decay_length = (schedule.lr_decay_samples if in_samples else schedule.lr_decay_iters) or length
    warmup_length: float = schedule.lr_warmup_samples if in_samples else schedule.lr_warmup_iters
    if schedule.lr_warmup_fraction is not None:
        warmup_length = schedule.lr_warmup_fraction * decay_length
    wsd_length = 0
    if schedule.lr_decay_style == "WSD":
        phase = schedule.lr_wsd_decay_samples if in_samples else schedule.lr_wsd_decay_iters
        assert phase is not None
        wsd_length = phase
    assert warmup_length < decay_length and warmup_length + wsd_length <= decay_length
    constant_rate = schedule.lr_decay_style == "constant"
    constant_decay = optimizer.weight_decay_incr_style == "constant"
    start, end = optimizer.start_weight_decay, optimizer.end_weight_decay
    if constant_decay:
        start = end = optimizer.weight_decay
    assert start is not None and end is not None
    return ScheduleSettings(
        unit=unit,
        max_lr=schedule.lr,
        min_lr=0.0 if constant_rate else schedule.min_lr,
        warmup_init_lr=schedule.lr_warmup_init if warmup_length else 0.0,
        warmup_length=warmup_length,
        decay_style=schedule.lr_decay_style,
        decay_length=0 if constant_rate else decay_length,
        wsd_decay_style=schedule.lr_wsd_decay_style if wsd_length else "",
        wsd_decay_length=wsd_length,
        start_weight_decay=start,
        end_weight_decay=end,
        weight_decay_style=optimizer.weight_decay_incr_style,
        weight_decay_length=0 if constant_decay else length,
        decoupled_max_lr=schedule.decoupled_lr,
        decoupled_min_lr=0.0 if constant_rate or schedule.decoupled_lr is None else schedule.decoupled_minimum,
    )
