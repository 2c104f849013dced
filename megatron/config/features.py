"""The start-up table: each parallel, kernel and numerics feature as requested and as in effect, with the reason."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.base.cuda_environment import ALLOCATOR
from megatron.base.mesh import Mesh
from megatron.config.activation_offload import ActivationOffloadConfig
from megatron.config.data_parallel import AUTO, EVERY, DataParallelSettings
from megatron.config.feature import Feature
from megatron.config.features_moe import moe_features
from megatron.config.model import ModelConfig
from megatron.config.optimizer import OptimizerConfig
from megatron.config.optimizer_offload import OFF, STATES, updates_on_cpu
from megatron.config.parallel import ParallelConfig
from megatron.config.pipeline import PipelineSettings
from megatron.config.recompute import NORM, RECOMPUTE_MODULES, RecomputeConfig
from megatron.config.rules.needs import notes
from megatron.config.run import RunConfig
from megatron.config.settings import RunSettings
from megatron.config.train import TrainConfig
from megatron.schedule.offload_pass import moved_groups
from megatron.schedule.simulate import Costs, simulate

_LAYERS_THAT_STAY = 2  # of a stage, where layers are offloaded one by one


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Facts about this machine and the objects that set-up has built."""

    device: str  # device type: "cpu" or "cuda"
    backend: str | None  # "nccl" or "gloo"; None in a world of one process
    attention_choice: str  # "kernel (why this one)", as kernels.choose words it
    block_choice: str  # the same of blocks, under context parallelism
    fusion_missing: str | None  # why weight gradients are not accumulated inside the GEMM; None when they are
    grouped_missing: str | None  # why the experts' products are not one grouped product; None when they are
    upcast_products: bool  # the device is slow at products of the parameters' dtype, so they are taken in fp32
    separate_main_grads: bool  # the fp32 gradient buffer has another dtype than the parameters
    buckets: int  # gradient buckets of this rank
    shards: (
        int  # ranks that share the optimizer's state, and perhaps gradients and parameters; 1 when nothing is shared
    )
    tp_overlap: str  # how products and tensor-parallel communication are interleaved; "off" when they are not
    tp_overlap_why: str  # why not better; empty when it is the best there is, or was not asked for
    recomputed: str = ""  # the recompute of this rank's layers, if they differ
    cpu_chunks: tuple[int, int] = (0, 0)  # chunks of optimizer state that the CPU updates, and all
    allocator: str = ""  # settings of torch's allocator on CUDA, from the environment; "" without CUDA
    deterministic: str = ""  # environment variables of --deterministic-mode on CUDA, with their values


def features(run: RunConfig, settings: RunSettings, facts: Facts) -> list[Feature]:
    """Returns all rows in a fixed order. Pure: nothing is looked up or changed."""
    model, parallel, trains = run.model, run.parallel, not run.train.skip_train
    cp, mesh, data_parallel = parallel.context_parallel_size, settings.mesh, settings.data_parallel
    replicas = mesh.dp * cp
    return [
        _backend(parallel.distributed_backend, facts),
        _tensor_parallelism(mesh),
        _sequence_parallelism(parallel.sequence_parallel, settings.sequence_parallel),
        _tensor_overlap(parallel, model.transformer_impl, facts),
        _tensor_bulk_overlap(parallel, mesh),
        _pipeline(settings),
        _pipeline_overlap(parallel),
        _context(cp, settings.attention_comm_types, facts),
        *moe_features(model, run.moe, mesh, trains=trains),
        _optimizer_sharding(data_parallel, mesh, facts),
        _recompute(run.recompute, model, settings.pipeline, facts, trains=trains),
        _activation_offload(run.activation_offload, settings),
        _weight_offload(run.activation_offload, run.optimizer_offload.offload_dir, facts),
        _optimizer_offload(settings, replicas, facts, on_cpu=updates_on_cpu(run.optimizer, run.optimizer_offload)),
        _optimizer_state(run.optimizer),
        _gradient_reduction(data_parallel, replicas, facts),
        _gradient_mode(data_parallel, replicas),
        _parameter_gather(data_parallel, facts),
        _layers(model),
        _attention(model, facts),
        _attention_window(model, run.data.seq_length),
        _longrope(model, run.data.seq_length),
        _products(model, facts),
        _expert_products(model, facts),
        _gradient_fusion(model, facts),
        _main_gradients(model, facts),
        _dropout(model, trains=trains),
        _loss_scaling(model, run.optimizer),
        _allocator(facts),
        _deterministic(run.train, facts),
        *(Feature(note.flag, note.asked, note.here, note.why) for note in (*notes(run), *run.notes)),
    ]


