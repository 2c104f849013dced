"""The memory that a rank uses all the time for parameters, gradients and optimizer state, and the memory that moves
them.

Let P be the parameters on the rank, padded as buckets are, of which N live in host memory, and S the ranks that share
the optimizer's state. G is S if gradients are sharded and 1 otherwise; W is S if parameters are sharded and 1
otherwise. Bytes in half precision, and in fp32 in brackets:

    parameters   2 (P - N) / W   (4 (P - N) / W)
    gradients    4 P / G         (4 P / G)
    masters      4 P / S         (0: the parameters are the masters)
    moments      8 P / S         (8 P / S), of adam

The N parameters take 2 N / S (4 N / S) bytes of host memory. During a step some of their buckets are on the device as
well (offloaded_weights.py). The update holds at most three slices of them on the device, and at its end two buckets for
the next forward and one slice that is copied to the host.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron.base.mesh import Mesh
from megatron.config.data_parallel import LAST
from megatron.config.optimizer import OptimizerConfig
from megatron.config.optimizer_offload import UPDATE
from megatron.config.settings import RunSettings
from megatron.planner.memory.offloaded_weights import OffloadedBuckets, offloaded_buckets
from megatron.planner.memory.rank_buckets import BucketSums, RankBuckets
from megatron.schedule.partition import Stage
from megatron.spec.buckets import NORM_ROW
from megatron.spec.decoder import DecoderSpec
from megatron.spec.fp8_sizes import kept_experts, kept_weight
from megatron.spec.moe import MoESpec
from megatron.spec.parameter import local_numel
from megatron.spec.sizes import FP32, Sizes

_NORM_BYTES = 4 + 8  # per row: its norm in fp32 and in fp64


@dataclass(frozen=True, kw_only=True)
class StateMemory:
    """Bytes of a rank, or [N] of N ranks.

    parameters, gradients, optimizer: in use all the time. quantized: weights in FP8, from their first use in a step to
    its end. blocks: memory for gradients that is kept between steps and used by one bucket after another. late_blocks:
    in addition when the gradient of the embedding arrives, and with it no activation is left. gathered: buckets of
    sharded or offloaded parameters that are whole during a step. prefetched: offloaded parameters that are on the
    device during the update. offloaded_slices: the host memory or files that hold them. staging: work space of one
    bucket's reduction, if it is overlapped with the last backward. at_end: work space of the reductions for which the
    end of the step waits. norm: work space of the gradient norm.
    """

    parameters: Any
    quantized: Any
    gradients: Any
    optimizer: Any
    blocks: Any
    late_blocks: Any
    gathered: Any
    prefetched: Any
    offloaded_slices: Any
    staging: Any
    at_end: Any
    norm: Any

    @property
    def start(self) -> Any:
        """Bytes between steps."""
        return self.parameters + self.gradients + self.optimizer + self.blocks


def state_memory(
    sums: BucketSums,
    optimizer: OptimizerConfig,
    width: int,
    *,
    shards_weights: Any,
    keeps_gradients: Any,
    overlaps: Any,
    updates_on_cpu: Any,
    ends_with_embedding: bool,
    optimizer_bytes: Any,
    quantized: Any,
) -> StateMemory:
    """Returns the memory of ranks with such buckets, under these settings of one rank, or of N.

    width: bytes per element of a parameter. shards_weights: parameters are sharded. keeps_gradients: every rank keeps
    whole gradients. overlaps: reductions are overlapped with the last backward. updates_on_cpu: all of the update runs
    on the CPU. ends_with_embedding: see that function. optimizer_bytes: on the device. quantized: see StateMemory.
    """
    gathers = shards_weights & (sums.sharded > 0)
    late = sums.late if ends_with_embedding else 0 * sums.late
    staying = np.where(shards_weights, sums.slices - sums.hosted_slices, sums.elements - sums.hosted)
    return StateMemory(
        parameters=width * staying,
        quantized=quantized,
        gradients=optimizer.main_grad_bytes * np.where(keeps_gradients, sums.elements, sums.slices),
        optimizer=optimizer_bytes,
        blocks=FP32 * np.where(keeps_gradients, 0, sums.blocks - late),
        late_blocks=FP32 * np.where(keeps_gradients, 0, late),
        gathered=width * np.where(gathers, 2 * sums.sharded, sums.resident),
        prefetched=width * (sums.pair + np.where(updates_on_cpu, 0, sums.widest_hosted)),
        offloaded_slices=width * sums.hosted_slices,
        staging=np.where(overlaps, sums.staging, 0),
        at_end=sums.at_end,
        norm=sums.widest // NORM_ROW * _NORM_BYTES,
    )


@dataclass(frozen=True)
class RankState:
    """The state of one rank. numel: its parameters. trained: bytes of those that are trained. memory: as integers. host,
    disk: of the optimizer. offloaded: the buckets of parameters that a step fetches from host memory."""

    numel: int
    trained: int
    memory: StateMemory
    host: int
    disk: int
    offloaded: OffloadedBuckets


def rank_state(
    spec: DecoderSpec,
    stages: Sequence[Stage],
    settings: RunSettings,
    optimizer: OptimizerConfig,
    sizes: Sizes,
    offloaded_layers: int,
) -> RankState:
    """Returns the state of a rank that holds `stages`.

    offloaded_layers: the weights of so many layers of each stage, from its first on, live in host memory.
    """
    data_parallel, offload, mesh = settings.data_parallel, settings.optimizer_offload, settings.mesh
    rank = rank_buckets(spec, stages, offloaded_layers)
    sums = rank.sums(mesh, data_parallel, sizes.target)
    of_optimizer = rank.optimizer(mesh, data_parallel, optimizer, offload, half=sizes.e < FP32)
    shards_weights = data_parallel.shards == "optim_grads_params"
    memory = state_memory(
        sums,
        optimizer,
        sizes.e,
        shards_weights=shards_weights,
        keeps_gradients=data_parallel.mode == LAST,
        overlaps=data_parallel.overlap_reduce,
        updates_on_cpu=offload.mode == UPDATE and offload.fraction == 1.0,
        ends_with_embedding=ends_with_embedding(spec, stages, pairs=settings.pipeline.pairs),
        optimizer_bytes=of_optimizer.device + of_optimizer.staging,
        quantized=quantized_weights(spec, stages, sizes, offloaded_layers),
    )
    frozen = frozen_elements(spec, stages, mesh)
    memory = dataclasses.replace(memory, parameters=memory.parameters + sizes.e * frozen)
    return RankState(
        sums.numel + frozen,
        sizes.e * sums.numel,
        StateMemory(**{name: int(nbytes) for name, nbytes in vars(memory).items()}),
        of_optimizer.host,
        of_optimizer.disk,
        OffloadedBuckets()
        if shards_weights and sums.sharded
        else offloaded_buckets(rank.of(mesh, data_parallel), sizes.e),
    )


def ends_with_embedding(spec: DecoderSpec, stages: Sequence[Stage], *, pairs: bool) -> bool:
    """Returns whether the gradient of the embedding arrives alone, as the last one of a microbatch that leaves no other
    in flight: on a rank that holds the whole model in one stage, whose head does not add to it."""
    (first, *others) = stages
    return first.embedding and first.head and not (others or pairs or spec.embeds_at_both_ends)


def rank_buckets(spec: DecoderSpec, stages: Sequence[Stage], offloaded_layers: int = 0) -> RankBuckets:
    """Returns the buckets of a rank that holds `stages`: of trained parameters. offloaded_layers: as in
    `rank_state`."""
    on_host = {
        f"decoder.layers.{number}.{name}"
        for stage in stages
        for number in stage.layers[:offloaded_layers]
        for name, _ in spec.layers[number].parameters()
    }
    return RankBuckets(spec.rank_parameters(stages) if spec.lora is None else spec.rank_adapters(stages), on_host)


def frozen_elements(spec: DecoderSpec, stages: Sequence[Stage], mesh: Mesh) -> int:
    """Returns the elements of the parameters of a rank that adapters leave as they are."""
    if spec.lora is None:
        return 0
    sizes = mesh.sizes
    return sum(local_numel(placed.spec, sizes) for placed in spec.rank_parameters(stages).values())


def quantized_weights(spec: DecoderSpec, stages: Sequence[Stage], sizes: Sizes, offloaded_layers: int) -> int:
    """Returns the bytes of quantized weights that a rank keeps during a step: none of weights that are freed after
    use."""
    fp8 = sizes.fp8
    if fp8 is None:
        return 0
    staying = [
        spec.layers[number] for stage in stages for number in stage.layers[offloaded_layers:] if number in fp8.layers
    ]
    linears = (linear for layer in staying for linear in layer.linears().values())
    of_linears, of_experts = sum(kept_weight(linear, sizes.tp, fp8) for linear in linears), 0
    if sizes.load is not None:
        of_experts = sum(
            kept_experts(layer.mlp.experts, sizes.load, fp8, cpu=sizes.target.cpu)
            for layer in staying
            if isinstance(layer.mlp, MoESpec)
        )
    return of_linears + of_experts
