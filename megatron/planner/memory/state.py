"""What a rank holds all the time: parameters, gradients and optimizer state, and the memory that moves them.

With P parameters on the rank, padded as buckets are, and S ranks that share: G is S when gradients are sharded, else 1; W
is S when parameters are; N of them live in host memory. Bytes in half precision, in fp32 in brackets: parameters 2 P / W
(4 P / W); gradients, fp32, 4 P / G; masters 4 P / S (0: the parameters are the masters); adam's moments 8 P / S.

The N parameters take 2 N / S (4 N / S) of host memory instead. Here they take some buckets in a step (far_weights.py); in
the update at most three slices, and at its end two buckets for the next forward and one slice that leaves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.config.data_parallel import LAST, data_parallel_settings
from megatron.config.optimizer_offload import UPDATE, offload_settings
from megatron.config.run import RunConfig
from megatron.planner.memory.far_weights import FarBuckets, far_buckets
from megatron.planner.optimizer_memory import OptimizerBytes, optimizer_bytes
from megatron.planner.parameters import rank_buckets, rank_parameters
from megatron.planner.sizes import FP32, Target
from megatron.schedule.partition import Stage
from megatron.spec.buckets import BucketLayout

_BLOCKS = 4  # gradient memories in use at once when none is kept (core/distributed/data_parallel.py)
_IN_FLIGHT = 4  # buckets on the wire at once (core/comm/bucket_comm.py)
_ROW = 64  # elements that the gradient norm sums in fp32 (core/optimizer/grad_norm.py)
_ROW_BYTES = 4 + 8


@dataclass(frozen=True)
class StateMemory:
    """Bytes. parameters, gradients, optimizer: all the time. blocks: gradient memory that passes through, kept between
    steps. gathered: parameters that are whole for a while in a step where they are sharded or far away, and visits: in the
    update where they are far. far: buckets of those.

    staging: beside the last backward, when buckets leave as they fill, and at_end: when the step's gradients are awaited.
    norm: work space of the gradient norm.
    """

    numel: int
    parameters: int
    gradients: int
    optimizer: OptimizerBytes
    blocks: int
    gathered: int
    visits: int
    far: FarBuckets
    far_slices: int
    staging: int
    at_end: int
    norm: int


def state_memory(run: RunConfig, target: Target, stages: Sequence[Stage], dp: int) -> StateMemory:
    """Of a rank that holds `stages`. dp: data-parallel ranks, without those of cp."""
    settings = data_parallel_settings(run.parallel)
    replicas = dp * run.parallel.context_parallel_size
    shards = 1 if settings.shards == "no_shard" else replicas // settings.instances
    far_layers = run.activation_offload.far_weight_layers
    weights = rank_parameters(run.model, run.parallel.tensor_model_parallel_size, stages, far_layers)
    buckets = rank_buckets(weights, settings.bucket_size, shards)
    width = FP32 if run.model.dtype_name == "float32" else 2
    size = sum(bucket.size for bucket in buckets)
    far = far_buckets(weights, buckets, width)
    keeps = settings.mode == LAST or shards == 1
    sharded = settings.shards == "optim_grads_params" and shards > 1
    slices = [bucket.size // shards for bucket in buckets]
    offload = offload_settings(run.optimizer, run.optimizer_offload)
    by_cpu = offload.mode == UPDATE and offload.far == 1.0
    gathered = 2 * width * max(bucket.size for bucket in buckets) if sharded else far.always
    wire = FP32 // 2 if settings.reduce_in_bf16 else FP32
    staging = _staging(buckets, shards, replicas // shards, wire, target)
    return StateMemory(
        numel=sum(weight.numel for weight in weights.values()),
        parameters=(width * size - far.nbytes) // (shards if sharded else 1),
        gradients=FP32 * (size if keeps else size // shards),
        optimizer=optimizer_bytes(slices, run.optimizer, offload, half=width == 2),
        blocks=0 if keeps else FP32 * sum(sorted((bucket.size for bucket in buckets), reverse=True)[:_BLOCKS]),
        gathered=gathered,
        visits=far.pair + (0 if by_cpu else far.always // shards),
        far=FarBuckets() if sharded else far,
        far_slices=far.nbytes // shards,
        staging=staging[0] if settings.overlap_reduce and staging else 0,
        at_end=sum(staging[:_IN_FLIGHT]),
        norm=max(slices) // _ROW * _ROW_BYTES,
    )


def _staging(buckets: Sequence[BucketLayout], shards: int, copies: int, wire: int, target: Target) -> list[int]:
    """Bytes that each bucket's reduction takes on its way, the largest first.

    On the CPU every other rank's version of this rank's piece is received before they are added; NCCL adds on the way.
    In bf16 the bucket is converted first.
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
