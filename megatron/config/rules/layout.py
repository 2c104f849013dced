"""Rules about the layout of a model over processes."""

from __future__ import annotations

from functools import partial

from megatron.base.errors import ConfigError
from megatron.config.communicators import communicator_settings
from megatron.config.context_parallel import attention_comm_types, copies_of_keys, inner_size
from megatron.config.data import DataConfig
from megatron.config.mesh import mesh_of
from megatron.config.model import ModelConfig
from megatron.config.parallel import ParallelConfig
from megatron.config.pipeline import pipeline_settings
from megatron.config.rules.rule import ConfigRule
from megatron.config.rules.sources import shape_is_pending
from megatron.config.run import RunConfig


def world_is_divisible(parallel: ParallelConfig, world_size: int) -> str | None:
    """The processes fill a whole number of replicas, of the dense layers and of the experts."""
    try:
        mesh_of(parallel, world_size)
    except ConfigError as error:
        tp, ep = parallel.tensor_model_parallel_size, parallel.expert_model_parallel_size
        dense = tp * parallel.context_parallel_size * parallel.pipeline_model_parallel_size
        if world_size % dense == 0 and parallel.expert_tensor_parallel_size is None and tp > 1 and ep > 1:
            return f"{error} (etp is tp without --expert-tensor-parallel-size)"
        return str(error)
    return None


def backend_fits_device(parallel: ParallelConfig) -> str | None:
    """NCCL only supports CUDA memory. If --device auto finds none, gloo replaces it, and the table reports it."""
    if parallel.distributed_backend == "nccl" and parallel.device == "cpu":
        return "--distributed-backend nccl cannot run on --device cpu; use gloo"
    return None


def communicators_are_known(parallel: ParallelConfig) -> str | None:
    """The file of NCCL's options names groups and options that exist."""
    try:
        communicator_settings(parallel)
    except ConfigError as error:
        return str(error)
    return None


def tp_divides_layers(model: ModelConfig, parallel: ParallelConfig) -> str | None:
    """Each tensor-parallel rank holds whole heads, whole key/value heads and an equal part of the MLP."""
    assert model.num_attention_heads
    tp = parallel.tensor_model_parallel_size
    sizes = {"--num-attention-heads": model.num_attention_heads}
    if not all(model.moe_layers):
        sizes["--ffn-hidden-size"] = model.ffn_dim
    for name, size in sizes.items():
        if size % tp:
            return f"{name} {size} is not a multiple of --tensor-model-parallel-size {tp}; change one of them"
    if model.num_kv_heads % tp and tp % model.num_kv_heads:
        return (
            f"--tensor-model-parallel-size {tp} neither divides the {model.num_kv_heads} key/value heads "
            "(--num-query-groups) nor is a multiple of them; change one of them"
        )
    return None


def sequence_parallel_divides_sequence(data: DataConfig, parallel: ParallelConfig) -> str | None:
    """Sequence parallelism divides the sequence into tp equal parts; context parallelism pads it first."""
    seq, tp = data.seq_length, parallel.tensor_model_parallel_size
    assert seq
    if parallel.sequence_parallel and parallel.context_parallel_size == 1 and seq % tp:
        return (
            f"--sequence-parallel needs --seq-length {seq} to be a multiple of --tensor-model-parallel-size {tp}; "
            "change one of them or remove --sequence-parallel"
        )
    return None


def layers_fill_the_pipeline(parallel: ParallelConfig, model: ModelConfig) -> str | None:
    """Schedule and stages fit each other and the layers."""
    assert model.num_layers
    try:
        pipeline_settings(parallel, model.num_layers)
    except ConfigError as error:
        return str(error)
    return None


def heads_fit_context_parallelism(parallel: ParallelConfig, model: ModelConfig) -> str | None:
    """Each layer's attention reaches the whole sequence, and the heads that it exchanges can be divided."""
    if parallel.context_parallel_size == 1:
        return None
    assert model.num_layers and model.num_attention_heads
    try:
        types, inner = set(attention_comm_types(parallel, model.num_layers)), inner_size(parallel)
        tp = parallel.tensor_model_parallel_size
        heads = model.num_attention_heads // tp, max(1, model.num_kv_heads // tp)  # of a tensor-parallel rank
        if "a2a" in types:
            copies_of_keys(*heads, parallel.context_parallel_size)
        if "a2a+p2p" in types:
            copies_of_keys(*heads, inner)
    except ConfigError as error:
        return str(error)
    if "a2a+p2p" in types and parallel.hierarchical_context_parallel_sizes is None:
        return "--cp-comm-type a2a+p2p needs to know its two sizes; give --hierarchical-context-parallel-sizes"
    return None


def tp_divides_vocabulary(model: ModelConfig, parallel: ParallelConfig) -> str | None:
    """Each tensor-parallel rank holds equally many rows of the embedding. Skipped while the vocabulary is unknown."""
    if model.vocab_size is None:
        return None
    rows, tp = model.padded_vocab_size, parallel.tensor_model_parallel_size
    if rows % tp and model.fixed_padded_vocab_size is not None:
        return (
            f"--padded-vocab-size {rows} is not a multiple of --tensor-model-parallel-size {tp}; give "
            f"--padded-vocab-size {-(-rows // tp) * tp}"
        )
    if rows % tp:
        step = model.make_vocab_size_divisible_by
        return (
            f"padded vocabulary {rows} is not a multiple of --tensor-model-parallel-size {tp}; give "
            f"--make-vocab-size-divisible-by {step * tp}"
        )
    return None


def rules(run: RunConfig, world_size: int) -> list[ConfigRule]:
    """Returns the rules about the layout: those about parts of the model only once its shape is known."""
    model, parallel = run.model, run.parallel
    processes = [
        partial(world_is_divisible, parallel, world_size),
        partial(backend_fits_device, parallel),
        partial(communicators_are_known, parallel),
    ]
    if shape_is_pending(model, run.checkpoint):
        return processes
    return [
        *processes,
        partial(tp_divides_layers, model, parallel),
        partial(sequence_parallel_divides_sequence, run.data, parallel),
        partial(layers_fill_the_pipeline, parallel, model),
        partial(heads_fit_context_parallelism, parallel, model),
        partial(tp_divides_vocabulary, model, parallel),
    ]
