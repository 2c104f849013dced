"""Rules about the model's shape and numerics, and its layout over processes.

A rule is a function of the run and its world size that returns None, or one line with the problem and the fix. Rules
run in order, RULES before SHAPE_RULES: a later one may rely on conditions that an earlier one has checked.
"""

from __future__ import annotations

import dataclasses

from megatron.base.errors import ConfigError
from megatron.config.context_parallel import attention_comm_types, copies_of_keys, inner_size
from megatron.config.layer_pattern import every_layer
from megatron.config.mesh import mesh_of
from megatron.config.model import PADDING_FIELDS, RUNTIME_FIELDS, ModelConfig
from megatron.config.run import RunConfig, flag_name
from megatron.config.window import attention_windows


def shape_is_pending(run: RunConfig) -> bool:
    """Returns whether SHAPE_RULES must wait, because the checkpoint of --use-checkpoint-args has not been read yet."""
    return run.checkpoint.use_checkpoint_args and run.model.num_layers is None


def one_source_of_shape(run: RunConfig, world_size: int) -> str | None:
    """The shape comes from the checkpoint or from a Hugging Face model; flags in addition to the latter would be
    ignored.

    With --use-checkpoint-args Megatron-LM ignores such flags, too: rules/needs.py makes notes of them.
    """
    if run.checkpoint.use_checkpoint_args and run.checkpoint.load_hf is not None:
        return "--use-checkpoint-args and --load-hf both give the model's shape; remove one of them"
    shape = {f.name for f in dataclasses.fields(ModelConfig)} - {*RUNTIME_FIELDS, *PADDING_FIELDS}
    if run.checkpoint.load_hf is not None and (given := [flag_name(n) for n in sorted(shape) if n in run.given]):
        return (
            f"{', '.join(given)} has no effect: --load-hf takes the model's shape from its config.json; remove one of the "
            "two"
        )
    return None


def one_source_of_adapters(run: RunConfig, world_size: int) -> str | None:
    """Rank, alpha and projections come from the adapter's folder or from flags; dropout is each run's own."""
    shape = ("lora_rank", "lora_alpha", "lora_target_modules")
    if run.checkpoint.load_adapter and (given := [flag_name(name) for name in shape if name in run.given]):
        return (
            f"{', '.join(given)} has no effect: --load-adapter takes the adapters' shape from its adapter_config.json; "
            "remove one of the two"
        )
    return None


def batch_shape_is_given(run: RunConfig, world_size: int) -> str | None:
    """There is no default size of a sample or of a microbatch."""
    required = {"--seq-length": run.data.seq_length, "--micro-batch-size": run.train.micro_batch_size}
    missing = [name for name, value in required.items() if value is None]
    return f"{' and '.join(missing)} must be given" if missing else None


def shape_is_given(run: RunConfig, world_size: int) -> str | None:
    """Fields without which there is no model."""
    m = run.model
    required = {
        "--num-layers": m.num_layers,
        "--hidden-size": m.hidden_size,
        "--num-attention-heads": m.num_attention_heads,
    }
    missing = [name for name, value in required.items() if value is None]
    return f"{', '.join(missing)} must be given, or --preset" if missing else None


def only_supported_parallelism(run: RunConfig, world_size: int) -> str | None:
    """The mesh has every axis; these are not implemented yet."""
    p = run.parallel
    sizes = {
        "--expert-model-parallel-size": p.expert_model_parallel_size,
        "--expert-tensor-parallel-size": p.expert_tensor_parallel_size or 1,
    }
    wrong = [f"{name} {size}" for name, size in sizes.items() if size > 1]
    return f"{', '.join(wrong)} is not available yet; use 1" if wrong else None


def world_is_divisible(run: RunConfig, world_size: int) -> str | None:
    """The processes fill a whole number of replicas."""
    try:
        mesh_of(run.parallel, world_size)
    except ConfigError as error:
        return str(error)
    return None


def backend_fits_device(run: RunConfig, world_size: int) -> str | None:
    """NCCL only supports CUDA memory. If --device auto finds none, gloo replaces it, and the table reports it."""
    if run.parallel.distributed_backend == "nccl" and run.parallel.device == "cpu":
        return "--distributed-backend nccl cannot run on --device cpu; use gloo"
    return None


def one_half_precision(run: RunConfig, world_size: int) -> str | None:
    """A run has one parameter dtype."""
    if run.model.fp16 and run.model.bf16:
        return "--fp16 and --bf16 exclude each other; give one of them"
    return None


def one_activation(run: RunConfig, world_size: int) -> str | None:
    """The MLP has one activation function."""
    m = run.model
    asked = {"--swiglu": m.swiglu, "--squared-relu": m.squared_relu, "--openai-gelu": m.openai_gelu}
    given = [name for name, on in asked.items() if on]
    return f"{' and '.join(given)} exclude each other; give one of them" if len(given) > 1 else None


