"""The rows of the start-up table about communication: of layers, stages and sequences, and of gradients and
parameters."""

from __future__ import annotations

from megatron.base.mesh import Mesh
from megatron.config.communicators import CommunicatorSettings
from megatron.config.data_parallel import AUTO, EVERY, DataParallelSettings
from megatron.config.features.feature import Facts, Feature, on_or_off
from megatron.config.parallel import ParallelConfig
from megatron.config.settings import RunSettings
from megatron.schedule.costs import Costs
from megatron.schedule.simulate import simulate


def parallel_features(
    parallel: ParallelConfig, transformer_impl: str, settings: RunSettings, facts: Facts, *, trains: bool
) -> list[Feature]:
    """Returns the rows about the backend, and about layers, stages and sequences that are divided."""
    mesh = settings.mesh
    return [
        _backend(parallel.distributed_backend, facts),
        _communicators(settings.communicators, facts),
        _tensor_parallelism(mesh),
        _sequence_parallelism(parallel.sequence_parallel, settings.sequence_parallel),
        _tensor_overlap(parallel, transformer_impl, facts),
        _tensor_bulk_overlap(parallel, mesh),
        _pipeline(settings),
        _pipeline_overlap(parallel),
        _context(mesh.cp, settings.attention_comm_types, facts),
        _dynamic_context(settings, facts, trains=trains),
    ]


def reduction_features(settings: RunSettings, facts: Facts) -> list[Feature]:
    """Returns the rows about sums of gradients over replicas, and about gathered parameters."""
    data_parallel, replicas = settings.data_parallel, settings.mesh.dp * settings.mesh.cp
    return [
        _gradient_reduction(data_parallel, replicas, facts),
        _gradient_mode(data_parallel, replicas),
        _parameter_gather(data_parallel, facts),
    ]


def _backend(requested: str | None, facts: Facts) -> Feature:
    name = "communication backend"
    if facts.backend is None:
        return Feature(name, requested or "auto", "off", "one process")
    why = "" if requested in (None, facts.backend) else "no CUDA device"
    return Feature(name, requested or "auto", facts.backend, why)


def _communicators(settings: CommunicatorSettings, facts: Facts) -> Feature:
    """Options of NCCL, by Megatron-LM's names of groups."""
    name, requested = "NCCL options", ", ".join(settings.named) or "off"
    if not settings.named or facts.backend != "nccl":
        why = "one process" if facts.backend is None else f"{facts.backend} has no such options"
        return Feature(name, requested, "off", why if settings.named else "")
    missing = settings.without_group
    why = f"no group of this task here: {', '.join(missing)}" if missing else ""
    return Feature(name, requested, ", ".join(n for n in settings.named if n not in missing) or "off", why)


def _tensor_parallelism(mesh: Mesh) -> Feature:
    requested = f"tp {mesh.tp}" if mesh.tp > 1 else "off"
    return Feature("tensor parallelism", requested, requested, "")


def _sequence_parallelism(requested: bool, in_effect: bool) -> Feature:
    return Feature(
        "sequence parallelism",
        on_or_off(requested),
        on_or_off(in_effect),
        "tp = 1" if requested and not in_effect else "",
    )


def _tensor_overlap(parallel: ParallelConfig, transformer_impl: str, facts: Facts) -> Feature:
    """GEMMs that need the data that is communicated."""
    name = "tensor-parallel overlap"
    if not parallel.tp_comm_overlap:
        return Feature(name, "off", "off", "")
    # Without sequence parallelism nothing is gathered, and the reduced tensor is not sharded.
    gather = parallel.tp_comm_overlap_ag and parallel.sequence_parallel
    reduction = "reduce-scatter" if parallel.sequence_parallel else "all-reduce"
    requested = " + ".join(["all-gather"] * gather + [reduction] * parallel.tp_comm_overlap_rs)
    if facts.tp_overlap == "off":
        return Feature(name, requested, "off", facts.tp_overlap_why)
    why = facts.tp_overlap_why
    if why:
        why += f"; no user buffers: --transformer-impl {transformer_impl}"
    return Feature(name, requested, f"{requested}: {facts.tp_overlap}", why)


def _tensor_bulk_overlap(parallel: ParallelConfig, mesh: Mesh) -> Feature:
    """Communication overlapped with a GEMM that does not need its data."""
    name = "tensor-parallel bulk overlap"
    requested = " + ".join(["dgrad"] * parallel.tp_comm_bulk_dgrad + ["wgrad"] * parallel.tp_comm_bulk_wgrad) or "off"
    if mesh.tp == 1:
        return Feature(name, requested, "off", "tp = 1" if requested != "off" else "")
    if parallel.tp_comm_bulk_dgrad and not parallel.sequence_parallel:
        in_effect = "wgrad" if parallel.tp_comm_bulk_wgrad else "off"
        return Feature(name, requested, in_effect, "without --sequence-parallel nothing is gathered")
    return Feature(name, requested, requested, "")


