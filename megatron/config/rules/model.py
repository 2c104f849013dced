"""Rules about the model's shape and numerics."""

from __future__ import annotations

from functools import partial

from megatron.base.errors import ConfigError
from megatron.config.checkpoint import CheckpointConfig
from megatron.config.data import DataConfig
from megatron.config.layer_forms import ALL, NONE, VANILLA, WEIGHT
from megatron.config.layers import attention_windows, every_layer
from megatron.config.model import ModelConfig
from megatron.config.positions import ALIBI, ALIBI_POSITIONS
from megatron.config.rules.rule import ConfigRule
from megatron.config.rules.sources import shape_is_pending
from megatron.config.run import RunConfig


def shape_is_given(model: ModelConfig) -> str | None:
    """Fields without which there is no model."""
    required = {
        "--num-layers": model.num_layers,
        "--hidden-size": model.hidden_size,
        "--num-attention-heads": model.num_attention_heads,
    }
    missing = [name for name, value in required.items() if value is None]
    return f"{', '.join(missing)} must be given, or --preset" if missing else None


def one_half_precision(model: ModelConfig) -> str | None:
    """A run has one parameter dtype."""
    if model.fp16 and model.bf16:
        return "--fp16 and --bf16 exclude each other; give one of them"
    return None


def one_activation(model: ModelConfig) -> str | None:
    """The MLP has one activation function."""
    switches = {
        "--swiglu": model.swiglu,
        "--geglu": model.geglu,
        "--quick-geglu": model.quick_geglu,
        "--squared-relu": model.squared_relu,
        "--xielu": model.xielu,
        "--openai-gelu": model.openai_gelu,
    }
    flags = [name for name, on in switches.items() if on]
    if len(flags) <= 1 or flags == ["--geglu", "--openai-gelu"]:  # the second says which GELU the gate has
        return None
    return f"{' and '.join(flags)} exclude each other; give one of them"


def heads_divide_hidden(model: ModelConfig) -> str | None:
    """Without --kv-channels and latent attention the head size is hidden / heads."""
    assert model.hidden_size and model.num_attention_heads
    sized = model.kv_channels is not None or model.multi_latent_attention
    if not sized and model.hidden_size % model.num_attention_heads:
        return (
            f"--hidden-size {model.hidden_size} is not a multiple of --num-attention-heads "
            f"{model.num_attention_heads}; change one of them, or give the head size with --kv-channels"
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
    return "--no-pre-norm leaves the layers without norms; add --post-norm"


def parallel_parts_have_norms(model: ModelConfig) -> str | None:
    """Attention and MLP of a parallel layer read the residual stream through a norm each."""
    if model.parallel_residual and not model.pre_norm:
        return "--parallel-residual needs the norms before attention and MLP; remove --no-pre-norm"
    return None


def shared_norm_has_dense_layers(model: ModelConfig) -> str | None:
    """Experts, and the recompute of their parts, read a norm before the MLP."""
    if model.shared_norm and model.num_experts is not None:
        return (
            f"--shared-norm does not go with --num-experts {model.num_experts}, whose router reads a norm before the "
            "MLP; remove --shared-norm"
        )
    return None


def trained_activation_has_dense_layers(model: ModelConfig) -> str | None:
    """The products of experts, which are grouped, take activations without parameters."""
    if model.xielu and model.num_experts is not None:
        return f"--xielu does not go with --num-experts {model.num_experts}; give another activation, such as --swiglu"
    return None


def heads_are_normalized_together(model: ModelConfig) -> str | None:
    """The statistics of RMSNorm are summed over tensor-parallel ranks; those of LayerNorm are not."""
    if model.qk_layernorm_across_heads and model.normalization != "RMSNorm":
        return (
            f"--qk-layernorm-across-heads is not available with --normalization {model.normalization}; "
            "give --normalization RMSNorm"
        )
    return None


def norms_have_these_parameters(model: ModelConfig) -> str | None:
    """Only LayerNorm has a bias to leave out, and only a weight is stored minus one, or sharded with the heads."""
    if model.norm_parameters == WEIGHT and model.normalization != "LayerNorm":
        return (
            f"--norm-parameters {WEIGHT} is for --normalization LayerNorm; {model.normalization} has no bias: remove "
            "--norm-parameters"
        )
    weights = {
        "--apply-layernorm-1p": model.apply_layernorm_1p,
        "--qk-layernorm-across-heads": model.qk_layernorm_across_heads,
    }
    flags = [name for name, on in weights.items() if on]
    if model.norm_parameters == NONE and flags:
        return (
            f"{' and '.join(flags)} {'needs' if len(flags) == 1 else 'need'} weights of norms, and --norm-parameters "
            f"{NONE} leaves them out; remove one of them"
        )
    return None


def heads_have_weights_alone(model: ModelConfig) -> str | None:
    """Norms with a weight for every head have no bias, and normalize each head by itself."""
    if not model.qk_layernorm_weight_per_head:
        return None
    wrong = {
        "--multi-latent-attention": model.multi_latent_attention,
        "--qk-layernorm-across-heads": model.qk_layernorm_across_heads,
        "--norm-parameters none": model.norm_parameters == NONE,
        "the biases of LayerNorm": model.normalization == "LayerNorm" and model.norm_parameters == ALL,
    }
    names = [name for name, on in wrong.items() if on]
    if not names:
        return None
    return (
        f"--qk-layernorm-weight-per-head does not go with {' and '.join(names)}; remove it, or give --normalization "
        f"RMSNorm or --norm-parameters {WEIGHT}"
    )


def clipped_heads_are_plain(model: ModelConfig) -> str | None:
    """Heads made of latents are not clipped, a gate behind a query must not be, and norms behind the rotation bound
    queries and keys themselves."""
    others = {
        "--multi-latent-attention": model.multi_latent_attention,
        "--attention-output-gate": model.attention_output_gate,
        "--qk-layernorm-after-rope": model.qk_layernorm_after_rope,
    }
    flags = [name for name, on in others.items() if on]
    if model.clip_qkv is not None and flags:
        return f"--clip-qkv {model.clip_qkv} does not go with {' and '.join(flags)}; remove --clip-qkv"
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
        "pattern"
    )