def heads_divide_hidden(run: RunConfig, world_size: int) -> str | None:
    """Without --kv-channels the head size is hidden / heads."""
    m = run.model
    assert m.hidden_size and m.num_attention_heads
    if m.kv_channels is None and m.hidden_size % m.num_attention_heads:
        return (
            f"--hidden-size {m.hidden_size} is not a multiple of --num-attention-heads {m.num_attention_heads}; "
            "change one of them, or give the head size with --kv-channels"
        )
    return None


def groups_divide_heads(run: RunConfig, world_size: int) -> str | None:
    """Every key/value head serves equally many query heads."""
    m = run.model
    assert m.num_attention_heads
    if m.num_attention_heads % m.num_kv_heads:
        return (
            f"--num-attention-heads {m.num_attention_heads} is not a multiple of --num-query-groups {m.num_kv_heads}; "
            "change one of them"
        )
    return None


def layers_have_norms(run: RunConfig, world_size: int) -> str | None:
    """A layer has norms before attention and MLP, behind them, or both."""
    if run.model.pre_norm or run.model.post_norm:
        return None
    return "--no-pre-norm leaves the layers without norms; add --post-norm, or remove it"


def mlp_has_a_width(run: RunConfig, world_size: int) -> str | None:
    """The default width of a gated MLP is rounded down to a multiple of 64, which is 0 for tiny models."""
    m = run.model
    if m.ffn_dim == 0:
        return f"--swiglu with --hidden-size {m.hidden_size} leaves the MLP no width; give --ffn-hidden-size"
    return None


def tp_divides_layers(run: RunConfig, world_size: int) -> str | None:
    """Each tensor-parallel rank holds whole heads, whole key/value heads and an equal part of the MLP."""
    m, tp = run.model, run.parallel.tensor_model_parallel_size
    assert m.num_attention_heads
    for name, size in {"--num-attention-heads": m.num_attention_heads, "--ffn-hidden-size": m.ffn_dim}.items():
        if size % tp:
            return f"{name} {size} is not a multiple of --tensor-model-parallel-size {tp}; change one of them"
    if m.num_kv_heads % tp and tp % m.num_kv_heads:
        return (
            f"--tensor-model-parallel-size {tp} neither divides the {m.num_kv_heads} key/value heads (--num-query-groups) "
            "nor is a multiple of them; change one of them"
        )
    return None


def sequence_parallel_divides_sequence(run: RunConfig, world_size: int) -> str | None:
    """Sequence parallelism divides the sequence into tp equal parts; context parallelism pads it first."""
    seq, tp = run.data.seq_length, run.parallel.tensor_model_parallel_size
    assert seq
    if run.parallel.sequence_parallel and run.parallel.context_parallel_size == 1 and seq % tp:
        return (
            f"--sequence-parallel needs --seq-length {seq} to be a multiple of --tensor-model-parallel-size {tp}; "
            "change one of them or remove --sequence-parallel"
        )
    return None


def sequence_fits_positions(run: RunConfig, world_size: int) -> str | None:
    """The model's positions cover a sample; for rotary embeddings this is the context for which the model was trained."""
    seq, longest = run.data.seq_length, run.model.max_position_embeddings
    assert seq
    if longest is not None and seq > longest:
        return f"--seq-length {seq} is above --max-position-embeddings {longest}; lower it or raise the other"
    return None


def windows_fit_layers(run: RunConfig, world_size: int) -> str | None:
    """A sliding window looks back only, and a list of layers with a window or without rotary positions names each layer."""
    m = run.model
    assert m.num_layers
    try:
        attention_windows(m.window_size, m.window_attn_skip_freq, m.num_layers)
        if m.no_rope_freq is not None:
            every_layer("--no-rope-freq", m.no_rope_freq, m.num_layers, nth=1)
    except ConfigError as error:
        return str(error)
    return None


def adapters_have_a_place(run: RunConfig, world_size: int) -> str | None:
    """LoRA adapts projections that the model has, of a model with trained weights."""
    c = run.checkpoint
    try:
        projections = run.model.lora_projections
    except ConfigError as error:
        return str(error)
    if projections and not (c.load or c.pretrained_checkpoint or c.load_hf):
        asked = f"--load-adapter {c.load_adapter}" if c.load_adapter else f"--lora-rank {run.model.lora_rank}"
        return (
            f"{asked} adapts a model that is trained already; give it with --load-hf, --pretrained-checkpoint or --load"
        )
    return None


def rotary_rotates(run: RunConfig, world_size: int) -> str | None:
    """Channels are rotated in pairs: at least two per head."""
    try:
        _ = run.model.rotary_dim
    except ConfigError as error:
        return str(error)
    return None


