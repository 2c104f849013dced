"""The settings that follow from the flags of a run and its number of processes: computed once and passed down in
parts."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.base.mesh import Mesh
from megatron.config.batch_schedule import BatchSchedule
from megatron.config.communicators import CommunicatorSettings, communicator_settings
from megatron.config.context_parallel import GroupSizes, attention_comm_types, group_sizes, inner_size
from megatron.config.data_parallel import DataParallelSettings
from megatron.config.optimizer_offload import OffloadSettings, offload_settings
from megatron.config.pipeline import PipelineSettings
from megatron.config.run import RunConfig


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """mesh: axis sizes and coordinates. pipeline: schedule and stages. data_parallel: sharding and reduction.
    optimizer_offload: where the optimizer's state lives. attention_comm_types: how the attention of each layer
    communicates under context parallelism. context_inner: neighbouring ranks that exchange heads under a2a+p2p.
    dynamic_context: the groups that share sequences, where their sizes differ.
    sequence_parallel: whether it is in effect: asked for, and tp > 1. batches: samples and microbatches of every step.
    communicators: options of NCCL.
    """

    mesh: Mesh
    pipeline: PipelineSettings
    data_parallel: DataParallelSettings
    optimizer_offload: OffloadSettings
    attention_comm_types: tuple[str, ...]
    context_inner: int
    dynamic_context: GroupSizes | None
    sequence_parallel: bool
    batches: BatchSchedule
    communicators: CommunicatorSettings


def resolve(run: RunConfig, mesh: Mesh) -> RunSettings:
    """Returns the settings of a run that `config.rules` accept, once its model's shape is known.

    Pure but for one file: --nccl-communicator-config-path.
    """
    assert run.model.num_layers
    return RunSettings(
        mesh=mesh,
        pipeline=run.pipeline_settings(),
        data_parallel=run.data_parallel_settings(),
        optimizer_offload=offload_settings(run.optimizer, run.optimizer_offload),
        attention_comm_types=attention_comm_types(run.parallel, run.model.num_layers),
        context_inner=inner_size(run.parallel),
        dynamic_context=group_sizes(run.parallel, mesh),
        sequence_parallel=run.parallel.sequence_parallel and mesh.tp > 1,
        batches=BatchSchedule(run.train, mesh.dp, run.data.seq_length),
        communicators=communicator_settings(run.parallel),
    )