def worth_a_line(rows: Sequence[Feature]) -> list[Feature]:
    """Returns the rows of features that are requested or in effect."""
    return [row for row in rows if (row.asked, row.in_effect) != ("off", "off")]


def format_table(rows: Sequence[Feature]) -> str:
    """Aligned plain text with a header line; no trailing newline."""
    cells = [("feature", "asked", "in effect", "why")]
    cells += [(row.name, row.asked, row.in_effect, row.why) for row in rows]
    widths = [max(len(line[column]) for line in cells) for column in range(4)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in cells]
    return "\n".join(lines)


def _backend(asked: str | None, facts: Facts) -> Feature:
    name = "communication backend"
    if facts.backend is None:
        return Feature(name, asked or "auto", "off", "one process")
    why = "" if asked in (None, facts.backend) else "no CUDA device"
    return Feature(name, asked or "auto", facts.backend, why)


def _tensor_parallelism(mesh: Mesh) -> Feature:
    asked = f"tp {mesh.tp}" if mesh.tp > 1 else "off"
    return Feature("tensor parallelism", asked, asked, "")


def _sequence_parallelism(asked: bool, in_effect: bool) -> Feature:
    return Feature("sequence parallelism", _on(asked), _on(in_effect), "tp = 1" if asked and not in_effect else "")


def _tensor_overlap(parallel: ParallelConfig, transformer_impl: str, facts: Facts) -> Feature:
    """GEMMs that need the data that is communicated."""
    name = "tensor-parallel overlap"
    if not parallel.tp_comm_overlap:
        return Feature(name, "off", "off", "")
    # Without sequence parallelism nothing is gathered, and the reduced tensor is not sharded.
    gather = parallel.tp_comm_overlap_ag and parallel.sequence_parallel
    reduction = "reduce-scatter" if parallel.sequence_parallel else "all-reduce"
    asked = " + ".join(["all-gather"] * gather + [reduction] * parallel.tp_comm_overlap_rs)
    if facts.tp_overlap == "off":
        return Feature(name, asked, "off", facts.tp_overlap_why)
    why = facts.tp_overlap_why
    if why:
        why += f"; no user buffers: --transformer-impl {transformer_impl}"
    return Feature(name, asked, f"{asked}: {facts.tp_overlap}", why)


def _tensor_bulk_overlap(parallel: ParallelConfig, mesh: Mesh) -> Feature:
    """Communication overlapped with a GEMM that does not need its data."""
    name = "tensor-parallel bulk overlap"
    asked = " + ".join(["dgrad"] * parallel.tp_comm_bulk_dgrad + ["wgrad"] * parallel.tp_comm_bulk_wgrad) or "off"
    if mesh.tp == 1:
        return Feature(name, asked, "off", "tp = 1" if asked != "off" else "")
    if parallel.tp_comm_bulk_dgrad and not parallel.sequence_parallel:
        in_effect = "wgrad" if parallel.tp_comm_bulk_wgrad else "off"
        return Feature(name, asked, in_effect, "without --sequence-parallel nothing is gathered")
    return Feature(name, asked, asked, "")


def _pipeline(settings: RunSettings) -> Feature:
    """Returns the row with the bubble of a step, assuming that each gradient takes as long as the forward."""
    name, pipeline, p = "pipeline", settings.pipeline, settings.mesh.pp
    if p == 1:
        return Feature(name, "off", "off", "")
    chunks = pipeline.placement.num_stages // p
    asked = f"pp {p}, {pipeline.schedule.name}" + (f", {chunks} stages per rank" if chunks > 1 else "")
    m = settings.batches.final_num_microbatches
    timeline = simulate(pipeline.schedule_of(m), Costs.uniform(pipeline.placement.num_stages))
    bubble = max(timeline.bubble(rank) for rank in range(p))
    return Feature(name, asked, asked, f"bubble {bubble:.0%} with {m} microbatch{'es' if m > 1 else ''} per step")