def one_rotary_scaling(run: RunConfig, world_size: int) -> str | None:
    """Llama-3.1 scaling, linear interpolation and YaRN each replace the others, and all need rotary embeddings."""
    m = run.model
    asked = {
        "--position-embedding-type yarn": m.position_embedding_type == "yarn",
        "--use-rope-scaling": m.use_rope_scaling,
        "--rotary-seq-len-interpolation-factor": m.rotary_seq_len_interpolation_factor is not None,
    }
    given = [name for name, on in asked.items() if on]
    if len(given) > 1:
        return f"{' and '.join(given)} are different rotary scalings; give one of them"
    if m.use_rope_scaling and m.position_embedding_type != "rope":
        return f"--use-rope-scaling needs --position-embedding-type rope, got {m.position_embedding_type}"
    return None


def rotary_pairs_exist(run: RunConfig, world_size: int) -> str | None:
    """The pairing of channels matters only if channels are rotated."""
    m = run.model
    if m.rotary_interleaved and not m.rotary_dim:
        return (
            "--rotary-interleaved needs --position-embedding-type rope or yarn, and it is "
            f"{m.position_embedding_type}; remove one of them"
        )
    return None


def rotary_bands_are_ordered(run: RunConfig, world_size: int) -> str | None:
    """Both band-wise scalings blend between a lower and an upper edge."""
    m = run.model
    low, high = m.rope_scaling_low_freq_factor, m.rope_scaling_high_freq_factor
    if m.use_rope_scaling and low >= high:
        return f"--rope-scaling-low-freq-factor {low} must be below --rope-scaling-high-freq-factor {high}; lower it"
    if m.position_embedding_type == "yarn" and m.yarn_beta_slow >= m.yarn_beta_fast:
        return f"--yarn-beta-slow {m.yarn_beta_slow} must be below --yarn-beta-fast {m.yarn_beta_fast}; lower it"
    return None


def layers_fill_the_pipeline(run: RunConfig, world_size: int) -> str | None:
    """Schedule and stages fit each other and the layers."""
    try:
        run.pipeline_settings()
    except ConfigError as error:
        return str(error)
    return None


def heads_fit_context_parallelism(run: RunConfig, world_size: int) -> str | None:
    """Each layer's attention reaches the whole sequence, and the heads that it exchanges can be divided."""
    p, m = run.parallel, run.model
    if p.context_parallel_size == 1:
        return None
    assert m.num_layers and m.num_attention_heads
    try:
        types, inner = set(attention_comm_types(p, m.num_layers)), inner_size(p)
        tp = p.tensor_model_parallel_size
        heads = m.num_attention_heads // tp, max(1, m.num_kv_heads // tp)  # of a tensor-parallel rank
        if "a2a" in types:
            copies_of_keys(*heads, p.context_parallel_size)
        if "a2a+p2p" in types:
            copies_of_keys(*heads, inner)
    except ConfigError as error:
        return str(error)
    if "a2a+p2p" in types and p.hierarchical_context_parallel_sizes is None:
        return "--cp-comm-type a2a+p2p needs to know its two sizes; give --hierarchical-context-parallel-sizes"
    return None


def padding_holds_vocabulary(run: RunConfig, world_size: int) -> str | None:
    """Each id has a row of the embedding. Skipped while the vocabulary is unknown."""
    size, rows = run.model.vocab_size, run.model.fixed_padded_vocab_size
    if size is not None and rows is not None and rows < size:
        return (
            f"--padded-vocab-size {rows} has no room for a vocabulary of {size}; give at least {size}, or leave it out"
        )
    return None


def tp_divides_vocabulary(run: RunConfig, world_size: int) -> str | None:
    """Each tensor-parallel rank holds equally many rows of the embedding. Skipped while the vocabulary is unknown."""
    if run.model.vocab_size is None:
        return None
    tp, rows = run.parallel.tensor_model_parallel_size, run.model.padded_vocab_size
    if rows % tp and run.model.fixed_padded_vocab_size is not None:
        return (
            f"--padded-vocab-size {rows} is not a multiple of --tensor-model-parallel-size {tp}; give "
            f"--padded-vocab-size {-(-rows // tp) * tp}"
        )
    if rows % tp:
        step = run.model.make_vocab_size_divisible_by
        return (
            f"padded vocabulary {rows} is not a multiple of --tensor-model-parallel-size {tp}; give "
            f"--make-vocab-size-divisible-by {step * tp}"
        )
    return None


RULES = (
    one_source_of_shape,
    one_source_of_adapters,
    batch_shape_is_given,
    only_supported_parallelism,
    world_is_divisible,
    backend_fits_device,
    one_half_precision,
)
SHAPE_RULES = (
    shape_is_given,
    one_activation,
    heads_divide_hidden,
    groups_divide_heads,
    layers_have_norms,
    mlp_has_a_width,
    tp_divides_layers,
    sequence_parallel_divides_sequence,
    sequence_fits_positions,
    windows_fit_layers,
    adapters_have_a_place,
    layers_fill_the_pipeline,
    heads_fit_context_parallelism,
    one_rotary_scaling,
    rotary_rotates,
    rotary_pairs_exist,
    rotary_bands_are_ordered,
    padding_holds_vocabulary,
    tp_divides_vocabulary,
)
