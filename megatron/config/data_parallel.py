"""The settings that the flags of data parallelism imply."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.parallel import ParallelConfig
from megatron.schedule.registry import schedule_or_default

LAST, EVERY, AUTO = "last-microbatch", "every-microbatch", "auto"


@dataclass(frozen=True, kw_only=True)
class DataParallelSettings:
    """Settings of data parallelism.

    `shards` is "no_shard", "optim", "optim_grads" or "optim_grads_params": the state that is sharded instead of
    replicated. `mode` is the time of gradient reduction; "auto" is resolved during the run. `instances` is the number
    of instances of the sharded optimizer. `bucket_size` is in elements, None for the default. `grads_in_bf16`: main
    gradients are kept in bf16, not in fp32.
    """

    shards: str = "no_shard"
    mode: str = LAST
    overlap_reduce: bool = False
    overlap_gather: bool = False
    reduce_in_bf16: bool = False
    instances: int = 1
    bucket_size: int | None = None
    grads_in_bf16: bool = False

    @property
    def rounds_grads(self) -> bool:
        """Whether whole gradients are kept in bf16. Those that are reduced after every microbatch are fp32 until
        then."""
        return self.grads_in_bf16 and (self.mode == LAST or self.shards == "no_shard")

    @property
    def optimizer_instances(self) -> int | None:
        """The value for `create_groups`: None if nothing is sharded."""
        return None if self.shards == "no_shard" else self.instances


def data_parallel_settings(parallel: ParallelConfig, main_grads_dtype: str = "fp32") -> DataParallelSettings:
    """Returns the settings that the flags ask for. Rules reject conflicting flags."""
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
        # Gradients that are not kept must be reduced as soon as they are complete.
        overlap_reduce=overlapped or parallel.overlap_grad_reduce or mode != LAST,
        overlap_gather=overlapped or parallel.overlap_param_gather or shards == "optim_grads_params",
        reduce_in_bf16=parallel.grad_reduce_in_bf16,
        instances=parallel.num_distributed_optimizer_instances,
        bucket_size=parallel.ddp_bucket_size,
        grads_in_bf16=main_grads_dtype == "bf16",
    )


def splits_backward(parallel: ParallelConfig) -> bool:
    """Returns whether the pipeline's schedule computes gradients of inputs and of weights at different times."""
    schedule = schedule_or_default(parallel.pipeline_schedule, parallel.num_virtual_stages_per_pipeline_rank)
    return parallel.pipeline_model_parallel_size > 1 and schedule.splits_backward