def _pipeline_overlap(parallel: ParallelConfig) -> Feature:
    asked = parallel.overlap_p2p_communication
    if parallel.pipeline_model_parallel_size == 1:
        return Feature("pipeline communication overlap", _on(asked), "off", "pp = 1")
    return Feature("pipeline communication overlap", _on(asked), _on(asked), "")


def _context(cp: int, types: tuple[str, ...], facts: Facts) -> Feature:
    name = "context parallelism"
    if cp == 1:
        return Feature(name, "off", "off", "")
    asked = f"cp {cp}, {', '.join(dict.fromkeys(types))}"
    kernel, _, why = facts.block_choice.partition(" (")
    if set(types) == {"a2a"}:
        return Feature(name, asked, asked, "")
    return Feature(name, asked, f"{asked}: {kernel}", why.removesuffix(")"))


def _recompute(
    recompute: RecomputeConfig, model: ModelConfig, pipeline: PipelineSettings, facts: Facts, *, trains: bool
) -> Feature:
    name, asked = "activation recompute", str(recompute)
    if asked != "off" and not trains:
        return Feature(name, asked, "off", "evaluation only")
    largest = _largest_stage(pipeline)
    if recompute.is_full and largest < (recompute.recompute_num_layers or 0):
        in_effect = str(dataclasses.replace(recompute, recompute_num_layers=largest))
        return Feature(name, asked, in_effect, f"the largest stage has {largest} layer{'s' if largest > 1 else ''}")
    if not model.pre_norm and NORM in recompute.modules and not recompute.is_full:
        others = " ".join(part for part in RECOMPUTE_MODULES if part in recompute.modules - {NORM})
        return Feature(name, asked, others or "off", "--no-pre-norm: no norm stands before a linear layer")
    if NORM in recompute.modules and any(model.moe_layers):
        return Feature(name, asked, asked, "layers with experts keep the output of the norm before them")
    return Feature(name, asked, facts.recomputed or asked, "layers on this rank" if facts.recomputed else "")


def _largest_stage(pipeline: PipelineSettings) -> int:
    """Returns the number of layers of the largest pipeline stage."""
    return max(len(stage.layers) for stage in pipeline.stages)


def _activation_offload(offload: ActivationOffloadConfig, settings: RunSettings) -> Feature:
    name = "activation offload"
    if offload.kind is None:
        return Feature(name, "off", "off", "")
    if offload.kind == "layers":
        asked = f"first {offload.cpu_offloading_num_layers} layers of a stage"
        return Feature(name, asked, asked, "")
    if offload.kind == "modules":
        asked = " ".join(offload.offload_modules or ())
        return Feature(name, asked, asked, f"in all layers but a stage's last {_LAYERS_THAT_STAY}")
    asked = "auto" if offload.ratio is None else f"{offload.ratio:g} of the bytes"
    where, why = _where_a_ratio_works(settings)
    if where and offload.ratio is None:
        return Feature(name, asked, "off at first", f"decided after the second step, and logged; {where}")
    return Feature(name, asked, f"{asked}: {where}" if where else "off", why)


def _where_a_ratio_works(settings: RunSettings) -> tuple[str, str]:
    """What the ranks of the pipeline offload, or "" and why they offload nothing."""
    pipeline, most = settings.pipeline, _largest_stage(settings.pipeline)
    schedule = pipeline.schedule_of(settings.batches.final_num_microbatches, offload=True)
    ranks, whole = len(schedule.actions), sum(bool(moved_groups(actions)) for actions in schedule.actions)
    if not whole and most <= _LAYERS_THAT_STAY:
        return "", f"a stage has {most} layers, which its backward needs at once"
    by_layer = f"all but the last {_LAYERS_THAT_STAY} of a stage, one by one"
    if not whole:
        return f"layers, {by_layer}", ""
    here = "" if whole == ranks else f" on {whole} of {ranks} ranks"
    rest = f"; where a backward follows sooner layers, {by_layer}" if most > _LAYERS_THAT_STAY else ""
    return f"whole microbatches{here}{rest}", ""


