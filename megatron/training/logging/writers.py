"""Writes numbers of a run to TensorBoard and Weights & Biases, under Megatron-LM's tags.
Only one rank opens writers."""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import torch

from megatron.base.errors import ConfigError
from megatron.command_line.exits import check_output
from megatron.config.train import LoggingConfig
from megatron.core.device import memory_report
from megatron.training.logging.event_files import OVER_SAMPLES, drop_points_after
from megatron.training.logging.footprint import reserved_bytes
from megatron.training.logging.line import LOSS_NAMES, LogLine, perplexity, prediction_tag
from megatron.training.state import StepReport

# TensorBoard also has these under "<tag> vs samples", with the samples read so far as the x axis.
TAGS_VS_SAMPLES = frozenset(
    {
        *("learning-rate", "batch-size", "lm loss", "loss-scale", "world-size", "grad-norm", "num-zeros"),
        *("params-norm", "iteration-time"),
    }
)
VALIDATION = "lm loss validation"


class MetricWriter(Protocol):
    """A destination of metrics."""

    def add(self, scalars: Mapping[str, float], iteration: int, samples: int) -> None:
        """Records tag -> value after `iteration` steps, which have read `samples`."""

    def close(self) -> None:
        """Writes buffered values."""


class TensorBoardWriter:
    """Writes event files to `directory`, which has no points after `iteration` then; see `open_writers`."""

    def __init__(self, directory: str, iteration: int, samples: int) -> None:
        # Here, because it takes a third of a second, and most ranks have no writer.
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415

        _make_folder(directory, "--tensorboard-dir")
        if iteration:
            drop_points_after(Path(directory), iteration, samples)
        self._writer = SummaryWriter(directory, max_queue=1000)

    def add(self, scalars: Mapping[str, float], iteration: int, samples: int) -> None:
        """Records every tag over iterations, and those that Megatron-LM also plots over samples."""
        for tag, value in scalars.items():
            self._writer.add_scalar(tag, value, iteration)
            if tag in TAGS_VS_SAMPLES or tag.startswith(VALIDATION):
                self._writer.add_scalar(f"{tag}{OVER_SAMPLES}", value, samples)

    def close(self) -> None:
        """Flushes and closes the event file."""
        self._writer.close()


class WandbWriter:
    """A Weights & Biases run. The package is an extra: it is imported here and only on request."""

    def __init__(self, config: LoggingConfig, save: str | None, run_config: dict[str, Any]) -> None:
        wandb = _import_wandb(config)
        directory = config.wandb_save_dir or (str(Path(save) / "wandb") if save else "wandb")
        _make_folder(directory, "--wandb-save-dir")
        self._run = wandb.init(
            project=config.wandb_project,
            name=config.wandb_exp_name,
            entity=config.wandb_entity,
            dir=directory,
            config=run_config,
        )

    def add(self, scalars: Mapping[str, float], iteration: int, samples: int) -> None:
        """Records every tag at step `iteration`; calls of one iteration share a row."""
        self._run.log({**scalars, "samples vs steps": samples}, step=iteration)

    def close(self) -> None:
        """Uploads the rest and ends the run."""
        self._run.finish()


class Metrics:
    """Passes every number of the run to all writers. Without writers (all ranks but one) every call is a no-op."""

    def __init__(self, writers: Sequence[MetricWriter], interval: int, device: torch.device) -> None:
        self._writers = writers
        self._interval = interval
        self._device = device

    def step(self, report: StepReport, consumed_samples: int, world_size: int) -> None:
        """Records, every `interval` steps, the step's report, the number of processes, and this rank's memory."""
        if self._writers and report.iteration % self._interval == 0:
            scalars = {**step_scalars(report), "world-size": world_size, **memory_scalars(self._device)}
            self._add(scalars, report.iteration, consumed_samples)

    def line(self, line: LogLine, timers: Mapping[str, float]) -> None:
        """Records a log line's rates, which are averages over the steps since the previous line.

        `timers` maps names to seconds per step of the slowest rank, averaged in the same way.
        """
        scalars = {**line_scalars(line), **{f"{name}-time": seconds for name, seconds in timers.items()}}
        self._add(scalars, line.iteration, line.consumed_samples)

    def evaluation(self, iteration: int, consumed_samples: int, loss: float, name: str = "") -> None:
        """Records validation loss and perplexity; `name` distinguishes validation sets."""
        tag = f"{VALIDATION}-{name}" if name else VALIDATION
        self._add({tag: loss, f"{tag} ppl": perplexity(loss)}, iteration, consumed_samples)

    def rollout(self, iteration: int, consumed_samples: int, scalars: Mapping[str, float]) -> None:
        """Records the figures of sampled answers, by tag."""
        self._add(scalars, iteration, consumed_samples)

    def close(self) -> None:
        """Closes all writers."""
        for writer in self._writers:
            writer.close()

    def _add(self, scalars: Mapping[str, float], iteration: int, samples: int) -> None:
        for writer in self._writers:
            writer.add(scalars, iteration, samples)


