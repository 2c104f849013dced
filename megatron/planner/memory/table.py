"""A memory plan as rows of text."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.config.mesh import mesh_of
from megatron.config.optimizer_offload import offload_settings
from megatron.config.run import RunConfig
from megatron.planner.memory.plan import RankMemory, num_microbatches
from megatron.spec.memory.trace import KINDS
from megatron.spec.sizes import Target

MIB = 1024**2


def memory_headline(run: RunConfig, world_size: int, target: Target) -> str:
    """Layout, microbatches and device that a plan is for."""
    mesh = mesh_of(run.parallel, world_size)
    where = "CPU" if target.cpu else "CUDA"
    products = ", products in fp32" if target.wide else ""
    return (
        f"tp {mesh.tp} x cp {mesh.cp} x dp {mesh.dp} x pp {mesh.pp}, "
        f"{num_microbatches(run, mesh.dp)} microbatches per step, {run.model.dtype_name} on {where}{products}"
    )


def notes(run: RunConfig) -> list[str]:
    """What the run will decide by itself, and the plan cannot know."""
    found = []
    if run.recompute.recompute_policy is not None:
        found.append(
            f"--recompute-policy {run.recompute.recompute_policy} chooses at start; planned is a run without it"
        )
    if run.activation_offload.kind == "ratio" and run.activation_offload.ratio is None:
        found.append("--pipeline-offload-ratio auto begins with 0, and so does the plan")
    if offload_settings(run.optimizer, run.optimizer_offload).is_auto:
        found.append("--optimizer-offload-policy auto begins with all state in host memory, and so does the plan")
    return found


def table_rows(ranks: Sequence[RankMemory]) -> list[list[str]]:
    """A row a kind of memory at the moment when a rank uses most, and rows of what else is known; a column a rank."""
    kinds = [kind for kind in KINDS if any(rank.at_peak.get(kind, 0) for rank in ranks)]
    rows = [[kind, *(_mib(rank.at_peak.get(kind, 0)) for rank in ranks)] for kind in kinds]
    rows.append(["most at once", *(_mib(rank.peak) for rank in ranks)])
    rows.append(["between steps", *(_mib(rank.start) for rank in ranks)])
    rows.append(["a microbatch keeps", *(_mib(rank.a_microbatch) for rank in ranks)])
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
