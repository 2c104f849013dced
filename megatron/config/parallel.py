"""Flags about the layout of the job over processes, and its communication."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.flag import Need, flag, on_by_default
from megatron.config.interval import COUNT, COUNT_OR_NONE, LAYERS, MINUTES, RANKS, SIZE
from megatron.config.moe import EXPERTS
from megatron.config.stream_groups import GROUPS
from megatron.schedule.registry import SCHEDULES

_PIPELINE = Need(
    lambda run: run.parallel.pipeline_model_parallel_size > 1, "--pipeline-model-parallel-size is 1", "raise it"
)
_LAYERS_SHARED_OUT = Need(
    lambda run: _PIPELINE.holds(run) and run.parallel.pipeline_model_parallel_layout is None,
    lambda run: (
        "--pipeline-model-parallel-layout writes the stages out"
        if _PIPELINE.holds(run)
        else "--pipeline-model-parallel-size is 1"
    ),
    "let the layers be shared out between pipeline ranks",
)
_SHARDED = Need(
    lambda run: run.data_parallel_settings().shards != "no_shard",
    "every rank updates all parameters",
    "add --use-distributed-optimizer",
)
_DYNAMIC = Need(
    lambda run: run.parallel.dynamic_context_parallel,
    "every sequence is shared by --context-parallel-size processes",
    "add --dynamic-context-parallel",
)

_LARGEST_HOST = 16  # GPUs
DEVICES = ("auto", "cpu", "cuda", *(f"cuda:{number}" for number in range(_LARGEST_HOST)))
DEVICES_SHOWN = "{auto,cpu,cuda,cuda:N}"


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Axis sizes and communication. The data-parallel size is the rest: world size / (tp x cp x pp)."""

    tensor_model_parallel_size: int = flag(1, "processes that share each layer (tp)", within=RANKS)
    sequence_parallel: bool = flag(False, "shard activations outside tensor-parallel layers along the sequence over tp")
    tp_comm_overlap: bool = flag(
        False,
        "split tensor-parallel communication into chunks that are overlapped with their GEMMs",
        needs=Need(
            lambda run: (
                run.parallel.tp_comm_overlap_rs or (run.parallel.sequence_parallel and run.parallel.tp_comm_overlap_ag)
            ),
            "all it could overlap is turned off",
            "remove --no-tp-comm-overlap-rs",
        ),
    )
    tp_comm_overlap_ag: bool = on_by_default(
        when_off="do not split all-gathers with --tp-comm-overlap",
        needs=Need(
            lambda run: run.parallel.tp_comm_overlap and run.parallel.sequence_parallel,
            lambda run: "nothing is gathered" if run.parallel.tp_comm_overlap else "nothing is cut into pieces",
            "add --tp-comm-overlap and --sequence-parallel",
        ),
    )
    tp_comm_overlap_rs: bool = on_by_default(
        when_off="do not split reduce-scatters and all-reduces with --tp-comm-overlap",
        needs=Need(lambda run: run.parallel.tp_comm_overlap, "nothing is cut into pieces", "add --tp-comm-overlap"),
    )
    tp_comm_bulk_dgrad: bool = on_by_default(
        when_off="in backward, gather a column-parallel layer's input before its input-gradient GEMM, not overlapped",
        needs=Need(lambda run: run.parallel.sequence_parallel, "nothing is gathered", "add --sequence-parallel"),
    )
    tp_comm_bulk_wgrad: bool = on_by_default(
        when_off="in backward, reduce a column-parallel layer's input gradient before its weight-gradient GEMM, not "
        "overlapped",
    )
    pipeline_model_parallel_size: int = flag(1, "processes that hold different layers (pp)", within=RANKS)
    pipeline_schedule: str | None = flag(
        None,
        "order of a pipeline's work, see docs/pipeline.md; default 1f1b, or interleaved with several virtual stages "
        "per rank",
        choices=tuple(SCHEDULES),
        needs=_PIPELINE,
    )
    num_layers_per_virtual_pipeline_stage: int | None = flag(
        None,
        "split each pipeline rank's layers into virtual stages of this many layers",
        within=LAYERS,
        needs=_PIPELINE,
    )
    num_virtual_stages_per_pipeline_rank: int | None = flag(
        None, "split each pipeline rank's layers into this many virtual stages", within=LAYERS, needs=_PIPELINE
    )
    microbatch_group_size_per_virtual_pipeline_stage: int | None = flag(
        None,
        "microbatches that a virtual stage processes before the next stage of its rank (interleaved); default pp",
        aliases=("--microbatch-group-size-per-vp-stage",),
        within=COUNT,
        needs=Need(
            lambda run: _PIPELINE.holds(run) and run.pipeline_settings().schedule.takes_groups,
            "the schedule is not interleaved",
            "give several virtual stages a pipeline rank",
        ),
    )
    pipeline_model_parallel_layout: str | None = flag(
        None,
        "the stages explicitly: E embedding, t layer, m further prediction, L loss, | ends a stage, (..)*n repeats, as in "
        "'Et*3|(tttt|)*6tttL'",
        metavar="LAYOUT",
        needs=_PIPELINE,
    )
    decoder_first_pipeline_num_layers: int | None = flag(
        None, "layers of the first pipeline rank", within=COUNT_OR_NONE, needs=_LAYERS_SHARED_OUT
    )
    decoder_last_pipeline_num_layers: int | None = flag(
        None, "layers of the last pipeline rank", within=COUNT_OR_NONE, needs=_LAYERS_SHARED_OUT
    )
    account_for_embedding_in_pipeline_split: bool = flag(
        False, "the embedding takes a layer's place when layers are shared between stages", needs=_LAYERS_SHARED_OUT
    )
    account_for_loss_in_pipeline_split: bool = flag(
        False, "head and loss take a layer's place when layers are shared between stages", needs=_LAYERS_SHARED_OUT
    )
    overlap_p2p_communication: bool = on_by_default(
        when_off="wait for each message between pipeline stages instead of overlapping it with compute", needs=_PIPELINE
    )
    overlap_moe_expert_parallel_comm: bool = flag(
        False,
        "run a forward together with the backward of another microbatch, so that each hides the other's exchanges of "
        "tokens between experts; more microbatches are in flight",
        needs=EXPERTS,
    )
    context_parallel_size: int = flag(1, "processes that share each sequence (cp)", within=RANKS)
    cp_comm_type: tuple[str, ...] = flag(
        ("p2p",),
        "how attention reaches the whole sequence, for all layers or one value per layer: keys and values pass round a "
        "ring (p2p), are gathered (all_gather), heads are exchanged for tokens (a2a), or a2a between neighbours and "
        "rings between those (a2a+p2p)",
        choices=("p2p", "all_gather", "allgather", "a2a", "a2a+p2p"),
        nargs="+",
        metavar="TYPE",
        needs=Need(
            lambda run: run.parallel.context_parallel_size > 1 or run.parallel.dynamic_context_parallel,
            "--context-parallel-size is 1",
            "raise it",
        ),
    )
    hierarchical_context_parallel_sizes: tuple[int, ...] | None = flag(
        None,
        "for a2a+p2p: number of neighbours that exchange heads, and of ranks in a ring; their product is cp",
        nargs="+",
        within=RANKS,
        needs=Need(
            lambda run: run.parallel.context_parallel_size > 1 and "a2a+p2p" in run.parallel.cp_comm_type,
            "no layer uses a2a+p2p",
            "give --cp-comm-type a2a+p2p",
        ),
    )
    dynamic_context_parallel: bool = flag(
        False,
        "share each long document between as many of the dp x cp processes as it needs, and pack short ones, so that "
        "all processes have equal work; --context-parallel-size is then that of evaluations",
    )
    max_seqlen_per_dp_cp_rank: int | None = flag(
        None, "most tokens of a microbatch on a process", within=SIZE, needs=_DYNAMIC
    )
    min_dynamic_context_parallel_size: int = flag(
        1, "fewest processes that share a sequence, a power of two", within=RANKS, needs=_DYNAMIC
    )
    expert_model_parallel_size: int = flag(
        1, "processes that share the experts (ep), of any that tp, cp and dp count", within=RANKS, needs=EXPERTS
    )
    expert_tensor_parallel_size: int | None = flag(
        None, "processes that share each expert (etp); default tp", within=RANKS, needs=EXPERTS
    )
    use_distributed_optimizer: bool = flag(
        False, "shard the optimizer's state over dp: reduce-scatter gradients, all-gather parameters (ZeRO-1)"
    )
    overlap_grad_reduce: bool = flag(False, "reduce a bucket of gradients as soon as backward has written it")
    overlap_param_gather: bool = flag(
        False, "overlap the all-gather of parameters with the update of others and the next forward", needs=_SHARDED
    )
    overlapped_distributed_optimizer: bool = flag(
        False, "the sharded optimizer with both overlaps and --grad-reduce-mode auto"
    )
    data_parallel_sharding_strategy: str | None = flag(
        None,
        "state that is sharded over dp ranks: none, the optimizer's state (ZeRO-1), gradients too (ZeRO-2), "
        "parameters too (ZeRO-3); default by the flags above",
        choices=("no_shard", "optim", "optim_grads", "optim_grads_params"),
    )
    grad_reduce_mode: str | None = flag(
        None,
        "reduce gradients once per step and keep the full fp32 gradient, or after every microbatch and keep only a "
        "shard; auto keeps it if memory allows; default auto with --overlapped-distributed-optimizer, else "
        "last-microbatch",
        choices=("auto", "last-microbatch", "every-microbatch"),
        needs=Need(
            lambda run: _SHARDED.holds(run) or run.parallel.grad_reduce_mode == "last-microbatch",
            "every rank keeps the whole gradient",
            "add --use-distributed-optimizer",
        ),
    )
    grad_reduce_in_bf16: bool = flag(False, "send gradients as bf16: half the traffic, less precise sums")
    num_distributed_optimizer_instances: int = flag(
        1,
        "shard inside each of this many groups of dp x cp ranks and all-reduce gradients between them",
        within=RANKS,
        needs=_SHARDED,
    )
    ddp_bucket_size: int | None = flag(
        None,
        "elements in a bucket, the unit of data-parallel communication; default max(40M, 1M x dp), and at most an "
        "eighth of the model",
        aliases=("--reduce-bucket-size",),
        within=COUNT,
    )
    device: str = flag(
        "auto",
        "where to run; auto takes CUDA when there is one; cuda:N is that device for all processes of a host, which "
        "NCCL allows only if each has its own NCCL_HOSTID",
        choices=DEVICES,
        metavar=DEVICES_SHOWN,
    )
    distributed_backend: str | None = flag(
        None, "collective library; default nccl on CUDA; always gloo on CPU", choices=("nccl", "gloo")
    )
    nccl_communicator_config_path: str | None = flag(
        None,
        "YAML file with options of NCCL's communicators by group, as {dp_cp: {max_ctas: 16}}: cga_cluster_size, "
        "min_ctas, max_ctas, net_name, is_high_priority_stream",
        metavar="FILE",
    )
    high_priority_stream_groups: tuple[str, ...] = flag(
        (),
        "groups, by Megatron-LM's names, whose NCCL kernels run on streams of high priority, in addition to those "
        "whose messages are overlapped with compute",
        choices=tuple(GROUPS),
        nargs="+",
        metavar="GROUP",
    )
    distributed_timeout_minutes: float = flag(
        10.0, "a collective that waits longer ends the job and names the missing ranks", within=MINUTES
    )
    calc_ft_timeouts: bool = flag(
        False,
        "end the job when a rank stays in a phase of a step for 15 times the longest recent stay, and at least 30 "
        "seconds; a hang is reported at a third of that in any case",
    )
    ft_num_warmup_iters: int = flag(
        5, "steps of a run, also of a continued one, that no limit of a phase follows from", within=COUNT
    )
    heartbeat_dir: str | None = flag(
        None, "folder for one small file per rank with its phase, rewritten every second; default SAVE/heartbeat"
    )
    elastic_world: bool = flag(
        False,
        "for torchrun --nnodes MIN:MAX: train with as many replicas as an attempt has processes for and "
        "--global-batch-size can be divided among, with a smaller micro batch where it must be, while other processes "
        "wait; see docs/launch.md",
    )
