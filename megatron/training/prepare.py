"""Chooses kernels, overlap of tensor-parallel communication and balanced recompute for this machine."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from megatron.config.data import DataConfig
from megatron.config.fp8 import Fp8Config
from megatron.config.model import ModelConfig
from megatron.config.moe_training import MoEConfig
from megatron.config.optimizer import OptimizerConfig
from megatron.config.parallel import ParallelConfig
from megatron.config.recompute import BALANCED, RecomputeConfig
from megatron.config.settings import RunSettings
from megatron.config.train import LOSS_CHUNK, TrainConfig
from megatron.core.context_parallel.transfer_trace import Trace
from megatron.core.expert_parallel.plan import ReadCounts, read_counts
from megatron.core.groups import Groups, backend_for
from megatron.core.streams.streams import Streams
from megatron.core.tensor_parallel.overlap import choose_overlap
from megatron.core.tensor_parallel.random import RngTracker
from megatron.core.transformer.context import Build
from megatron.kernels.choose import choose_kernels
from megatron.planner.memory.rank_choice import RankChoice
from megatron.training.balanced_recompute import choose_by_measuring
from megatron.training.together import together


@dataclass(frozen=True)
class Prepared:
    """`shared` holds the common arguments of all layers. The rest records the choices for this machine."""

    shared: Build
    streams: Streams
    backend: str | None  # "nccl" or "gloo"; None in a world of one process
    overlap_why: str  # why tensor-parallel overlap is not better; empty if it is the best, or was not requested
    balanced: RankChoice | None = None  # of --recompute-policy balanced

    @property
    def offloaded_layers(self) -> frozenset[int]:
        """Layers whose activations balanced recompute has chosen to offload."""
        return frozenset() if self.balanced is None else self.balanced.layers.offloaded


def prepare(
    model: ModelConfig,
    moe: MoEConfig,
    fp8: Fp8Config,
    parallel: ParallelConfig,
    recompute: RecomputeConfig,
    settings: RunSettings,
    groups: Groups,
    streams: Streams,
    *,
    documents: bool,
    seed: int,
    optimizer: OptimizerConfig | None = None,
    z_loss: float = 0.0,
    loss_chunk: int = LOSS_CHUNK,
    temperature: float = 1.0,
    read_counts: ReadCounts = read_counts,
) -> Prepared:
    """Chooses kernels and tensor-parallel overlap for this machine. Communication: see `choose_overlap`.

    documents: attention stays inside the documents of a sample. optimizer: None where nothing is trained. z_loss:
    coefficient of the logits' squared log-sum-exp in the gradient. loss_chunk: tokens whose logits exist at once.
    temperature: divides all logits. read_counts: brings the counts of an exchange of tokens to the host. Raises
    ConfigError: see `choose_kernels`.
    """
    device = streams.device
    backend = backend_for(device, parallel.distributed_backend) if groups.world.size > 1 else None
    overlap, overlap_why = choose_overlap(parallel, groups.tp, backend, streams, fp8=fp8.enabled)
    shared = Build(
        model,
        groups,
        settings.sequence_parallel,
        choose_kernels(
            model,
            device,
            blocks=groups.cp.size > 1 or any(size > 1 for size in groups.contexts),
            documents=documents,
            etp=groups.etp.size,
            optimizer=optimizer,
        ),
        RngTracker(seed, groups, device),
        device,
        overlap,
        settings.attention_comm_types,
        Trace(streams),
        recompute,
        moe,
        z_loss,
        loss_chunk,
        read_counts,
        streams.turns.yield_turn,
        temperature,
    )
    return Prepared(shared, streams, backend, overlap_why)


def balance_recompute(
    recompute: RecomputeConfig,
    data: DataConfig,
    train: TrainConfig,
    offload_dir: str | None,
    settings: RunSettings,
    prepared: Prepared,
) -> Prepared:
    """Returns `prepared` with the choices of --recompute-policy balanced for each layer, if it is given.

    It is then collective over the world. Raises ConfigError for a budget that is too small.
    """
    if recompute.recompute_policy != BALANCED or train.skip_train:
        return prepared
    shared, groups = prepared.shared, prepared.shared.groups
    stages = settings.pipeline.stages_of(groups.pp.rank)
    schedule = settings.pipeline.schedule_of(settings.batches.final_num_microbatches)
    balanced = together(
        groups.world,
        lambda: choose_by_measuring(recompute, data, train, offload_dir, shared, stages, schedule, prepared.streams),
    )
    return dataclasses.replace(
        prepared, shared=dataclasses.replace(shared, recompute=balanced.layers), balanced=balanced
    )
