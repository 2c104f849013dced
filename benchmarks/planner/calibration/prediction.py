"""Predicts the runs of a table, with or without measured rows of the same machine (anchors)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from benchmarks.planner.calibration.fit import Vector, constants_of, fit_machine
from benchmarks.planner.calibration.framework_step import FrameworkStep
from benchmarks.planner.calibration.plain_kernels import gathered_loss_bytes, plain_kernel_bytes
from benchmarks.planner.calibration.rows import Planned, Row, candidates, number
from megatron.base.errors import ConfigError
from megatron.planner.memory.plan import plan_memory
from megatron.planner.time.constants import Constants
from megatron.planner.time.hardware import GB, used_memory
from megatron.planner.time.step_time import PARTS, StepTime, step_seconds

FACTOR, WHOLE_MACHINE = "factor", "machine"
ANCHORS = (FACTOR, WHOLE_MACHINE)
COLUMNS = ("id", "tokens_per_s_per_gpu", "step_s", "peak_memory_GB", "fits", *PARTS, "factor", "reason")
PLAIN_LOSS = 8  # bytes per logit: two copies in fp32
HALF_GRADIENT = 2  # bytes per parameter that a gradient in half precision takes less than one in fp32


@dataclass(frozen=True)
class RowRun:
    """The run that stands for a row, and its model."""

    row: Row
    planned: Planned
    model: FrameworkStep

    @cached_property
    def peak(self) -> float:
        """Bytes of device memory of the fullest rank."""
        return peak_memory(self.planned)

    @property
    def fits(self) -> bool:
        """Whether the device has so much memory."""
        return self.peak <= self.planned.cluster.device.memory

    @property
    def measured(self) -> float:
        """Seconds of a step that the row says."""
        rate = number(self.row, "tokens_per_s_per_gpu")
        return self.model.tokens / (rate * self.planned.settings.mesh.world_size)


def predict(rows: Sequence[Row], constants: Constants, anchor: str | None = None) -> list[dict[str, object]]:
    """Returns a row of COLUMNS for each row.

    anchor: how rows with use=anchor correct the others: FACTOR, one factor on the time of the rows of their source;
    WHOLE_MACHINE, six factors of the machine. Raises ConfigError if they are asked for and there are none.
    """
    chosen: dict[int, RowRun] = {}
    reasons: dict[int, str] = {}
    for place, row in enumerate(rows):
        try:
            chosen[place] = choose(row, constants)
        except (ConfigError, KeyError) as error:
            reasons[place] = f"column {error} is missing" if isinstance(error, KeyError) else str(error)
    anchors = [run for run in chosen.values() if run.row.get("use") == "anchor"]
    factors: dict[str, float] = {}
    if anchor is not None:
        if not anchors:
            raise ConfigError(f"--anchor {anchor} needs a row with use=anchor that can be planned; mark one or more")
        if anchor == FACTOR:
            factors = source_factors(anchors, constants)
        else:
            constants = machine_constants(anchors, constants)
    found = []
    for place, row in enumerate(rows):
        result: dict[str, object] = {"id": row.get("id", ""), "reason": reasons.get(place, "")}
        if place in chosen:
            run = chosen[place]
            factor = factors.get(row.get("source", ""), 1.0)
            result |= _columns(run, run.model.time(run.model.clock(constants)), factor)
        found.append(result)
    return found


def choose(row: Row, constants: Constants) -> RowRun:
    """Returns the run of a row: where it leaves sizes open, the fastest of those that fit. Raises ConfigError."""
    found = candidates(row)
    models = [FrameworkStep(run.run, run.settings, run.cluster, run.framework) for run in found]
    times = step_seconds(models, constants)[:, 0] if len(found) > 1 else [0.0]
    order = sorted(range(len(found)), key=lambda place: float(times[place]))
    runs = [RowRun(row, found[place], models[place]) for place in order]
    return runs[0] if len(runs) == 1 else next((run for run in runs if run.fits), runs[0])


def peak_memory(planned: Planned) -> float:
    """Returns bytes of device memory of the fullest rank: of this project's own tensors, and of those that the
    framework of the run takes in addition, or less."""
    run, settings, mesh = planned.run, planned.settings, planned.settings.mesh
    seq_length, micro_batch = run.data.seq_length, run.train.micro_batch_size
    assert seq_length and micro_batch
    framework, ranks = planned.framework, plan_memory(run, settings, planned.framework.target)
    more = [0] * len(ranks)
    if not (framework.fused_norm and framework.fused_pointwise):
        more = plain_kernel_bytes(run, settings, framework)
    if framework.half_gradients:
        more = [kept - HALF_GRADIENT * rank.parameters for kept, rank in zip(more, ranks, strict=True)]
    peaks = [rank.peak + kept for rank, kept in zip(ranks, more, strict=True)]
    last = settings.pipeline.placement.rank_of[-1]
    logits = seq_length * micro_batch // mesh.cp * run.model.padded_vocab_size
    if framework.gathered_loss:
        kept, loss = gathered_loss_bytes(logits, settings.batches.final_num_microbatches)
        activations = ranks[last].in_flight * ranks[last].per_microbatch
        peaks[last] = kept + max(peaks[last], ranks[last].start + activations + more[last] + loss)
    elif not framework.fused_loss:
        peaks[last] += PLAIN_LOSS * logits // mesh.tp
    return float(used_memory(max(peaks)))


def source_factors(anchors: Sequence[RowRun], constants: Constants) -> dict[str, float]:
    """Returns source -> the factor on predicted times, the geometric mean over its anchors."""
    by_source: dict[str, list[float]] = {}
    for run, seconds in zip(anchors, step_seconds([run.model for run in anchors], constants)[:, 0], strict=True):
        by_source.setdefault(run.row.get("source", ""), []).append(float(np.log(run.measured / seconds)))
    return {source: float(np.exp(np.mean(logarithms))) for source, logarithms in by_source.items()}


def machine_constants(anchors: Sequence[RowRun], constants: Constants) -> Constants:
    """Returns the constants with the six factors of the anchors' machine."""
    models = [run.model for run in anchors]
    start: Vector = np.log([float(getattr(constants, name)) for name in Constants.names()])
    fitted = fit_machine(lambda many: step_seconds(models, many), [run.measured for run in anchors], start)
    return constants_of(fitted)


def _columns(run: RowRun, time: StepTime, factor: float) -> Mapping[str, object]:
    """The factor is one on all parts, so that they still add up."""
    return {
        "tokens_per_s_per_gpu": f"{float(time.tokens_per_second) / factor:.2f}",
        "step_s": f"{float(time.seconds) * factor:.5f}",
        "peak_memory_GB": f"{run.peak / GB:.2f}",
        "fits": int(run.fits),
        "factor": f"{factor:.4f}",
        **{part: f"{float(time.parts.get(part, 0.0)) * factor:.5f}" for part in PARTS},
    }