def _weight_offload(offload: ActivationOffloadConfig, directory: str | None, facts: Facts) -> Feature:
    name, count = "weight offload", offload.offloaded_weight_layers
    if not count:
        return Feature(name, "off", "off", "")
    asked = f"first {count} layer{'s' if count > 1 else ''} of a stage"
    where = f"files in {directory}" if directory else "host memory"
    same = "the device is the CPU, and host memory its own" if facts.device == "cpu" and not directory else ""
    return Feature(name, asked, f"{asked}: in {where}", same)


_SHARED = {
    "no_shard": "off",
    "optim": "optimizer state (ZeRO-1)",
    "optim_grads": "optimizer state, gradients (ZeRO-2)",
    "optim_grads_params": "optimizer state, gradients, parameters (ZeRO-3)",
}


def _optimizer_sharding(settings: DataParallelSettings, mesh: Mesh, facts: Facts) -> Feature:
    asked = _SHARED[settings.shards]
    if asked == "off" or facts.shards > 1:
        return Feature("data-parallel sharding", asked, asked, f"over {facts.shards} ranks" if asked != "off" else "")
    return Feature("data-parallel sharding", asked, "off", f"dp = {mesh.dp}: one rank per instance")


def _optimizer_offload(settings: RunSettings, replicas: int, facts: Facts, *, on_cpu: bool) -> Feature:
    """on_cpu: the flags ask for updates on the CPU, if only of a fraction of 0."""
    name, offload, data_parallel = "optimizer offload", settings.optimizer_offload, settings.data_parallel
    memory = f"files in {offload.directory}" if offload.directory else "host memory"
    same = "the device is the CPU, and host memory its own" if facts.device == "cpu" and not offload.directory else ""
    if offload.mode == STATES:
        return Feature(name, "states", f"states in {memory}", same)
    if offload.mode == OFF:
        return Feature(name, "fraction 0" if on_cpu else "off", "off", "")
    asked = "auto" if offload.is_auto else f"static {offload.fraction:g}"
    number, chunks = facts.cpu_chunks
    in_effect = f"{asked}: {number} of {chunks} chunks in {memory}" + (" at first" if offload.is_auto else "")
    if not offload.overlap:
        return Feature(name, asked, in_effect, same)
    late = []
    if not data_parallel.overlap_reduce and replicas > 1:
        late.append("nothing is overlapped with backward: gradients are reduced after it")
    if not data_parallel.overlap_gather and facts.shards > 1:
        late.append("nothing is overlapped with the next forward: parameters are gathered before it")
    why = "; ".join([*late, *([same] if same else [])])
    return Feature(name, f"{asked}, overlapped", f"{in_effect}, overlapped", why)


def _optimizer_state(o: OptimizerConfig) -> Feature:
    stored = {"exp_avg": o.exp_avg_dtype, "exp_avg_sq": o.exp_avg_sq_dtype, "masters": o.main_params_dtype}
    low = ", ".join(f"{name} {dtype}" for name, dtype in stored.items() if dtype != "fp32")
    return Feature("optimizer state", low or "fp32", low or "fp32", "")


def _gradient_reduction(settings: DataParallelSettings, replicas: int, facts: Facts) -> Feature:
    """replicas: ranks whose gradients of a parameter are added up."""
    name = "gradient reduction"
    asked = "overlapped" if settings.overlap_reduce else "after backward"
    if replicas == 1:
        return Feature(name, asked, "off", "dp = 1")
    op = "all-reduce" if facts.shards == 1 else "reduce-scatter"
    if 1 < facts.shards < replicas:
        op += " + all-reduce between instances"
    plural = "" if facts.buckets == 1 else "s"
    dtype = ", bf16 on the wire" if settings.reduce_in_bf16 else ""
    return Feature(name, asked, f"{asked}: {op}, {facts.buckets} bucket{plural}, {facts.backend}{dtype}", "")


def _gradient_mode(settings: DataParallelSettings, replicas: int) -> Feature:
    mode = settings.mode
    if replicas == 1:
        return Feature("gradients reduced", mode, "off", "dp = 1")
    if mode == AUTO:
        return Feature("gradients reduced", mode, f"{EVERY} at first", "decided after the first steps, and logged")
    return Feature("gradients reduced", mode, mode, "")