def check_writers(config: LoggingConfig) -> None:
    """Raises ConfigError for a missing package or a folder that cannot be written, before anything else is written.

    TensorBoard itself would report it from its own thread, with a traceback.
    """
    if config.tensorboard_dir:
        check_output("--tensorboard-dir", str(Path(config.tensorboard_dir) / "events.out.tfevents"))
    if config.wandb_project:
        _import_wandb(config)


def open_writers(
    config: LoggingConfig, save: str | None, run_config: dict[str, Any], iteration: int = 0, samples: int = 0
) -> list[MetricWriter]:
    """Returns the writers that the flags ask for. `save` is --save; `run_config` is shown with a Weights & Biases run.

    A run that continues from `iteration`, which has read `samples`, removes TensorBoard's points after it: it writes
    them again.
    Raises ConfigError if a folder cannot be created or a package is missing.
    """
    writers: list[MetricWriter] = []
    if config.tensorboard_dir:
        writers.append(TensorBoardWriter(config.tensorboard_dir, iteration, samples))
    if config.wandb_project:
        writers.append(WandbWriter(config, save, run_config))
    return writers


def step_scalars(report: StepReport) -> dict[str, float]:
    """Returns tag -> value of one step. A step that was not applied has no loss, which would be a NaN or a spike."""
    scalars: dict[str, float] = {
        "learning-rate": report.learning_rate,
        "batch-size": report.global_batch_size,
        "loss-scale": report.loss_scale,
        "grad-norm": report.grad_norm,
    }
    if math.isfinite(report.loss) and not (report.skipped or report.nan):
        scalars["lm loss"] = report.loss
        scalars |= {prediction_tag(depth): loss for depth, loss in enumerate(report.further_losses)}
    if report.num_zeros is not None:
        scalars["num-zeros"] = report.num_zeros
    if report.params_norm is not None:
        scalars["params-norm"] = report.params_norm
    if report.experts is not None:
        scalars |= {LOSS_NAMES[kind]: value for kind, value in report.experts.means.items()}
        scalars["expert load max/mean"] = report.experts.worst[0]
    return scalars


def line_scalars(line: LogLine) -> dict[str, float]:
    """Returns tag -> value of one log line: seconds, TFLOP/s per GPU, tokens/s per GPU, fraction of peak."""
    scalars = {
        "iteration-time": line.seconds_per_iteration,
        "throughput": line.tflops_per_gpu,
        "tokens-per-second": line.tokens_per_second_per_gpu,
    }
    if line.mfu is not None:
        scalars["mfu"] = line.mfu
    return scalars


def memory_scalars(device: torch.device) -> dict[str, float]:
    """Returns tag -> bytes of this process now and at its peak, and on CUDA the number of allocations."""
    report = memory_report(device)
    scalars: dict[str, float] = {
        "mem-allocated-bytes": report.allocated,
        "mem-max-allocated-bytes": report.peak_allocated,
        "mem-reserved-bytes": reserved_bytes(device, report),
    }
    if device.type == "cuda":
        scalars["mem-allocated-count"] = torch.cuda.memory_stats(device)["allocation.all.current"]
    return scalars


def _import_wandb(config: LoggingConfig) -> ModuleType:
    try:
        return importlib.import_module("wandb")
    except ImportError:
        raise ConfigError(
            f"--wandb-project {config.wandb_project} needs the wandb package, which is not installed; "
            "pip install 'megatron-patched[wandb]', or leave the flag out"
        ) from None


def _make_folder(directory: str, flag: str) -> None:
    try:
        Path(directory).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{flag} {directory} cannot be made ({error.strerror}); give another folder") from None
