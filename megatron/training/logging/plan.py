"""--plan: logs the step time that the profile of this machine predicts, next to the measured one."""

from __future__ import annotations

import statistics

import torch

from megatron.base.log import get_logger
from megatron.planner.time.groups import grouped
from megatron.planner.time.profile_file import read_profile
from megatron.planner.time.profiled import ProfiledClock, check_device, cluster_of
from megatron.planner.time.software import Software
from megatron.planner.time.step_time import StepModel
from megatron.training.loop import Callback
from megatron.training.state import StepReport
from megatron.training.trainer import Trainer

log = get_logger(__name__)


class LogPlan(Callback):
    """Compares when the first line of the log is printed, and at the end with the steps since then.

    The parts have the names of the summary of --profile-timeline, which says where measured steps went.
    """

    def __init__(self, trainer: Trainer) -> None:
        """Predicts the step. Raises ConfigError for a profile of another machine or model, and for a run that is not
        planned."""
        run, path, device = trainer.run, trainer.run.logging.plan, trainer.device
        assert path is not None
        profile = read_profile(path)
        check_device(profile, torch.cuda.get_device_name(device) if device.type == "cuda" else device.type, path)
        clock = ProfiledClock(profile, run, Software(), path)
        time = StepModel(run, trainer.settings, cluster_of(profile), Software()).time(clock)
        self._seconds, self._parts = float(time.seconds), grouped(time.parts)
        self._measured: list[float] = []
        self._is_first = True

    def after_step(self, trainer: Trainer, report: StepReport) -> None:
        """Collects; logs when the first interval is full."""
        self._measured.append(report.seconds)
        if self._is_first and report.iteration % trainer.run.logging.log_interval == 0:
            self._log("first steps")
            self._is_first = False
            self._measured.clear()  # the first step is slower than others

    def end(self, trainer: Trainer, reason: str | None) -> None:
        """Logs the rest of the run."""
        if self._measured:
            self._log("all steps" if self._is_first else "steps after the first interval")

    def _log(self, label: str) -> None:
        for line in comparison(label, self._seconds, self._parts, self._measured):
            log.info("%s", line)


def comparison(label: str, predicted: float, parts: dict[str, float], measured: list[float]) -> list[str]:
    """Returns the lines of the log. parts: predicted seconds. measured: seconds of the steps, whose median counts."""
    seconds = statistics.median(measured)
    shares = [f"{part} {seconds / predicted:.1%}" for part, seconds in parts.items() if seconds > 5e-4 * predicted]
    return [
        f"plan, {label}: predicted {1e3 * predicted:.1f} ms | measured {1e3 * seconds:.1f} ms | "
        f"prediction {predicted / seconds - 1:+.1%}",
        f"where a planned step goes: {1e3 * predicted:.1f} ms | " + " | ".join(shares),
    ]
