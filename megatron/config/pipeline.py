"""The schedule and the stages of a run, as the pipeline flags imply them."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from dataclasses import dataclass

from megatron.base.errors import ConfigError
from megatron.config.parallel import ParallelConfig
from megatron.schedule.offload_pass import with_offload
from megatron.schedule.partition import Stage, count_stages, parse_layout, partition, whole_model
from megatron.schedule.passes import with_transfers
from megatron.schedule.registry import schedule_or_default
from megatron.schedule.schedule import Placement, Schedule, round_robin
from megatron.schedule.schedules.forward_only import forward_only
from megatron.schedule.schedules.one_f_one_b import ONE_F_ONE_B
from megatron.schedule.spec import ScheduleSpec
from megatron.schedule.validate import check


@dataclass(frozen=True)
class PipelineSettings:
    """group: microbatches per group, for a schedule that takes groups, or None. overlap: transfers are overlapped with
    compute. pairs: forwards run together with backwards of other microbatches, to hide exchanges of tokens."""

    schedule: ScheduleSpec
    placement: Placement
    stages: tuple[Stage, ...]
    group: int | None
    overlap: bool
    pairs: bool = False

    def schedule_of(self, num_microbatches: int, *, offload: bool = False, checked: bool = True) -> Schedule:
        """Returns the actions of a training step, including transfers, after checking them.

        `offload`: with the actions that move activations to host memory and back. `checked`: False for a planner, which
        runs nothing and looks at many schedules. Raises ConfigError if the schedule does not support so many
        microbatches.
        """
        find = _checked if checked else _built
        return find(self, num_microbatches, evaluation=False, offload=offload)

    def evaluation_of(self, num_microbatches: int) -> Schedule:
        """Returns the actions of an evaluation: forwards only."""
        return _checked(self, num_microbatches, evaluation=True, offload=False)

    def stages_of(self, rank: int) -> tuple[Stage, ...]:
        """Returns the stages of a pipeline rank, in model order."""
        return tuple(self.stages[number] for number in self.placement.stages_of(rank))


ONE_STAGE = PipelineSettings(ONE_F_ONE_B, round_robin(1), (), None, overlap=True)  # for a model with a single stage


def pipeline_settings(parallel: ParallelConfig, num_layers: int) -> PipelineSettings:
    """Returns the settings. Raises ConfigError for flags that contradict each other or the number of layers."""
    p, pairs = parallel.pipeline_model_parallel_size, hides_exchanges(parallel)
    if p == 1:
        return dataclasses.replace(ONE_STAGE, stages=(whole_model(num_layers),), pairs=pairs)
    virtual_stages = _virtual_stages(parallel, num_layers)
    schedule = schedule_or_default(parallel.pipeline_schedule, virtual_stages)
    placement = schedule.placement(p, schedule.virtual_stages_for(virtual_stages))
    if parallel.pipeline_model_parallel_layout is not None:
        stages = parse_layout(parallel.pipeline_model_parallel_layout, num_layers, placement.num_stages)
    else:
        stages = partition(
            num_layers,
            placement.rank_of,
            first=parallel.decoder_first_pipeline_num_layers,
            last=parallel.decoder_last_pipeline_num_layers,
            embedding_counts=parallel.account_for_embedding_in_pipeline_split,
            head_counts=parallel.account_for_loss_in_pipeline_split,
        )
    group = parallel.microbatch_group_size_per_virtual_pipeline_stage
    schedule.sizes(p, 1, placement.num_stages // p, group)  # refuses a group that does not fit
    settings = PipelineSettings(schedule, placement, stages, group, parallel.overlap_p2p_communication, pairs)
    for rank in range(p):
        if not any(stage.layers or stage.embedding or stage.head for stage in settings.stages_of(rank)):
            raise ConfigError(f"pipeline rank {rank} would hold nothing; give it a layer, or use fewer ranks")
    return settings


def hides_exchanges(parallel: ParallelConfig) -> bool:
    """Returns whether exchanges of tokens between experts are there, and to be hidden behind another microbatch."""
    etp = parallel.expert_tensor_parallel_size or parallel.tensor_model_parallel_size
    return parallel.overlap_moe_expert_parallel_comm and parallel.expert_model_parallel_size * etp > 1


def passes_around(parallel: ParallelConfig) -> bool:
    """Returns whether the last pipeline rank sends to the first one, as far as the flags tell without the model.

    True if only the number of layers decides whether a rank has several virtual stages.
    """
    p, layout = parallel.pipeline_model_parallel_size, parallel.pipeline_model_parallel_layout
    several = (parallel.num_virtual_stages_per_pipeline_rank or 1) > 1
    several = several or parallel.num_layers_per_virtual_pipeline_stage is not None
    several = several or (layout is not None and count_stages(layout) > p)
    schedule = schedule_or_default(parallel.pipeline_schedule, 2 if several else None)
    placement = schedule.placement(p, schedule.virtual_stages or 2)
    return (p - 1, 0) in itertools.pairwise(placement.rank_of)


@functools.lru_cache(maxsize=16)
def _checked(settings: PipelineSettings, num_microbatches: int, *, evaluation: bool, offload: bool) -> Schedule:
    schedule = _built(settings, num_microbatches, evaluation=evaluation, offload=offload)
    check(schedule, blocking=not settings.overlap)
    return schedule


@functools.lru_cache(maxsize=16)
def _built(settings: PipelineSettings, num_microbatches: int, *, evaluation: bool, offload: bool) -> Schedule:
    """Builds a schedule. Cached, because a run has few numbers of microbatches and this takes time."""
    p, stages = settings.placement.num_ranks, settings.placement.num_stages
    pairs = settings.pairs and not evaluation
    computations = settings.schedule.build(p, num_microbatches, v=stages // p, group=settings.group, pairs=pairs)
    schedule = with_transfers(forward_only(computations) if evaluation else computations, overlap=settings.overlap)
    return with_offload(schedule) if offload else schedule


def _virtual_stages(parallel: ParallelConfig, num_layers: int) -> int | None:
    """Returns the virtual stages per rank that the flags ask for."""
    p, layout = parallel.pipeline_model_parallel_size, parallel.pipeline_model_parallel_layout
    per_stage = parallel.num_layers_per_virtual_pipeline_stage
    per_rank = parallel.num_virtual_stages_per_pipeline_rank
    if per_stage is not None and per_rank is not None:
        raise ConfigError(
            "--num-layers-per-virtual-pipeline-stage and --num-virtual-stages-per-pipeline-rank set the same; give one"
        )
    if per_stage is not None:
        if num_layers % (p * per_stage):
            raise ConfigError(
                f"--num-layers-per-virtual-pipeline-stage {per_stage} on {p} pipeline ranks does not divide "
                f"{num_layers} layers; give --num-virtual-stages-per-pipeline-rank and an uneven split instead"
            )
        return num_layers // p // per_stage
    if per_rank is None and layout is not None and parallel.pipeline_schedule is None:
        # Megatron-LM takes the number of virtual stages from the layout.
        stages = count_stages(layout)
        return stages // p if stages % p == 0 else None
    return per_rank
