"""Predicts every case from the profile of its model and links, without a look at measured steps.

What was measured says one thing alone: how fast the processors were meanwhile (reference.py). Computation is predicted
for this speed, and once more for that of the profile.
"""

from __future__ import annotations

import csv
import dataclasses
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from benchmarks.planner.emulated.grid import RANKS, RATES, Case
from benchmarks.planner.emulated.measure import KINDS
from benchmarks.planner.emulated.profiles import profile_of
from benchmarks.planner.emulated.reference import reference_of
from benchmarks.planner.emulated.wire import sent_by_hosts
from megatron.planner.time.profile_file import MachineProfile, scaled
from megatron.planner.time.profiled import ProfiledClock, cluster_of
from megatron.planner.time.software import Software
from megatron.planner.time.stage_time import (
    ATTENTION,
    CP,
    DP,
    GEMM,
    HOST,
    INTERFERENCE,
    MEMORY,
    OPTIMIZER,
    PP,
    RECOMPUTE,
    STEP,
    TP,
    Parts,
)
from megatron.planner.time.step_time import StepModel, StepTime
from megatron.tooling.plan.run import settings_of

COLUMNS = ("model", "layout", "hosts", "rate", "step_ms", "profile_speed_ms", *KINDS, "sent", "flops")
_COMPUTED = (GEMM, ATTENTION, MEMORY, RECOMPUTE, HOST, INTERFERENCE)


def predict(cases: Sequence[Case], folder: Path, measured: Path, out: Path) -> None:
    """Writes a line per case and rate, from the profiles in `folder`, and the references in `measured`.

    Raises ConfigError.
    """
    references = references_in(measured)
    with open(out, "w", newline="") as file:
        table = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        table.writeheader()
        for case in cases:
            table.writerows(_rows(case, folder, references))


def references_in(measured: Path) -> dict[tuple[str, str, str], float]:
    """Returns model, layout, rate -> milliseconds of the reference, the mean over the runs."""
    found: dict[tuple[str, str, str], list[float]] = {}
    with open(measured, newline="") as file:
        for row in csv.DictReader(file):
            if row["status"] == "ok":
                found.setdefault((row["model"], row["layout"], row["rate"]), []).append(float(row["reference_ms"]))
    return {key: statistics.fmean(each) for key, each in found.items()}


def at_speed(profile: MachineProfile, slower: float) -> MachineProfile:
    """Returns the profile of processors that take so many times as long."""
    return dataclasses.replace(
        profile,
        layers=tuple(scaled(row, slower) for row in profile.layers),
        ends=tuple(scaled(row, slower) for row in profile.ends),
        update_parameters_per_second=profile.update_parameters_per_second / slower,
        step_seconds=profile.step_seconds * slower,
    )


def _rows(case: Case, folder: Path, references: Mapping[tuple[str, str, str], float]) -> Iterator[Mapping[str, object]]:
    run, settings = settings_of(case.flags(), RANKS, description="A case.")
    sent = sent_by_hosts(run, settings, RANKS // case.model.hosts)
    software = Software()
    for rate in RATES:
        key = case.model.name, case.layout, f"{rate:g}"
        if key not in references:  # it failed
            continue
        as_taken = profile_of(folder, case.model, rate)
        model = StepModel(run, settings, cluster_of(as_taken), software)

        def clock_of(profile: MachineProfile) -> ProfiledClock:
            return ProfiledClock(profile, run, software, case.model.name)

        clock = clock_of(at_speed(as_taken, references[key] / reference_of(as_taken)))
        time = model.time(clock)
        busy = _busy(model, clock, settings.pipeline.placement.rank_of, settings.batches.final_num_microbatches)
        yield {
            "model": case.model.name,
            "layout": case.layout,
            "hosts": case.model.hosts,
            "rate": f"{rate:g}",
            "step_ms": f"{1e3 * float(time.seconds):.1f}",
            "profile_speed_ms": f"{1e3 * float(model.time(clock_of(as_taken)).seconds):.1f}",
            **{kind: f"{share:.4f}" for kind, share in shares_of(time, busy).items()},
            "sent": " ".join(f"{nbytes:.0f}" for nbytes in sent),
            "flops": f"{time.model_flops:.0f}",
        }


def _busy(model: StepModel, clock: ProfiledClock, rank_of: Sequence[int], microbatches: int) -> list[Parts]:
    """The parts of all microbatches on each pipeline rank."""
    busy = [Parts() for _ in range(max(rank_of) + 1)]
    for rank, phases in zip(rank_of, model.stages(clock), strict=True):
        for parts in (phases.forward, phases.input_grad, phases.weight_grad):
            busy[rank] = busy[rank].plus(parts, microbatches)
    return busy


def shares_of(time: StepTime, busy: Sequence[Parts]) -> dict[str, float]:
    """Returns the fractions of a step by the kinds of --profile-timeline's summary, which is a mean over ranks.

    The parts of a step are those of its slowest pipeline rank. The others compute less, and wait longer for others.
    busy: the parts of all microbatches on each pipeline rank.
    """
    parts, total = Parts(time.parts), float(time.seconds)
    slowest = max(busy, key=lambda each: float(each.total))

    def mean(*names: str) -> float:
        """Returns the part of the step, of which the microbatches' share is the mean over ranks."""
        own = float(np.mean([float(each.of(names)) for each in busy]))
        return (float(parts.of(names)) - float(slowest.of(names)) + own) / total

    shares = {
        "compute": mean(*_COMPUTED, OPTIMIZER),
        "tp": mean(TP),
        "cp": mean(CP),
        "dp": mean(DP),
        "pp": mean(PP),
        "other": mean(STEP),
    }
    return {kind: 1.0 - sum(shares.values()) if kind == "bubble" else shares[kind] for kind in KINDS}