def mlp_has_a_width(model: ModelConfig) -> str | None:
    """The default width of a gated MLP is rounded down to a multiple of 64, which is 0 for tiny models."""
    if model.uses_ffn_dim and model.ffn_dim == 0:
        gate = "--swiglu" if model.swiglu else "--geglu" if model.geglu else "--quick-geglu"
        return f"{gate} with --hidden-size {model.hidden_size} leaves the MLP no width; give --ffn-hidden-size"
    return None


def sequence_fits_positions(data: DataConfig, model: ModelConfig, checkpoint: CheckpointConfig) -> str | None:
    """The model's positions cover a sample; for rotary embeddings this is the context for which the model was
    trained. Dynamic NTK scaling stretches the context in training, but not in generation.
    """
    seq, longest, is_trained = data.seq_length, model.max_position_embeddings, checkpoint.has_base
    assert seq
    if longest is None or seq <= longest:
        return None
    if model.dynamic_ntk_factor is not None and not data.perform_rl_step:
        return None
    fix = f"lower it or give --max-position-embeddings {seq}"
    if is_trained and model.position_embedding_type == "learned_absolute":
        fix = "lower it: the model has learned no more positions"
    elif is_trained:
        fields = sorted({*checkpoint.override_model_fields, "max_position_embeddings"})
        fix += f" --override-model-fields {' '.join(fields)}"
    return f"--seq-length {seq} is above --max-position-embeddings {longest}; {fix}"


def windows_fit_layers(model: ModelConfig) -> str | None:
    """A sliding window looks back only, and a list of layers with a window or without rotary positions names each
    layer."""
    assert model.num_layers
    try:
        attention_windows(model.window_size, model.window_attn_skip_freq, model.num_layers)
        if model.no_rope_freq is not None:
            every_layer("--no-rope-freq", model.no_rope_freq, model.num_layers, nth=1)
    except ConfigError as error:
        return str(error)
    return None


def rotary_rotates(model: ModelConfig) -> str | None:
    """Channels are rotated in pairs: at least two per head."""
    try:
        _ = model.rotary_dim
    except ConfigError as error:
        return str(error)
    return None


def one_rotary_scaling(model: ModelConfig) -> str | None:
    """Llama-3.1 scaling, linear interpolation, dynamic NTK scaling, YaRN and LongRoPE each replace the others, and all
    need rotary embeddings."""
    switches = {
        "--position-embedding-type yarn": model.position_embedding_type == "yarn",
        "--position-embedding-type longrope": model.position_embedding_type == "longrope",
        "--use-rope-scaling": model.use_rope_scaling,
        "--rotary-seq-len-interpolation-factor": model.rotary_seq_len_interpolation_factor is not None,
        "--dynamic-ntk-factor": model.dynamic_ntk_factor is not None,
    }
    flags = [name for name, on in switches.items() if on]
    if len(flags) > 1:
        return f"{' and '.join(flags)} are different rotary scalings; give one of them"
    if model.use_rope_scaling and model.position_embedding_type != "rope":
        return f"--use-rope-scaling needs --position-embedding-type rope, got {model.position_embedding_type}"
    return None


