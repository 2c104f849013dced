"""Memory that a rank holds all the time, parameters, gradients and optimizer state, and the memory that moves them.

With P parameters on the rank, padded as buckets are, and S ranks that share: G is S when gradients are sharded, else 1; W
is S when parameters are; N of them live in host memory. Bytes in half precision, in fp32 in brackets: parameters 2 P / W
(4 P / W); gradients, fp32, 4 P / G; masters 4 P / S (0: the parameters are the masters); adam's moments 8 P / S.

The N parameters take 2 N / S (4 N / S) of host memory instead. On the device they take some buckets in a step
(offloaded_weights.py); in the update at most three slices, and at its end two buckets for the next forward and one slice
that is copied to the host.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from megatron.config.data_parallel import data_parallel_settings
from megatron.config.optimizer_offload import UPDATE, offload_settings
from megatron.config.run import RunConfig
from megatron.planner.memory.footprint import shards_of
from megatron.planner.memory.offloaded_weights import OffloadedBuckets, offloaded_buckets
from megatron.schedule.partition import Stage
from megatron.spec.buckets import (
    GRADIENT_BLOCKS,
    IN_FLIGHT,
    NORM_ROW,
    BucketLayout,
    default_bucket_size,
    plan_all,
)
from megatron.spec.decoder import Placed, decoder_spec
from megatron.spec.optimizer_state import OptimizerBytes, optimizer_bytes
from megatron.spec.parameter import local_numel
from megatron.spec.sizes import FP32, Target

_NORM_BYTES = 4 + 8  # per row: its norm in fp32 and in fp64


@dataclass(frozen=True)
class StateMemory:
    """All in bytes, but for numel, the number of parameters.

    parameters, gradients, optimizer: in use all the time. blocks: gradient memory that is used in turn, kept between steps.
    gathered: parameters that are whole for a while in a step where they are sharded or offloaded. prefetched: offloaded
    parameters on the device in the update. offloaded: their buckets. offloaded_slices: their host memory.
    staging: during the last backward, when buckets are reduced as they fill. at_end: while the step's gradients are awaited.
    norm: work space of the gradient norm.
    """

    numel: int
    parameters: int
    gradients: int
    optimizer: OptimizerBytes
    blocks: int
    gathered: int
    prefetched: int
    offloaded: OffloadedBuckets
    offloaded_slices: int
    staging: int
    at_end: int
    norm: int


def state_memory(run: RunConfig, target: Target, stages: Sequence[Stage], dp: int) -> StateMemory:
    """The memory of a rank that holds `stages`. dp: data-parallel ranks, without those of cp."""
    settings = data_parallel_settings(run.parallel)
    replicas = dp * run.parallel.context_parallel_size
    shards = 1 if settings.shards == "no_shard" else replicas // settings.instances
    spec, tp = decoder_spec(run.model), run.parallel.tensor_model_parallel_size
    parameters = spec.rank_parameters(stages)
    on_host = {
        f"decoder.layers.{number}.{name}"
        for stage in stages
        for number in stage.layers[: run.activation_offload.far_weight_layers]
        for name, _ in spec.layers[number].parameters()
    }
    numels = {name: local_numel(placed.spec, tp) for name, placed in parameters.items()}
    buckets = rank_buckets(parameters, numels, on_host, settings.bucket_size, shards)
    width = FP32 if run.model.dtype_name == "float32" else 2
    size = sum(bucket.size for bucket in buckets)
    offloaded = offloaded_buckets(on_host, buckets, width)
    ranks = shards_of(settings, shards)
    sharded = ranks.weights > 1
    slices = [bucket.size // shards for bucket in buckets]
    offload = offload_settings(run.optimizer, run.optimizer_offload)
    by_cpu = offload.mode == UPDATE and offload.far == 1.0
    wire = FP32 // 2 if settings.reduce_in_bf16 else FP32
    staging = _staging(buckets, shards, replicas // shards, wire, target)
    blocks = sorted((bucket.size for bucket in buckets), reverse=True)[:GRADIENT_BLOCKS]
    return StateMemory(
        numel=sum(numels.values()),
        parameters=(width * size - offloaded.nbytes) // ranks.weights,
        gradients=FP32 * (size // ranks.gradients),
        optimizer=optimizer_bytes(slices, run.optimizer, offload, half=width == 2),
        blocks=0 if ranks.gradients == 1 else FP32 * sum(blocks),
        gathered=2 * width * max(bucket.size for bucket in buckets) if sharded else offloaded.always,
        prefetched=offloaded.pair + (0 if by_cpu else offloaded.always // shards),
        offloaded=OffloadedBuckets() if sharded else offloaded,
        offloaded_slices=offloaded.nbytes // shards,
        staging=staging[0] if settings.overlap_reduce and staging else 0,
        at_end=sum(staging[:IN_FLIGHT]),
        norm=max(slices) // NORM_ROW * _NORM_BYTES,
    )


def rank_buckets(
    parameters: dict[str, Placed],
    numels: Mapping[str, int],
    on_host: Collection[str],
    bucket_size: int | None,
    shards: int,
) -> list[BucketLayout]:
    """The buckets of these parameters, in the order in which backward completes them. numels: local elements. on_host:
    names of those whose weights live in host memory."""
    backward = dict(reversed(list(parameters.items())))
    kinds = {name: (placed.stage, placed.on_both_ends, name in on_host) for name, placed in backward.items()}
    size = bucket_size or default_bucket_size(sum(numels.values()), shards)
    return plan_all({name: numels[name] for name in backward}, kinds, size, shards)


def _staging(buckets: Sequence[BucketLayout], shards: int, copies: int, wire: int, target: Target) -> list[int]:
    """Bytes of work space that each bucket's reduction takes, the largest first.

    On the CPU every other rank's version of this rank's slice is received before they are added; NCCL adds while it
    receives. In bf16 the bucket is converted first.
    """
    if shards == 1 and copies == 1:
        return []
    found = []
    for bucket in buckets:
        converted = wire * bucket.size if wire < FP32 else 0
        received = 0
        if target.cpu:
            piece = bucket.size // shards
            received = max((shards - 1) * piece if shards > 1 else 0, (copies - 1) * -(-piece // copies)) * wire
        found.append(converted + received)
    return sorted(found, reverse=True)
