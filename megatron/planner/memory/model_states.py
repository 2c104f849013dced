"""Memory that a rank holds all the time, parameters, gradients and optimizer state, and the memory that moves them.

With P parameters on the rank, padded as buckets are, and S ranks that share: G is S when gradients are sharded, else 1; W
is S when parameters are; N of them live in host memory. Bytes in half precision, in fp32 in brackets: parameters 2 P / W
(4 P / W); gradients, fp32, 4 P / G; masters 4 P / S (0: the parameters are the masters); adam's moments 8 P / S.

The N parameters take 2 N / S (4 N / S) of host memory instead. On the device they take some buckets in a step
(offloaded_weights.py); in the update at most three slices, and at its end two buckets for the next forward and one slice
that is copied to the host.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from megatron.base.mesh import Mesh
from megatron.config.data_parallel import DataParallelSettings, data_parallel_settings
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


@dataclass(frozen=True)
class RankBucket:
    """A bucket of a rank. shards: its slices; copies: ranks that hold the same slice. on_host: its weights live there."""

    layout: BucketLayout
    shards: int
    copies: int
    on_host: bool

    @property
    def size(self) -> int:
        """Elements, padding included."""
        return self.layout.size

    @property
    def slice(self) -> int:
        """Elements of a rank's slice."""
        return self.size // self.shards


def state_memory(run: RunConfig, target: Target, stages: Sequence[Stage], mesh: Mesh) -> StateMemory:
    """The memory of a rank that holds `stages`."""
    settings, spec = data_parallel_settings(run.parallel), decoder_spec(run.model)
    on_host = {
        f"decoder.layers.{number}.{name}"
        for stage in stages
        for number in stage.layers[: run.activation_offload.far_weight_layers]
        for name, _ in spec.layers[number].parameters()
    }
    parameters = spec.rank_parameters(stages)
    buckets = rank_buckets(parameters, mesh, settings, on_host)
    width = FP32 if run.model.dtype_name == "float32" else 2
    shared = [(bucket, shards_of(settings, bucket.shards)) for bucket in buckets]
    sharded = [bucket.size for bucket, ranks in shared if ranks.weights > 1]
    away = [width * bucket.slice for bucket in buckets if bucket.on_host]
    offloaded = offloaded_buckets([bucket.layout for bucket in buckets if bucket.on_host], width)
    offload = offload_settings(run.optimizer, run.optimizer_offload)
    by_cpu = offload.mode == UPDATE and offload.far == 1.0
    wire = FP32 // 2 if settings.reduce_in_bf16 else FP32
    staging = _staging(buckets, wire, target)
    blocks = sorted((bucket.size for bucket in buckets), reverse=True)[:GRADIENT_BLOCKS]
    slices = [bucket.slice for bucket in buckets]
    return StateMemory(
        numel=sum(sum(bucket.layout.numels.values()) for bucket in buckets),
        parameters=sum(width * bucket.size // ranks.weights for bucket, ranks in shared if not bucket.on_host),
        gradients=sum(FP32 * bucket.size // ranks.gradients for bucket, ranks in shared),
        optimizer=optimizer_bytes(slices, run.optimizer, offload, half=width == 2),
        blocks=FP32 * sum(blocks) if any(ranks.gradients > 1 for _, ranks in shared) else 0,
        gathered=2 * width * max(sharded) if sharded else offloaded.always,
        prefetched=offloaded.pair + (0 if by_cpu else max(away, default=0)),
        offloaded=OffloadedBuckets() if sharded else offloaded,
        offloaded_slices=sum(away),
        staging=staging[0] if settings.overlap_reduce and staging else 0,
        at_end=sum(staging[:IN_FLIGHT]),
        norm=max(slices) // NORM_ROW * _NORM_BYTES,
    )


def rank_buckets(
    parameters: dict[str, Placed], mesh: Mesh, settings: DataParallelSettings, on_host: Collection[str]
) -> list[RankBucket]:
    """The buckets of these parameters, in the order in which backward completes them. on_host: names of those whose
    weights live in host memory."""
    each = {
        view: 1 if settings.shards == "no_shard" else mesh.copies(view) // settings.instances for view in mesh.views
    }
    numels, kinds, shards = {}, {}, {}
    for name, placed in reversed(parameters.items()):
        axis = placed.spec.axis
        view = mesh.view(axis)
        numels[name] = local_numel(placed.spec, 1 if axis is None else mesh.size(axis))
        kinds[name] = (view, placed.stage, placed.on_both_ends, name in on_host)
        shards[name] = each[view]
    size = settings.bucket_size or default_bucket_size(sum(numels.values()), max(each.values()))
    buckets = []
    for layout in plan_all(numels, kinds, size, shards):
        first = next(iter(layout.offsets))
        copies = mesh.copies(mesh.view(parameters[first].spec.axis)) // shards[first]
        buckets.append(RankBucket(layout, shards[first], copies, first in on_host))
    return buckets


def _staging(buckets: Sequence[RankBucket], wire: int, target: Target) -> list[int]:
    """Bytes of work space that each bucket's reduction takes, the largest first.

    On the CPU every other rank's version of this rank's slice is received before they are added; NCCL adds while it
    receives. In bf16 the bucket is converted first.
    """
    found = []
    for bucket in buckets:
        shards, copies = bucket.shards, bucket.copies
        if shards == copies == 1:
            continue
        converted = wire * bucket.size if wire < FP32 else 0
        received = 0
        if target.cpu:
            received = max((shards - 1) * bucket.slice, (copies - 1) * -(-bucket.slice // copies)) * wire
        found.append(converted + received)
    return sorted(found, reverse=True)
