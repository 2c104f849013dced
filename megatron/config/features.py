"""The start-up table: each parallel, kernel and numerics feature as asked for, as in effect, and if not why not."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.config.activation_offload_row import activation_offload_row, weight_offload_row
from megatron.config.context import attention_comm_types
from megatron.config.data_parallel import AUTO, EVERY, data_parallel_settings
from megatron.config.optimizer_offload import OFF, STATES, offload_settings, updates_on_cpu
from megatron.config.pipeline import pipeline_settings
from megatron.config.rules.needs import notes
from megatron.config.run import RunConfig
from megatron.schedule.simulate import Costs, simulate


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What set-up found out about this machine and the objects it built."""

    tp: int
    dp: int
    device: str  # device type: "cpu" or "cuda"
    backend: str | None  # "nccl" or "gloo"; None in a world of one process
    attention_choice: str  # "kernel (why this one)", as kernels.choose words it
    block_choice: str  # the same of blocks, under context parallelism
    fusion_missing: str | None  # why weight gradients are not accumulated inside the GEMM; None when they are
    upcast_products: bool  # the device is slow at products of the parameters' dtype, so they are taken in fp32
    separate_main_grads: bool  # the fp32 gradient buffer has another dtype than the parameters
    buckets: int  # gradient buckets of this rank
    shards: (
        int  # ranks that share the optimizer's state, and perhaps gradients and parameters; 1 when nothing is shared
    )
    tp_overlap: str  # how products and tensor-parallel communication are interleaved; "off" when they are not
    tp_overlap_why: str  # why not better; empty when it is the best there is, or was not asked for
    recomputed: str = ""  # what the layers of this rank recompute, where they differ
    far_chunks: tuple[int, int] = (0, 0)  # chunks of optimizer state that the CPU updates, and all


@dataclass(frozen=True)
class Feature:
    """One row of the table. `why` is empty when the run does what was asked for."""

    name: str
    asked: str
    in_effect: str
    why: str


def features(run: RunConfig, facts: Facts) -> list[Feature]:
    """The rows that exist in this version, in a fixed order. Pure: nothing is looked up or changed."""
    return [
        _backend(run, facts),
        _tensor_parallelism(facts),
        _sequence_parallelism(run, facts),
        _tensor_overlap(run, facts),
        _tensor_bulk_overlap(run, facts),
        _pipeline(run, facts),
        _pipeline_overlap(run),
        _context(run, facts),
        _optimizer_sharding(run, facts),
        _recompute(run, facts),
        _activation_offload(run, facts),
        _weight_offload(run, facts),
        _optimizer_offload(run, facts),
        _optimizer_state(run),
        _gradient_reduction(run, facts),
        _gradient_mode(run, facts),
        _parameter_gather(run, facts),
        _layers(run),
        _attention(run, facts),
        _attention_window(run),
        _products(run, facts),
        _gradient_fusion(run, facts),
        _main_gradients(run, facts),
        _dropout(run),
        _loss_scaling(run),
        _deterministic(run),
        *(Feature(note.flag, note.asked, note.here, note.why) for note in (*notes(run), *run.notes)),
    ]


def worth_a_line(rows: Sequence[Feature]) -> list[Feature]:
    """The rows of what was asked for or is in effect."""
    return [row for row in rows if (row.asked, row.in_effect) != ("off", "off")]


def format_table(rows: Sequence[Feature]) -> str:
    """Aligned plain text with a header line; no trailing newline."""
    cells = [("feature", "asked", "in effect", "why")]
    cells += [(row.name, row.asked, row.in_effect, row.why) for row in rows]
    widths = [max(len(line[column]) for line in cells) for column in range(4)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in cells]
    return "\n".join(lines)


def _backend(run: RunConfig, facts: Facts) -> Feature:
    name, asked = "communication backend", run.parallel.distributed_backend
    if facts.backend is None:
        return Feature(name, asked or "auto", "off", "one process")
    why = "" if asked in (None, facts.backend) else "no CUDA device"
    return Feature(name, asked or "auto", facts.backend, why)


def _tensor_parallelism(facts: Facts) -> Feature:
    asked = f"tp {facts.tp}" if facts.tp > 1 else "off"
    return Feature("tensor parallelism", asked, asked, "")


