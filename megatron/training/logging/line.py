"""The line that a run prints every --log-interval steps: Megatron-LM's fields, order and number formats, then our own.

docs/logging.md explains every field. No torch, so that tools can read logs quickly.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from megatron.training.state import ExpertReport, StepReport

GIB = 1024**3
# Megatron-LM's names of the balance losses.
LOSS_NAMES = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
    "z_loss": "z_loss",
}
_TIME = "%Y-%m-%d %H:%M:%S.%f"
# the limit of the exponent is e^20, as in Megatron-LM, so that perplexity can be printed at the start of a run
MAX_EXPONENT = 20.0


@dataclass(frozen=True)
class LogLine:
    """The values of one line. Rates and counts refer to the steps since the previous line."""

    iteration: int
    train_iters: int
    consumed_samples: int
    seconds_per_iteration: float
    learning_rate: float  # for the next step
    global_batch_size: int  # for the last step, like the loss scale, norms and zeros
    loss: float | None  # mean over applied steps with labels; None if there was none
    loss_scale: float
    grad_norm: float
    num_zeros: int | None
    params_norm: float | None
    skipped_iterations: int
    nan_iterations: int
    tokens_per_second_per_gpu: float
    tflops_per_gpu: float  # model FLOPs, see flops.py
    mfu: float | None  # fraction of the device's peak; None if the peak is unknown
    peak_memory: int  # bytes
    eta_seconds: float
    further_losses: tuple[float, ...] = ()  # as `loss`, of each depth of multi-token prediction
    experts: ExpertReport | None = None  # of the last step, in a model with experts
    expert_losses: Mapping[str, float] = field(default_factory=dict)  # means over layers and over the steps of the line


class LogWindow:
    """Collects step reports between two log lines.

    `flops_per_sample` is the model FLOPs of one row of --seq-length tokens, forward and backward. `world_size` is the
    number of processes, one per GPU. `peak_tflops` is the dense peak of one device, or None if it is unknown.
    """

    def __init__(self, flops_per_sample: float, world_size: int, peak_tflops: float | None) -> None:
        self._flops_per_sample = flops_per_sample
        self._world_size = world_size
        self._peak_tflops = peak_tflops
        self._reports: list[StepReport] = []

    def __len__(self) -> int:
        return len(self._reports)

    def add(self, report: StepReport) -> None:
        """Adds one step."""
        self._reports.append(report)

    def close(self, *, consumed_samples: int, train_iters: int, remaining_samples: int, peak_memory: int) -> LogLine:
        """Returns the line of the steps added since the last call, and starts a new one. Needs at least one step.

        `remaining_samples` is the number of samples that the run still has to read, for the time left; samples and not
        iterations, because steps grow while the batch size ramps up. `peak_memory` is in bytes.
        """
        assert self._reports, "a log line needs at least one step"
        reports, self._reports = self._reports, []
        last = reports[-1]
        learned = [(r.loss, *r.further_losses) for r in reports if r.has_labels and not (r.skipped or r.nan)]
        means = [sum(values) / len(values) for values in zip(*learned, strict=True)]
        # The lower limit prevents a division by zero with a clock of coarse resolution.
        seconds = max(sum(r.seconds for r in reports), 1e-9)
        samples = sum(r.global_batch_size for r in reports)
        gpu_seconds = seconds * self._world_size
        tflops = sum(r.rows for r in reports) * self._flops_per_sample / gpu_seconds / 1e12
        return LogLine(
            iteration=last.iteration,
            train_iters=train_iters,
            consumed_samples=consumed_samples,
            seconds_per_iteration=seconds / len(reports),
            learning_rate=last.learning_rate,
            global_batch_size=last.global_batch_size,
            loss=means[0] if means else None,
            further_losses=tuple(means[1:]),
            loss_scale=last.loss_scale,
            grad_norm=last.grad_norm,
            num_zeros=last.num_zeros,
            params_norm=last.params_norm,
            experts=last.experts,
            expert_losses=mean_losses([r.experts for r in reports if r.experts is not None]),
            skipped_iterations=sum(r.skipped for r in reports),
            nan_iterations=sum(r.nan for r in reports),
            tokens_per_second_per_gpu=sum(r.tokens for r in reports) / gpu_seconds,
            tflops_per_gpu=tflops,
            mfu=None if self._peak_tflops is None else tflops / self._peak_tflops,
            peak_memory=peak_memory,
            eta_seconds=remaining_samples * seconds / samples,
        )


def mean_losses(reports: Sequence[ExpertReport]) -> dict[str, float]:
    """Returns kind -> mean of a balance loss over the layers and over the steps, as Megatron-LM prints it."""
    kinds = reports[-1].means if reports else ()
    return {kind: sum(report.means[kind] for report in reports) / len(reports) for kind in kinds}


def format_line(line: LogLine, now: datetime, log_throughput: bool = False) -> str:
    """Formats the line. `log_throughput` adds Megatron-LM's throughput field at its position."""
    fields = [
        f" [{now:{_TIME}}] iteration {line.iteration:8d}/{line.train_iters:8d}",
        f"consumed samples: {line.consumed_samples:12d}",
        f"elapsed time per iteration (ms): {line.seconds_per_iteration * 1000:.1f}",
    ]
    if log_throughput:
        fields.append(f"throughput per GPU (TFLOP/s/GPU): {line.tflops_per_gpu:.1f}")
    fields += [f"learning rate: {line.learning_rate:.6E}", f"global batch size: {line.global_batch_size:5d}"]
    if line.loss is not None:
        fields.append(f"lm loss: {line.loss:.6E}")
        fields += [f"{prediction_tag(depth)}: {loss:.6E}" for depth, loss in enumerate(line.further_losses)]
    fields += [f"loss scale: {line.loss_scale:.1f}", f"grad norm: {line.grad_norm:.3f}"]
    if line.num_zeros is not None:
        fields.append(f"num zeros: {line.num_zeros:.1f}")  # with a decimal, as Megatron-LM prints it
    if line.params_norm is not None:
        fields.append(f"params norm: {line.params_norm:.3f}")
    if line.experts is not None:
        fields += [f"{LOSS_NAMES[kind]}: {value:.6E}" for kind, value in line.expert_losses.items()]
        imbalance, layer = line.experts.worst
        fields.append(f"expert load max/mean: {imbalance:.2f} (layer {layer})")
    fields += [
        f"number of skipped iterations: {line.skipped_iterations:3d}",
        f"number of nan iterations: {line.nan_iterations:3d}",
        f"tokens/s/GPU: {line.tokens_per_second_per_gpu:.1f}",
        f"model TFLOP/s/GPU: {line.tflops_per_gpu:.2f}",
    ]
    if line.mfu is not None:
        fields.append(f"MFU: {100 * line.mfu:.1f}%")
    fields += [f"peak memory (GB): {line.peak_memory / GIB:.2f}", f"ETA: {format_duration(line.eta_seconds)}"]
    return " | ".join(fields) + " |"


