"""Rules about the model's shape and numerics, and its layout over processes."""

from __future__ import annotations

import dataclasses
from functools import partial

from megatron.base.errors import ConfigError
from megatron.config.checkpoint import CheckpointConfig
from megatron.config.context_parallel import attention_comm_types, copies_of_keys, inner_size
from megatron.config.data import DataConfig
from megatron.config.layer_pattern import every_layer
from megatron.config.mesh import mesh_of
from megatron.config.model import PADDING_FIELDS, RUNTIME_FIELDS, ModelConfig
from megatron.config.parallel import ParallelConfig
from megatron.config.pipeline import pipeline_settings
from megatron.config.rules.rule import ConfigRule
from megatron.config.run import RunConfig, flag_name
from megatron.config.train import TrainConfig
from megatron.config.window import attention_windows


def shape_is_pending(model: ModelConfig, checkpoint: CheckpointConfig) -> bool:
    """Returns whether rules about the shape must wait: the checkpoint of --use-checkpoint-args has not been read yet."""
    return checkpoint.use_checkpoint_args and model.num_layers is None


def one_source_of_shape(checkpoint: CheckpointConfig, given: frozenset[str]) -> str | None:
    """The shape comes from the checkpoint or from a Hugging Face model; flags in addition to the latter would be
    ignored.

    With --use-checkpoint-args Megatron-LM ignores such flags, too: rules/needs.py makes notes of them.
    """
    if checkpoint.use_checkpoint_args and checkpoint.load_hf is not None:
        return "--use-checkpoint-args and --load-hf both give the model's shape; remove one of them"
    shape = {f.name for f in dataclasses.fields(ModelConfig)} - {*RUNTIME_FIELDS, *PADDING_FIELDS}
    if checkpoint.load_hf is not None and (named := [flag_name(n) for n in sorted(shape) if n in given]):
        return (
            f"{', '.join(named)} has no effect: --load-hf takes the model's shape from its config.json; remove one of the "
            "two"
        )
    return None


def one_source_of_adapters(checkpoint: CheckpointConfig, given: frozenset[str]) -> str | None:
    """Rank, alpha and projections come from the adapter's folder or from flags; dropout is each run's own."""
    shape = ("lora_rank", "lora_alpha", "lora_target_modules")
    if checkpoint.load_adapter and (named := [flag_name(name) for name in shape if name in given]):
        return (
            f"{', '.join(named)} has no effect: --load-adapter takes the adapters' shape from its adapter_config.json; "
            "remove one of the two"
        )
    return None


def batch_shape_is_given(data: DataConfig, train: TrainConfig) -> str | None:
    """There is no default size of a sample or of a microbatch."""
    required = {"--seq-length": data.seq_length, "--micro-batch-size": train.micro_batch_size}
    missing = [name for name, value in required.items() if value is None]
    return f"{' and '.join(missing)} must be given" if missing else None


def shape_is_given(model: ModelConfig) -> str | None:
    """Fields without which there is no model."""
    required = {
        "--num-layers": model.num_layers,
        "--hidden-size": model.hidden_size,
        "--num-attention-heads": model.num_attention_heads,
    }
    missing = [name for name, value in required.items() if value is None]
    return f"{', '.join(missing)} must be given, or --preset" if missing else None


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


def one_half_precision(model: ModelConfig) -> str | None:
    """A run has one parameter dtype."""
    if model.fp16 and model.bf16:
        return "--fp16 and --bf16 exclude each other; give one of them"
    return None


def one_activation(model: ModelConfig) -> str | None:
    """The MLP has one activation function."""
    asked = {
        "--swiglu": model.swiglu,
        "--geglu": model.geglu,
        "--squared-relu": model.squared_relu,
        "--openai-gelu": model.openai_gelu,
    }
    given = [name for name, on in asked.items() if on]
    if len(given) <= 1 or given == ["--geglu", "--openai-gelu"]:  # the second says which GELU the gate has
        return None
    return f"{' and '.join(given)} exclude each other; give one of them"


def heads_divide_hidden(model: ModelConfig) -> str | None:
    """Without --kv-channels the head size is hidden / heads."""
    assert model.hidden_size and model.num_attention_heads
    if model.kv_channels is None and model.hidden_size % model.num_attention_heads:
        return (
            f"--hidden-size {model.hidden_size} is not a multiple of --num-attention-heads {model.num_attention_heads}; "
            "change one of them, or give the head size with --kv-channels"
        )
    return None


