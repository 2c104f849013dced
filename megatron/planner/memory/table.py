"""Formats a memory plan as rows of text."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.config.activation_offload import ActivationOffloadConfig
from megatron.config.optimizer_offload import OffloadSettings
from megatron.config.recompute import RecomputeConfig
from megatron.config.settings import RunSettings
from megatron.planner.memory.plan import RankMemory
from megatron.spec.memory.trace import KINDS
from megatron.spec.sizes import Target

MIB = 1024**2


def memory_headline(settings: RunSettings, dtype: str, target: Target) -> str:
    """Formats the layout, the microbatches and the device that a plan is for. dtype: of the parameters."""
    mesh, microbatches = settings.mesh, settings.batches.final_num_microbatches
    where = "CPU" if target.cpu else "CUDA"
    experts = f" (experts: etp {mesh.etp} x ep {mesh.ep} x edp {mesh.edp})" if len(mesh.views) > 1 else ""
    products = ", products in fp32" if target.wide else ""
    return (
        f"tp {mesh.tp} x cp {mesh.cp} x dp {mesh.dp} x pp {mesh.pp}{experts}, {microbatches} microbatches per step, "
        f"{dtype} on {where}{products}"
    )


def notes(
    recompute: RecomputeConfig, activation_offload: ActivationOffloadConfig, optimizer_offload: OffloadSettings
) -> list[str]:
    """Returns one line for each decision that a run takes by itself, so that its plan assumes one."""
    found = []
    if recompute.recompute_policy is not None:
        found.append(f"--recompute-policy {recompute.recompute_policy} chooses at start; planned is a run without it")
    if activation_offload.kind == "ratio" and activation_offload.ratio is None:
        found.append("--pipeline-offload-ratio auto begins with 0, and so does the plan")
    if optimizer_offload.is_auto:
        found.append("--optimizer-offload-policy auto begins with all state in host memory, and so does the plan")
    return found


def table_rows(ranks: Sequence[RankMemory]) -> list[list[str]]:
    """Returns the rows of a table with one column per rank.

    There is one row per kind of memory, at the moment when the rank uses most, and then rows of other figures. A run that
    learns from rewards or preferences has a row for each phase.
    """
    kinds = [kind for kind in KINDS if any(rank.at_peak.get(kind, 0) for rank in ranks)]
    rows = [[kind, *(_mib(rank.at_peak.get(kind, 0)) for rank in ranks)] for kind in kinds]
    rows.append(["most at once", *(_mib(rank.peak) for rank in ranks)])
    for phases in zip(*(rank.phases for rank in ranks), strict=True):
        rows.append([f"most in {phases[0].name}", *(_mib(phase.peak) for phase in phases)])
    rows.append(["between steps", *(_mib(rank.start) for rank in ranks)])
    rows.append(["a microbatch keeps", *(_mib(rank.per_microbatch) for rank in ranks)])
    if any(rank.host for rank in ranks):
        rows.append(["host memory", *(_mib(rank.host) for rank in ranks)])
    if any(rank.disk for rank in ranks):
        rows.append(["files", *(_mib(rank.disk) for rank in ranks)])
    rows.append(["million parameters", *(f"{rank.parameters / 1e6:.1f}" for rank in ranks)])
    rows.append(["layers", *(str(rank.layers) for rank in ranks)])
    rows.append(["stages kept at once", *(str(rank.in_flight) for rank in ranks)])
    return rows


def _mib(size: int) -> str:
    return f"{size / MIB:.1f}"