def prediction_tag(depth: int) -> str:
    """Returns Megatron-LM's name of the loss of a depth of multi-token prediction, from 0."""
    return f"mtp_{depth + 1} loss"


def format_experts(report: ExpertReport) -> str:
    """Formats one line per layer with experts: its balance losses, and its largest load divided by the mean."""
    lines = []
    for place, (layer, imbalance) in enumerate(zip(report.layers, report.imbalance, strict=True)):
        losses = [f" | {LOSS_NAMES[kind]}: {values[place]:.4E}" for kind, values in report.losses.items()]
        lines.append(f" layer {layer}{''.join(losses)} | expert load max/mean: {imbalance:.2f} |")
    return "\n".join(lines)


def format_duration(seconds: float) -> str:
    """Formats seconds as h:mm:ss, with hours above 24."""
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


def perplexity(loss: float) -> float:
    """Returns e^loss, limited to e^20; NaN of NaN."""
    return loss if math.isnan(loss) else math.exp(min(MAX_EXPONENT, loss))


def format_evaluation(where: str, loss: float, name: str = "") -> str:
    """Formats three lines: the loss and perplexity between two rules of dashes.

    `where` is the time of the evaluation, as in "iteration 100"; `name` distinguishes validation sets.
    """
    suffix = f"-{name}" if name else ""
    line = f" validation{suffix} loss at {where} | lm loss value: {loss:.6E} | lm loss PPL: {perplexity(loss):.6E} | "
    rule = "-" * (len(line) + 1)
    return f"{rule}\n{line}\n{rule}"


