"""How the job is cut over processes, and what carries its messages."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.flag import flag


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Axis sizes and communication. Data parallelism is what is left: world size / (tp x cp x pp)."""

    tensor_model_parallel_size: int = flag(1, "processes that share each layer (tp)")
    sequence_parallel: bool = flag(False, "shard activations outside tensor-parallel layers along the sequence over tp")
    pipeline_model_parallel_size: int = flag(1, "pipeline stages (pp); only 1 so far")
    context_parallel_size: int = flag(1, "processes that share each sequence (cp); only 1 so far")
    expert_model_parallel_size: int = flag(1, "processes that share the experts (ep); only 1 so far")
    expert_tensor_parallel_size: int | None = flag(
        None, "processes that share each expert (etp); only 1 so far; default tp"
    )
    use_distributed_optimizer: bool = flag(
        False, "share the optimizer's state over dp: reduce-scatter gradients, all-gather parameters (ZeRO-1)"
    )
    overlap_grad_reduce: bool = flag(False, "reduce a bucket of gradients as soon as backward has written it")
    overlap_param_gather: bool = flag(
        False, "all-gather updated parameters while others are updated and beside the next forward"
    )
    overlapped_distributed_optimizer: bool = flag(
        False, "the sharded optimizer with both overlaps and --grad-reduce-mode auto"
    )
    data_parallel_sharding_strategy: str | None = flag(
        None,
        "what dp ranks share instead of copying: nothing, the optimizer's state (ZeRO-1), gradients too (ZeRO-2), "
        "parameters too (ZeRO-3); default by the flags above",
        choices=("no_shard", "optim", "optim_grads", "optim_grads_params"),
    )
    grad_reduce_mode: str | None = flag(
        None,
        "reduce gradients once a step and keep the whole fp32 gradient, or after every microbatch and keep only a "
        "shard; auto keeps it if memory allows; default auto with --overlapped-distributed-optimizer, else "
        "last-microbatch",
        choices=("auto", "last-microbatch", "every-microbatch"),
    )
    grad_reduce_in_bf16: bool = flag(False, "send gradients as bf16: half the traffic, less precise sums")
    num_distributed_optimizer_instances: int = flag(
        1, "shard inside each of this many groups of dp ranks and all-reduce gradients between them"
    )
    ddp_bucket_size: int | None = flag(
        None,
        "elements in a bucket, the unit of data-parallel communication; default max(40M, 1M x dp), and at most an "
        "eighth of the model",
        aliases=("--reduce-bucket-size",),
    )
    device: str = flag("auto", "where to run; auto takes CUDA when there is one", choices=("auto", "cpu", "cuda"))
    distributed_backend: str | None = flag(
        None, "collective library; default nccl on CUDA, gloo on CPU", choices=("nccl", "gloo")
    )
    distributed_timeout_minutes: float = flag(
        10.0, "a collective that waits longer ends the job and names who is missing"
    )
    heartbeat_dir: str | None = flag(
        None, "folder for one small file a rank with its phase, rewritten every second; default SAVE/heartbeat"
    )
