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
    ddp_bucket_size: int | None = flag(
        None,
        "elements in a gradient bucket, the unit of data-parallel communication; default max(40M, 1M x dp)",
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