def format_saving(iteration: int, root: Path, now: datetime) -> str:
    """Formats Megatron-LM's line at the start of a save."""
    return f"[{now:{_TIME}}] saving checkpoint at iteration {iteration:7d} to {root} in safetensors format"


def format_saved(iteration: int, root: Path, tp: int, pp: int, now: datetime) -> str:
    """Formats Megatron-LM's line at the end of a save, with the ranks of the process that prints it: the first of each
    axis.
    """
    return f"  [{now:{_TIME}}] successfully saved checkpoint from iteration {iteration:7d} to {root} {_ranks(tp, pp)}"


def format_background_save(
    name: str,
    nbytes: int,
    exposed_seconds: float,
    written_seconds: float,
    sent_bytes: int,
    replication_seconds: float,
    *,
    place: str = "in the background",
) -> str:
    """Formats the price of checkpoint `name`, which was written in the background; see SavePrice. place: where."""
    line = (
        f"  {name} {place}: {nbytes / 2**20:.1f} MiB copied to host memory | training waited "
        f"{1e3 * exposed_seconds:.1f} ms | written in {1e3 * written_seconds:.1f} ms"
    )
    if sent_bytes:
        line += f" | {sent_bytes / 2**20:.1f} MiB sent to other ranks in {1e3 * replication_seconds:.1f} ms"
    return line


def format_loading(path: Path, iteration: int | None) -> str:
    """Formats Megatron-LM's line before a load; `iteration` is None for weights that no run has saved."""
    if iteration is None:
        return f" loading release checkpoint from {path}"
    return f" loading checkpoint from {path.parent} at iteration {iteration}"


def format_loaded(path: Path, iteration: int, tp: int, pp: int) -> str:
    """Formats Megatron-LM's line after a load; `iteration` is the one from which the run continues."""
    return f"  successfully loaded checkpoint from {path.parent} {_ranks(tp, pp)} at iteration {iteration}"


def _ranks(tp: int, pp: int) -> str:
    return f"[ t 1/{tp}, p 1/{pp} ]"


_ITERATION = re.compile(r"(?:\[(?P<time>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:\.\d+)?)\]\s+)?iteration\s+(\d+)/\s*(\d+) \|")
_FIELD = re.compile(r"\s*([^:|]+): +([^|]*?)\s*\|")
_EVALUATION = re.compile(r"validation(?:-(?P<name>\S+))? loss at (?P<where>[^|]+?) \| lm loss value: (?P<loss>\S+) \|")


def parse_line(text: str) -> dict[str, float | str]:
    """Returns fields of a log line by the name before the colon, and "iteration", "train iterations" and "time".

    Counts and numbers are floats, "MFU" is in percent, "ETA" in seconds, "time" the timestamp as text. Any other line
    gives {}. Fields are found by name, so lines of any Megatron-LM version are read, after any prefix.
    """
    head = _ITERATION.search(text)
    if head is None:
        return {}
    fields: dict[str, float | str] = {"iteration": float(head[2]), "train iterations": float(head[3])}
    if head["time"]:
        fields["time"] = head["time"]
    for name, value in _FIELD.findall(text, head.end()):
        fields[name] = _number(value)
    return fields


def parse_evaluation(text: str) -> dict[str, float | str]:
    """Returns "where", "name" (empty for an only set) and "lm loss" of an evaluation's middle line; {} for another
    line.

    "iteration" is included if `where` names one.
    """
    match = _EVALUATION.search(text)
    if match is None:
        return {}
    fields: dict[str, float | str] = {
        "where": match["where"],
        "name": match["name"] or "",
        "lm loss": float(match["loss"]),
    }
    iteration = re.search(r"iteration (\d+)", match["where"])
    if iteration:
        fields["iteration"] = float(iteration[1])
    return fields


def _number(text: str) -> float | str:
    """Returns a count, number, percentage, or h:mm:ss as seconds; any other text stays text."""
    duration = re.fullmatch(r"(\d+):(\d\d):(\d\d)", text)
    if duration:
        hours, minutes, seconds = map(int, duration.groups())
        return float(hours * 3600 + minutes * 60 + seconds)
    try:
        return float(text.rstrip("%"))
    except ValueError:
        return text