def _pipeline(settings: RunSettings) -> Feature:
    """Returns the row with the bubble of a step, assuming that each gradient takes as long as the forward."""
    name, pipeline, p = "pipeline", settings.pipeline, settings.mesh.pp
    if p == 1:
        return Feature(name, "off", "off", "")
    chunks = pipeline.placement.num_stages // p
    requested = f"pp {p}, {pipeline.schedule.name}" + (f", {chunks} stages per rank" if chunks > 1 else "")
    if settings.dynamic_context is not None:
        return Feature(name, requested, requested, "the documents decide about the number of microbatches")
    m = settings.batches.final_num_microbatches
    timeline = simulate(pipeline.schedule_of(m), Costs.uniform(pipeline.placement.num_stages))
    bubble = max(timeline.bubble(rank) for rank in range(p))
    return Feature(
        name, requested, requested, f"bubble {bubble:.0%} with {m} microbatch{'es' if m > 1 else ''} per step"
    )


def _pipeline_overlap(parallel: ParallelConfig) -> Feature:
    requested = parallel.overlap_p2p_communication
    if parallel.pipeline_model_parallel_size == 1:
        return Feature("pipeline communication overlap", on_or_off(requested), "off", "pp = 1")
    return Feature("pipeline communication overlap", on_or_off(requested), on_or_off(requested), "")


def _context(cp: int, types: tuple[str, ...], facts: Facts) -> Feature:
    name = "context parallelism"
    if cp == 1:
        return Feature(name, "off", "off", "")
    requested = f"cp {cp}, {', '.join(dict.fromkeys(types))}"
    kernel, _, why = facts.block_choice.partition(" (")
    if set(types) == {"a2a"}:
        return Feature(name, requested, requested, "")
    return Feature(name, requested, f"{requested}: {kernel}", why.removesuffix(")"))


def _dynamic_context(settings: RunSettings, facts: Facts, *, trains: bool) -> Feature:
    name, sizes = "dynamic context parallelism", settings.dynamic_context
    if sizes is None:
        return Feature(name, "off", "off", "")
    types = ", ".join(dict.fromkeys(settings.attention_comm_types))
    requested = f"groups of {sizes.smallest} to {sizes.largest} ranks with {sizes.tokens} tokens each, {types}"
    if not trains:
        return Feature(name, requested, "off", "evaluation only")
    kernel, _, why = facts.block_choice.partition(" (")
    if types == "a2a" or sizes.largest == 1:
        return Feature(name, requested, requested, "")
    return Feature(name, requested, f"{requested}: {kernel}", why.removesuffix(")"))


def _gradient_reduction(settings: DataParallelSettings, replicas: int, facts: Facts) -> Feature:
    """replicas: ranks whose gradients of a parameter are added up."""
    name = "gradient reduction"
    requested = "overlapped" if settings.overlap_reduce else "after backward"
    if replicas == 1:
        return Feature(name, requested, "off", "dp = 1")
    op = "all-reduce" if facts.shards == 1 else "reduce-scatter"
    if 1 < facts.shards < replicas:
        op += " + all-reduce between instances"
    plural = "" if facts.buckets == 1 else "s"
    dtype = ", bf16 on the wire" if settings.reduce_in_bf16 else ""
    return Feature(name, requested, f"{requested}: {op}, {facts.buckets} bucket{plural}, {facts.backend}{dtype}", "")


def _gradient_mode(settings: DataParallelSettings, replicas: int) -> Feature:
    mode = settings.mode
    if replicas == 1:
        return Feature("gradients reduced", mode, "off", "dp = 1")
    if mode == AUTO:
        return Feature("gradients reduced", mode, f"{EVERY} at first", "decided after the first steps, and logged")
    return Feature("gradients reduced", mode, mode, "")


def _parameter_gather(settings: DataParallelSettings, facts: Facts) -> Feature:
    if settings.shards == "no_shard":
        return Feature("parameter gather", "off", "off", "")
    requested = "overlapped" if settings.overlap_gather else "after the update"
    if facts.shards == 1:
        return Feature("parameter gather", requested, "off", "nothing is shared")
    return Feature("parameter gather", requested, requested, "")