def groups_divide_heads(model: ModelConfig) -> str | None:
    """Every key/value head serves equally many query heads."""
    heads, groups = model.num_attention_heads, model.num_kv_heads
    assert heads
    if heads % groups:
        return f"--num-attention-heads {heads} is not a multiple of --num-query-groups {groups}; change one of them"
    return None


def layers_have_norms(model: ModelConfig) -> str | None:
    """A layer has norms before attention and MLP, behind them, or both."""
    if model.pre_norm or model.post_norm:
        return None
    return "--no-pre-norm leaves the layers without norms; add --post-norm, or remove it"


def heads_are_normalized_together(model: ModelConfig) -> str | None:
    """The statistics of RMSNorm are summed over tensor-parallel ranks; those of LayerNorm are not."""
    if model.qk_layernorm_across_heads and model.normalization != "RMSNorm":
        return (
            f"--qk-layernorm-across-heads is not available with --normalization {model.normalization}; "
            "give --normalization RMSNorm, or remove it"
        )
    return None


def experts_fit_layers(model: ModelConfig) -> str | None:
    """A list of layers with experts names each layer, and some of them have experts."""
    if model.num_experts is None:
        return None
    try:
        if any(model.moe_layers):
            return None
    except ConfigError as error:
        return str(error)
    return (
        f"--moe-layer-freq {model.moe_layer_freq} leaves no layer for the {model.num_experts} experts; give another "
        "pattern, or remove --num-experts"
    )


def mlp_has_a_width(model: ModelConfig) -> str | None:
    """The default width of a gated MLP is rounded down to a multiple of 64, which is 0 for tiny models."""
    if model.uses_ffn_dim and model.ffn_dim == 0:
        gate = "--swiglu" if model.swiglu else "--geglu"
        return f"{gate} with --hidden-size {model.hidden_size} leaves the MLP no width; give --ffn-hidden-size"
    return None


def tp_divides_layers(model: ModelConfig, tp: int) -> str | None:
    """Each tensor-parallel rank holds whole heads, whole key/value heads and an equal part of the MLP."""
    assert model.num_attention_heads
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


def sequence_fits_positions(data: DataConfig, model: ModelConfig) -> str | None:
    """The model's positions cover a sample; for rotary embeddings this is the context for which the model was trained."""
    seq, longest = data.seq_length, model.max_position_embeddings
    assert seq
    if longest is not None and seq > longest:
        return f"--seq-length {seq} is above --max-position-embeddings {longest}; lower it or raise the other"
    return None


def windows_fit_layers(model: ModelConfig) -> str | None:
    """A sliding window looks back only, and a list of layers with a window or without rotary positions names each layer."""
    assert model.num_layers
    try:
        attention_windows(model.window_size, model.window_attn_skip_freq, model.num_layers)
        if model.no_rope_freq is not None:
            every_layer("--no-rope-freq", model.no_rope_freq, model.num_layers, nth=1)
    except ConfigError as error:
        return str(error)
    return None


def adapters_have_a_place(checkpoint: CheckpointConfig, model: ModelConfig) -> str | None:
    """LoRA adapts projections that the model has, of a model with trained weights."""
    try:
        projections = model.lora_projections
    except ConfigError as error:
        return str(error)
    if projections and not (checkpoint.load or checkpoint.pretrained_checkpoint or checkpoint.load_hf):
        asked = (
            f"--load-adapter {checkpoint.load_adapter}" if checkpoint.load_adapter else f"--lora-rank {model.lora_rank}"
        )
        return (
            f"{asked} adapts a model that is trained already; give it with --load-hf, --pretrained-checkpoint or --load"
        )
    return None


def rotary_rotates(model: ModelConfig) -> str | None:
    """Channels are rotated in pairs: at least two per head."""
    try:
        _ = model.rotary_dim
    except ConfigError as error:
        return str(error)
    return None


def one_rotary_scaling(model: ModelConfig) -> str | None:
    """Llama-3.1 scaling, linear interpolation, YaRN and LongRoPE each replace the others, and all need rotary embeddings."""
    asked = {
        "--position-embedding-type yarn": model.position_embedding_type == "yarn",
        "--position-embedding-type longrope": model.position_embedding_type == "longrope",
        "--use-rope-scaling": model.use_rope_scaling,
        "--rotary-seq-len-interpolation-factor": model.rotary_seq_len_interpolation_factor is not None,
    }
    given = [name for name, on in asked.items() if on]
    if len(given) > 1:
        return f"{' and '.join(given)} are different rotary scalings; give one of them"
    if model.use_rope_scaling and model.position_embedding_type != "rope":
        return f"--use-rope-scaling needs --position-embedding-type rope, got {model.position_embedding_type}"
    return None


