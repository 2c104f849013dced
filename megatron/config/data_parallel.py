"""What the flags of data parallelism amount to."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.parallel import ParallelConfig
from megatron.schedule.registry import schedule_or_default

LAST, EVERY, AUTO = "last-microbatch", "every-microbatch", "auto"


@dataclass(frozen=True, kw_only=True)
class DataParallelSettings:
    """shards: "no_shard", "optim", "optim_grads" or "optim_grads_params": what the ranks share instead of copying.

    mode: when gradients are reduced; "auto" may still become either. instances: of the sharded optimizer. bucket_size:
    elements, None for the default.
    """

    shards: str = "no_shard"
    mode: str = LAST
    overlap_reduce: bool = False
    overlap_gather: bool = False
    reduce_in_bf16: bool = False
    instances: int = 1
    bucket_size: int | None = None

    @property
    def optimizer_instances(self) -> int | None:
        """As `create_groups` takes it: None when nothing is sharded."""
        return None if self.shards == "no_shard" else self.instances


def data_parallel_settings(parallel: ParallelConfig) -> DataParallelSettings:
    """The settings that the flags ask for. Conflicting flags are refused before, by rules."""
    overlapped = parallel.overlapped_distributed_optimizer
    shards = parallel.data_parallel_sharding_strategy
    if shards is None:
        shards = "optim" if overlapped or parallel.use_distributed_optimizer else "no_shard"
    sharded_grads = shards in ("optim_grads", "optim_grads_params")
    mode = parallel.grad_reduce_mode
    if mode is None:
        undecided = overlapped and parallel.data_parallel_sharding_strategy is None
        mode = EVERY if sharded_grads else AUTO if undecided else LAST
    if mode == AUTO and splits_backward(parallel):
        mode = LAST
    return DataParallelSettings(
        shards=shards,
        mode=mode,
        # Gradients that are not kept must leave as soon as they are complete.
        overlap_reduce=overlapped or parallel.overlap_grad_reduce or mode != LAST,
        overlap_gather=overlapped or parallel.overlap_param_gather or shards == "optim_grads_params",
        reduce_in_bf16=parallel.grad_reduce_in_bf16,
        instances=parallel.num_distributed_optimizer_instances,
        bucket_size=parallel.ddp_bucket_size,
    )


def splits_backward(parallel: ParallelConfig) -> bool:
    """Whether the pipeline's schedule computes gradients of inputs and of weights at different times."""
    schedule = schedule_or_default(parallel.pipeline_schedule, parallel.num_virtual_stages_per_pipeline_rank)
    return parallel.pipeline_model_parallel_size > 1 and schedule.splits_backward