def _sequence_parallelism(run: RunConfig, facts: Facts) -> Feature:
    asked = run.parallel.sequence_parallel
    works = asked and facts.tp > 1
    return Feature("sequence parallelism", _on(asked), _on(works), "tp = 1" if asked and not works else "")


def _tensor_overlap(run: RunConfig, facts: Facts) -> Feature:
    """Products that need what travels."""
    name, parallel = "tensor-parallel overlap", run.parallel
    if not parallel.tp_comm_overlap:
        return Feature(name, "off", "off", "")
    # Without sequence parallelism nothing is gathered, and what is reduced stays whole.
    gather = parallel.tp_comm_overlap_ag and parallel.sequence_parallel
    reduction = "reduce-scatter" if parallel.sequence_parallel else "all-reduce"
    asked = " + ".join(["all-gather"] * gather + [reduction] * parallel.tp_comm_overlap_rs)
    if facts.tp_overlap == "off":
        return Feature(name, asked, "off", facts.tp_overlap_why)
    why = facts.tp_overlap_why
    if why:
        why += f"; no user buffers: --transformer-impl {run.model.transformer_impl}"
    return Feature(name, asked, f"{asked}: {facts.tp_overlap}", why)


def _tensor_bulk_overlap(run: RunConfig, facts: Facts) -> Feature:
    """Communication beside a product that has nothing to do with it."""
    name, parallel = "tensor-parallel bulk overlap", run.parallel
    asked = " + ".join(["dgrad"] * parallel.tp_comm_bulk_dgrad + ["wgrad"] * parallel.tp_comm_bulk_wgrad) or "off"
    if facts.tp == 1:
        return Feature(name, asked, "off", "tp = 1" if asked != "off" else "")
    if parallel.tp_comm_bulk_dgrad and not parallel.sequence_parallel:
        in_effect = "wgrad" if parallel.tp_comm_bulk_wgrad else "off"
        return Feature(name, asked, in_effect, "without --sequence-parallel nothing is gathered")
    return Feature(name, asked, asked, "")


def _pipeline(run: RunConfig, facts: Facts) -> Feature:
    """With the bubble of a step, were a layer's gradients as much work as its forward each."""
    name, p = "pipeline", run.parallel.pipeline_model_parallel_size
    if p == 1:
        return Feature(name, "off", "off", "")
    assert run.model.num_layers
    settings = pipeline_settings(run.parallel, run.model.num_layers)
    chunks = settings.placement.num_stages // p
    asked = f"pp {p}, {settings.schedule.name}" + (f", {chunks} stages a rank" if chunks > 1 else "")
    m = _microbatches(run, facts)
    timeline = simulate(settings.schedule_of(m), Costs.uniform(settings.placement.num_stages))
    bubble = max(timeline.bubble(rank) for rank in range(p))
    return Feature(name, asked, asked, f"bubble {bubble:.0%} with {m} microbatch{'es' if m > 1 else ''} a step")