def rotary_pairs_exist(model: ModelConfig) -> str | None:
    """The pairing of channels matters only if channels are rotated."""
    if model.rotary_interleaved and not model.rotary_dim:
        return (
            "--rotary-interleaved needs --position-embedding-type rope, yarn or longrope, and it is "
            f"{model.position_embedding_type}; remove one of them"
        )
    return None


def rotary_bands_are_ordered(model: ModelConfig) -> str | None:
    """Both band-wise scalings blend between a lower and an upper edge."""
    low, high = model.rope_scaling_low_freq_factor, model.rope_scaling_high_freq_factor
    if model.use_rope_scaling and low >= high:
        return f"--rope-scaling-low-freq-factor {low} must be below --rope-scaling-high-freq-factor {high}; lower it"
    if model.position_embedding_type == "yarn" and model.yarn_beta_slow >= model.yarn_beta_fast:
        return (
            f"--yarn-beta-slow {model.yarn_beta_slow} must be below --yarn-beta-fast {model.yarn_beta_fast}; lower it"
        )
    return None


def longrope_is_complete(model: ModelConfig) -> str | None:
    """LongRoPE has both of its lists, and an original context whose logarithm can be divided by."""
    if model.position_embedding_type != "longrope":
        return None
    try:
        _ = model.longrope_factors
    except ConfigError as error:
        return str(error)
    original = model.rope_scaling_original_max_position_embeddings
    if original < 2:
        return (
            f"--rope-scaling-original-max-position-embeddings {original} must be at least 2 with --position-embedding-type "
            "longrope; give the context length of the first training"
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


def padding_holds_vocabulary(model: ModelConfig) -> str | None:
    """Each id has a row of the embedding. Skipped while the vocabulary is unknown."""
    size, rows = model.vocab_size, model.fixed_padded_vocab_size
    if size is not None and rows is not None and rows < size:
        return (
            f"--padded-vocab-size {rows} has no room for a vocabulary of {size}; give at least {size}, or leave it out"
        )
    return None


def tp_divides_vocabulary(model: ModelConfig, tp: int) -> str | None:
    """Each tensor-parallel rank holds equally many rows of the embedding. Skipped while the vocabulary is unknown."""
    if model.vocab_size is None:
        return None
    rows = model.padded_vocab_size
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
    """Returns the rules about the model and its layout over processes: those about its shape only once it is known."""
    sources = [
        partial(one_source_of_shape, run.checkpoint, run.given),
        partial(one_source_of_adapters, run.checkpoint, run.given),
        partial(batch_shape_is_given, run.data, run.train),
        partial(world_is_divisible, run.parallel, world_size),
        partial(backend_fits_device, run.parallel),
        partial(one_half_precision, run.model),
    ]
    if shape_is_pending(run.model, run.checkpoint):
        return sources
    return [
        *sources,
        partial(shape_is_given, run.model),
        partial(one_activation, run.model),
        partial(heads_divide_hidden, run.model),
        partial(groups_divide_heads, run.model),
        partial(layers_have_norms, run.model),
        partial(heads_are_normalized_together, run.model),
        partial(experts_fit_layers, run.model),
        partial(mlp_has_a_width, run.model),
        partial(tp_divides_layers, run.model, run.parallel.tensor_model_parallel_size),
        partial(sequence_parallel_divides_sequence, run.data, run.parallel),
        partial(sequence_fits_positions, run.data, run.model),
        partial(windows_fit_layers, run.model),
        partial(adapters_have_a_place, run.checkpoint, run.model),
        partial(layers_fill_the_pipeline, run.parallel, run.model),
        partial(heads_fit_context_parallelism, run.parallel, run.model),
        partial(one_rotary_scaling, run.model),
        partial(rotary_rotates, run.model),
        partial(rotary_pairs_exist, run.model),
        partial(rotary_bands_are_ordered, run.model),
        partial(longrope_is_complete, run.model),
        partial(padding_holds_vocabulary, run.model),
        partial(tp_divides_vocabulary, run.model, run.parallel.tensor_model_parallel_size),
    ]