def rotary_pairs_exist(model: ModelConfig) -> str | None:
    """The pairing of channels matters only if channels are rotated."""
    if model.rotary_interleaved and not model.rotary_dim:
        return (
            f"--rotary-interleaved has no effect with --position-embedding-type {model.position_embedding_type}; give "
            "rope, yarn or longrope"
        )
    return None


def rotary_bands_are_ordered(model: ModelConfig) -> str | None:
    """Both band-wise scalings blend between a lower and an upper edge."""
    low, high = model.rope_scaling_low_freq_factor, model.rope_scaling_high_freq_factor
    if model.use_rope_scaling and low >= high:
        return f"--rope-scaling-low-freq-factor {low} must be below --rope-scaling-high-freq-factor {high}; lower it"
    if model.position_embedding_type == "yarn" and model.yarn_beta_slow > model.yarn_beta_fast:
        return f"--yarn-beta-slow {model.yarn_beta_slow} is above --yarn-beta-fast {model.yarn_beta_fast}; lower it"
    return None


def alibi_fits_scores(model: ModelConfig) -> str | None:
    """ALiBi's bias is a part of the product of query and key, without the query's position, which falls out of a
    softmax over keys alone."""
    if model.position_embedding_type != ALIBI:
        return None
    forms = {
        "--multi-latent-attention": model.multi_latent_attention,
        "--attn-logit-softcapping": model.attn_logit_softcapping is not None,
        f"--softmax-type {model.softmax_type}": model.softmax_type != VANILLA,
    }
    flags = [name for name, on in forms.items() if on]
    if flags:
        return f"{flags[0]} cannot be used with --position-embedding-type alibi; leave it out"
    if (model.max_position_embeddings or 0) > ALIBI_POSITIONS:
        return (
            f"--max-position-embeddings {model.max_position_embeddings} is above the {ALIBI_POSITIONS} positions of "
            "--position-embedding-type alibi; lower it"
        )
    return None


def dynamic_base_exists(model: ModelConfig) -> str | None:
    """The exponent of dynamic NTK scaling is d / (d - 2) for d rotated channels."""
    if model.dynamic_ntk_factor is not None and model.rotary_dim == 2:
        return (
            f"--dynamic-ntk-factor {model.dynamic_ntk_factor} stretches none of the 2 rotated channels of a head; "
            "remove it, or rotate more with --rotary-percent or --kv-channels"
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
            f"--rope-scaling-original-max-position-embeddings {original} must be at least 2 with "
            "--position-embedding-type longrope; give the context length of the first training"
        )
    return None


def padding_holds_vocabulary(model: ModelConfig) -> str | None:
    """Each id has a row of the embedding. Skipped while the vocabulary is unknown."""
    size, rows = model.vocab_size, model.fixed_padded_vocab_size
    if size is not None and rows is not None and rows < size:
        return (
            f"--padded-vocab-size {rows} has no room for a vocabulary of {size}; give at least {size}, or leave it out"
        )
    return None


def rules(run: RunConfig) -> list[ConfigRule]:
    """Returns the rules about the model: those about its shape only once it is known."""
    model = run.model
    if shape_is_pending(model, run.checkpoint):
        return [partial(one_half_precision, model)]
    return [
        partial(one_half_precision, model),
        partial(shape_is_given, model),
        partial(one_activation, model),
        partial(heads_divide_hidden, model),
        partial(groups_divide_heads, model),
        partial(layers_have_norms, model),
        partial(parallel_parts_have_norms, model),
        partial(shared_norm_has_dense_layers, model),
        partial(trained_activation_has_dense_layers, model),
        partial(heads_are_normalized_together, model),
        partial(norms_have_these_parameters, model),
        partial(heads_have_weights_alone, model),
        partial(clipped_heads_are_plain, model),
        partial(experts_fit_layers, model),
        partial(mlp_has_a_width, model),
        partial(sequence_fits_positions, run.data, model, run.checkpoint),
        partial(windows_fit_layers, model),
        partial(one_rotary_scaling, model),
        partial(rotary_rotates, model),
        partial(rotary_pairs_exist, model),
        partial(rotary_bands_are_ordered, model),
        partial(longrope_is_complete, model),
        partial(alibi_fits_scores, model),
        partial(dynamic_base_exists, model),
        partial(padding_holds_vocabulary, model),
    ]