def _microbatches(run: RunConfig, facts: Facts) -> int:
    """A step and data-parallel rank, when the batch has its full size."""
    assert run.train.micro_batch_size
    samples = run.train.final_global_batch_size or run.train.micro_batch_size * facts.dp
    return max(1, samples // (run.train.micro_batch_size * facts.dp))


def _pipeline_overlap(run: RunConfig) -> Feature:
    asked = run.parallel.overlap_p2p_communication
    if run.parallel.pipeline_model_parallel_size == 1:
        return Feature("pipeline messages beside compute", _on(asked), "off", "pp = 1")
    return Feature("pipeline messages beside compute", _on(asked), _on(asked), "")


def _context(run: RunConfig, facts: Facts) -> Feature:
    name, cp = "context parallelism", run.parallel.context_parallel_size
    if cp == 1:
        return Feature(name, "off", "off", "")
    assert run.model.num_layers
    types = attention_comm_types(run.parallel, run.model.num_layers)
    asked = f"cp {cp}, {', '.join(dict.fromkeys(types))}"
    kernel, _, why = facts.block_choice.partition(" (")
    if set(types) == {"a2a"}:
        return Feature(name, asked, asked, "")
    return Feature(name, asked, f"{asked}: {kernel}", why.removesuffix(")"))


def _recompute(run: RunConfig, facts: Facts) -> Feature:
    name, asked = "activation recompute", str(run.recompute)
    if asked != "off" and run.train.skip_train:
        return Feature(name, asked, "off", "evaluation only")
    if run.recompute.is_full and (largest := _largest_stage(run)) < (run.recompute.recompute_num_layers or 0):
        in_effect = str(dataclasses.replace(run.recompute, recompute_num_layers=largest))
        return Feature(name, asked, in_effect, f"the largest stage has {largest} layer{'s' if largest > 1 else ''}")
    return Feature(name, asked, facts.recomputed or asked, "layers on this rank" if facts.recomputed else "")


def _largest_stage(run: RunConfig) -> int:
    """Layers of the pipeline stage that has the most."""
    assert run.model.num_layers
    return max(len(stage.layers) for stage in pipeline_settings(run.parallel, run.model.num_layers).stages)


def _activation_offload(run: RunConfig, facts: Facts) -> Feature:
    return Feature("activation offload", *activation_offload_row(run, _microbatches(run, facts)))


def _weight_offload(run: RunConfig, facts: Facts) -> Feature:
    asked, in_effect, why = weight_offload_row(run)
    if asked != "off" and facts.device == "cpu" and not run.optimizer_offload.offload_dir:
        why = "the device is the CPU, and host memory its own"
    return Feature("weight offload", asked, in_effect, why)


_SHARED = {
    "no_shard": "off",
    "optim": "optimizer state (ZeRO-1)",
    "optim_grads": "optimizer state, gradients (ZeRO-2)",
    "optim_grads_params": "optimizer state, gradients, parameters (ZeRO-3)",
}


def _optimizer_sharding(run: RunConfig, facts: Facts) -> Feature:
    asked = _SHARED[data_parallel_settings(run.parallel).shards]
    if asked == "off" or facts.shards > 1:
        return Feature("data-parallel sharding", asked, asked, f"over {facts.shards} ranks" if asked != "off" else "")
    return Feature("data-parallel sharding", asked, "off", f"dp = {facts.dp}: one rank an instance")


def _optimizer_offload(run: RunConfig, facts: Facts) -> Feature:
    name, settings = "optimizer offload", offload_settings(run.optimizer, run.optimizer_offload)
    memory = f"files in {settings.directory}" if settings.directory else "host memory"
    same = "the device is the CPU, and host memory its own" if facts.device == "cpu" and not settings.directory else ""
    if settings.mode == STATES:
        return Feature(name, "states", f"states wait in {memory}", same)
    if settings.mode == OFF:
        is_none = updates_on_cpu(run.optimizer, run.optimizer_offload)
        return Feature(name, "fraction 0" if is_none else "off", "off", "")
    asked = "auto" if settings.is_auto else f"static {settings.far:g}"
    far, chunks = facts.far_chunks
    in_effect = f"{asked}: {far} of {chunks} chunks in {memory}" + (" at first" if settings.is_auto else "")
    if not settings.overlap:
        return Feature(name, asked, in_effect, same)
    data_parallel = data_parallel_settings(run.parallel)
    late = []
    if not data_parallel.overlap_reduce and _replicas(run, facts) > 1:
        late.append("backward hides nothing: gradients are reduced after it")
    if not data_parallel.overlap_gather and facts.shards > 1:
        late.append("the next forward hides nothing: parameters are gathered before it")
    why = "; ".join([*late, *([same] if same else [])])
    return Feature(name, f"{asked}, overlapped", f"{in_effect}, overlapped", why)


def _optimizer_state(run: RunConfig) -> Feature:
    o = run.optimizer
    stored = {"exp_avg": o.exp_avg_dtype, "exp_avg_sq": o.exp_avg_sq_dtype, "masters": o.main_params_dtype}
    low = ", ".join(f"{name} {dtype}" for name, dtype in stored.items() if dtype != "fp32")
    return Feature("optimizer state", low or "fp32", low or "fp32", "")


def _replicas(run: RunConfig, facts: Facts) -> int:
    """Ranks whose gradients of a parameter are added up."""
    return facts.dp * run.parallel.context_parallel_size


def _gradient_reduction(run: RunConfig, facts: Facts) -> Feature:
    name, settings = "gradient reduction", data_parallel_settings(run.parallel)
    asked = "overlapped" if settings.overlap_reduce else "after backward"
    if _replicas(run, facts) == 1:
        return Feature(name, asked, "off", "dp = 1")
    op = "all-reduce" if facts.shards == 1 else "reduce-scatter"
    if 1 < facts.shards < _replicas(run, facts):
        op += " + all-reduce between instances"
    plural = "" if facts.buckets == 1 else "s"
    dtype = ", bf16 on the wire" if settings.reduce_in_bf16 else ""
    return Feature(name, asked, f"{asked}: {op}, {facts.buckets} bucket{plural}, {facts.backend}{dtype}", "")


def _gradient_mode(run: RunConfig, facts: Facts) -> Feature:
    mode = data_parallel_settings(run.parallel).mode
    if _replicas(run, facts) == 1:
        return Feature("gradients reduced", mode, "off", "dp = 1")
    if mode == AUTO:
        return Feature("gradients reduced", mode, f"{EVERY} at first", "decided after the first steps, and logged")
    return Feature("gradients reduced", mode, mode, "")


def _parameter_gather(run: RunConfig, facts: Facts) -> Feature:
    settings = data_parallel_settings(run.parallel)
    if settings.shards == "no_shard":
        return Feature("parameter gather", "off", "off", "")
    asked = "overlapped" if settings.overlap_gather else "after the update"
    if facts.shards == 1:
        return Feature("parameter gather", asked, "off", "nothing is shared")
    return Feature("parameter gather", asked, asked, "")


def _layers(run: RunConfig) -> Feature:
    asked = run.model.transformer_impl
    why = "the same mathematics; Transformer Engine's layers are not available yet" if asked != "local" else ""
    return Feature("layers", asked, "local", why)


def _attention(run: RunConfig, facts: Facts) -> Feature:
    kernel, _, why = facts.attention_choice.partition(" (")
    return Feature("attention kernel", run.model.attention_backend, kernel, why.removesuffix(")"))


def _attention_window(run: RunConfig) -> Feature:
    name, windows, longest = "attention window", run.model.windows, run.data.seq_length
    limited = [window for window in windows if window is not None]
    if not limited:
        return Feature(name, "off", "off", "")
    asked = f"{limited[0]} tokens, {len(limited)} of {len(windows)} layers"
    if longest is not None and longest <= limited[0]:
        return Feature(name, asked, "off", f"a sample of {longest} tokens fits in it")
    return Feature(name, asked, asked, "")


def _products(run: RunConfig, facts: Facts) -> Feature:
    dtype = run.model.dtype_name
    if facts.upcast_products:
        return Feature("matrix products", dtype, "float32", f"this {facts.device.upper()} has no fast {dtype} products")
    return Feature("matrix products", dtype, dtype, "")


def _gradient_fusion(run: RunConfig, facts: Facts) -> Feature:
    asked = run.model.gradient_accumulation_fusion
    works = facts.fusion_missing is None
    return Feature("gradient accumulation fusion", _on(asked), _on(works), facts.fusion_missing or "" if asked else "")


def _main_gradients(run: RunConfig, facts: Facts) -> Feature:
    if facts.separate_main_grads:
        return Feature("fp32 main gradients", "auto", "on", f"parameters are {run.model.dtype_name}")
    return Feature("fp32 main gradients", "auto", "off", "parameters are fp32 themselves")


def _dropout(run: RunConfig) -> Feature:
    rates = run.model.attention_dropout, run.model.hidden_dropout
    asked = "attention {:g}, hidden {:g}".format(*rates) if any(rates) else "off"
    if run.train.skip_train and any(rates):
        return Feature("dropout", asked, "off", "evaluation only")
    return Feature("dropout", asked, asked, "")


def _loss_scaling(run: RunConfig) -> Feature:
    if not run.model.fp16:
        return Feature("loss scaling", "auto", "off", f"{run.model.dtype_name} needs none")
    fixed = run.optimizer.loss_scale
    if fixed is not None:
        return Feature("loss scaling", f"fixed {fixed:g}", f"fixed {fixed:g}", "")
    return Feature("loss scaling", "auto", f"dynamic from {run.optimizer.initial_loss_scale:g}", "float16")


def _deterministic(run: RunConfig) -> Feature:
    asked = _on(run.train.deterministic_mode)
    return Feature("deterministic mode", asked, asked, "")


def _on(state: bool) -> str:
    return "on" if state else "off"