def _parameter_gather(settings: DataParallelSettings, facts: Facts) -> Feature:
    if settings.shards == "no_shard":
        return Feature("parameter gather", "off", "off", "")
    asked = "overlapped" if settings.overlap_gather else "after the update"
    if facts.shards == 1:
        return Feature("parameter gather", asked, "off", "nothing is shared")
    return Feature("parameter gather", asked, asked, "")


def _layers(model: ModelConfig) -> Feature:
    asked = model.transformer_impl
    why = "the same mathematics; Transformer Engine's layers are not available yet" if asked != "local" else ""
    return Feature("layers", asked, "local", why)


def _attention(model: ModelConfig, facts: Facts) -> Feature:
    kernel, _, why = facts.attention_choice.partition(" (")
    return Feature("attention kernel", model.attention_backend, kernel, why.removesuffix(")"))


def _longrope(model: ModelConfig, length: int | None) -> Feature:
    name, original = "LongRoPE factors", model.rope_scaling_original_max_position_embeddings
    if model.position_embedding_type != "longrope" or length is None:
        return Feature(name, "off", "off", "")
    asked = f"short up to {original} tokens, long above"
    return Feature(name, asked, "long" if length > original else "short", f"samples have {length} tokens")


def _attention_window(model: ModelConfig, longest: int | None) -> Feature:
    name, windows = "attention window", model.windows
    limited = [window for window in windows if window is not None]
    if not limited:
        return Feature(name, "off", "off", "")
    asked = f"{limited[0]} tokens, {len(limited)} of {len(windows)} layers"
    if longest is not None and longest <= limited[0]:
        return Feature(name, asked, "off", f"a sample of {longest} tokens fits in it")
    return Feature(name, asked, asked, "")


def _products(model: ModelConfig, facts: Facts) -> Feature:
    dtype = model.dtype_name
    if facts.upcast_products:
        return Feature("matrix products", dtype, "float32", f"this {facts.device.upper()} has no fast {dtype} products")
    return Feature("matrix products", dtype, dtype, "")


def _expert_products(model: ModelConfig, facts: Facts) -> Feature:
    name, missing = "products of experts", facts.grouped_missing
    if model.num_experts is None:
        return Feature(name, "off", "off", "")
    return Feature(name, "grouped", "grouped" if missing is None else "one per expert", missing or "")


def _gradient_fusion(model: ModelConfig, facts: Facts) -> Feature:
    asked = model.gradient_accumulation_fusion
    works = facts.fusion_missing is None
    return Feature("gradient accumulation fusion", _on(asked), _on(works), facts.fusion_missing or "" if asked else "")


def _main_gradients(model: ModelConfig, facts: Facts) -> Feature:
    if facts.separate_main_grads:
        return Feature("fp32 main gradients", "auto", "on", f"parameters are {model.dtype_name}")
    return Feature("fp32 main gradients", "auto", "off", "parameters are fp32 themselves")


def _dropout(model: ModelConfig, *, trains: bool) -> Feature:
    rates = model.attention_dropout, model.hidden_dropout
    asked = "attention {:g}, hidden {:g}".format(*rates) if any(rates) else "off"
    if not trains and any(rates):
        return Feature("dropout", asked, "off", "evaluation only")
    return Feature("dropout", asked, asked, "")


def _loss_scaling(model: ModelConfig, optimizer: OptimizerConfig) -> Feature:
    if not model.fp16:
        return Feature("loss scaling", "auto", "off", f"{model.dtype_name} needs none")
    fixed = optimizer.loss_scale
    if fixed is not None:
        return Feature("loss scaling", f"fixed {fixed:g}", f"fixed {fixed:g}", "")
    return Feature("loss scaling", "auto", f"dynamic from {optimizer.initial_loss_scale:g}", "float16")


def _allocator(facts: Facts) -> Feature:
    name = "CUDA memory allocator"
    if not facts.allocator:
        return Feature(name, "off", "off", "")
    if facts.allocator == ALLOCATOR:
        return Feature(name, "auto", ALLOCATOR, "memory freed by one tensor serves those of any size")
    return Feature(name, facts.allocator, facts.allocator, "set in the environment")


def _deterministic(train: TrainConfig, facts: Facts) -> Feature:
    asked = _on(train.deterministic_mode)
    return Feature("deterministic mode", asked, asked, facts.deterministic if train.deterministic_mode else "")


def _on(state: bool) -> str:
    return "on" if state else "off"
