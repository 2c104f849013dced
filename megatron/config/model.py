"""Shape and numerics of the decoder."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from megatron.base.errors import ConfigError
from megatron.config.delta_net import DeltaNetModel
from megatron.config.flag import Need, flag, on_by_default
from megatron.config.interval import (
    BELOW_ONE,
    LAYERS,
    LAYERS_OR_NONE,
    NOT_NEGATIVE,
    POSITIVE,
    SIZE,
)
from megatron.config.kernel_choices import KernelChoices
from megatron.config.latent_attention import LatentAttentionModel, yarn_temperature
from megatron.config.layer_forms import LayerForms
from megatron.config.layers import (
    DELTA_PROJECTIONS,
    GROUPED_PROJECTIONS,
    attention_windows,
    channel_factors,
    every_layer,
    keys_in_window,
    lora_projections,
)
from megatron.config.lora import LoraModel
from megatron.config.moe import MoEModel
from megatron.config.positions import ROTARY, PositionModel

# Fields that describe how the model is run or extended, not the model itself: with --use-checkpoint-args these are the
# run's own, all others the checkpoint's.
RUNTIME_FIELDS = (
    "attention_dropout",
    "hidden_dropout",
    "lora_rank",
    "lora_alpha",
    "lora_dropout",
    "lora_target_modules",
    "moe_router_dtype",
    "fp16",
    "bf16",
    "fp32_residual_connection",
    "attention_backend",
    "transformer_impl",
    "batch_invariant_mode",
    "gradient_accumulation_fusion",
    "persist_layer_norm",
    "bias_swiglu_fusion",
    "apply_rope_fusion",
)
# Fields about the padding of the vocabulary, which a format without padding leaves to each run.
PADDING_FIELDS = ("make_vocab_size_divisible_by", "fixed_padded_vocab_size", "mask_padded_vocabulary")
# Fields whose values follow from others if they are not given, or have several spellings -> the value in effect.
_DERIVED = {
    "num_query_groups": "num_kv_heads",
    "kv_channels": "head_dim",
    "ffn_hidden_size": "ffn_dim",
    "fixed_padded_vocab_size": "padded_vocab_size",
    "no_rope_freq": "layers_with_rotary",
    "yarn_mscale": "yarn_magnitude",
    "window_size": "window",
    "window_attn_skip_freq": "windows",
    "add_qkv_bias": "qkv_bias",
    "add_attn_proj_bias": "attn_proj_bias",
    "add_mlp_bias": "mlp_bias",
    "softmax_scale": "attention_scale",
    "latent_norm_epsilon": "latent_epsilon",
    "lora_target_modules": "lora_projections",
    "experimental_attention_variant": "delta_net_form",
    "linear_attention_freq": "delta_layers",
    "moe_layer_freq": "moe_layers",
    "moe_ffn_hidden_size": "moe_ffn_dim",
    "moe_router_topk_normalization": "normalizes_topk",
}
# Fields that are 1 if they are not given.
_ROUTER_DEFAULTS = ("moe_router_topk_scaling_factor", "moe_router_num_groups", "moe_router_group_topk")
# Fields that change what the model computes from its weights, and that a run may change on purpose, above all to extend
# the context: --override-model-fields names those that may differ from a checkpoint's. All others say how the weights
# are to be read, and never may.
OVERRIDABLE_FIELDS = (
    "norm_epsilon",
    "position_embedding_type",
    "max_position_embeddings",
    "rotary_base",
    "rotary_base_local",
    "rotary_seq_len_interpolation_factor",
    "dynamic_ntk_factor",
    "llama_4_scaling_beta",
    "use_rope_scaling",
    "rope_scaling_factor",
    "rope_scaling_low_freq_factor",
    "rope_scaling_high_freq_factor",
    "rope_scaling_original_max_position_embeddings",
    "yarn_beta_fast",
    "yarn_beta_slow",
    "yarn_mscale",
    "mscale",
    "mscale_all_dim",
    "latent_norm_epsilon",
    "indexer_topk",
    "yarn_correction_range_round_to_int",
    "short_factor",
    "long_factor",
    "longrope_mscale",
    "softmax_scale",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "window_size",
    "window_attn_skip_freq",
    "mask_padded_vocabulary",
)
_FEW_BIASES = Need(
    lambda run: not run.model.add_bias_linear, "all linear layers have biases already", "add --disable-bias-linear"
)


@dataclass(frozen=True, kw_only=True)
class ModelConfig(KernelChoices, PositionModel, DeltaNetModel, LatentAttentionModel, LayerForms, LoraModel, MoEModel):
    """The model, independent of the machine. `None` in a field means that it is derived: see the properties."""

    num_layers: int | None = flag(None, "number of transformer layers", within=LAYERS)
    hidden_size: int | None = flag(None, "width of the hidden states", within=SIZE)
    num_attention_heads: int | None = flag(None, "number of query heads", within=SIZE)
    ffn_hidden_size: int | None = flag(
        None,
        "width of the MLP; default 4 x hidden, or 8/3 x hidden rounded down to a multiple of 64 with a gate",
        within=SIZE,
        needs=Need(
            lambda run: run.model.num_layers is None or run.model.uses_ffn_dim,
            "all layers have experts, of their own width",
            "remove --moe-ffn-hidden-size",
        ),
    )
    kv_channels: int | None = flag(None, "size of one attention head; default hidden / heads", within=SIZE)
    group_query_attention: bool = flag(False, "share each key/value head between several query heads (GQA)")
    num_query_groups: int | None = flag(
        None,
        "number of key/value heads with --group-query-attention; default 1",
        within=SIZE,
        needs=Need(
            lambda run: run.model.group_query_attention,
            "each query head has its own key/value head",
            "add --group-query-attention",
        ),
    )
    normalization: str = flag("LayerNorm", "normalization layer", choices=("LayerNorm", "RMSNorm"))
    norm_epsilon: float = flag(
        1e-5, "epsilon inside the norm's square root", aliases=("--layernorm-epsilon",), within=POSITIVE
    )
    apply_layernorm_1p: bool = flag(False, "store norm weights minus one, so that weight decay pulls them to one")
    pre_norm: bool = on_by_default(
        when_off="attention and MLP read the residual stream itself, not its norm; only with --post-norm"
    )
    post_norm: bool = flag(
        False, "normalize the outputs of attention and MLP, too, before they are added to the residual stream"
    )
    swiglu: bool = flag(False, "gated SiLU MLP: silu(gate) x up")
    geglu: bool = flag(False, "gated GELU MLP: gelu(gate) x up, with the form of GELU that a plain MLP would have")
    squared_relu: bool = flag(False, "squared ReLU MLP activation")
    openai_gelu: bool = flag(
        False,
        "tanh approximation of GELU (GPT-2's) where the exact one is the default, too; Megatron-LM's core takes this "
        "flag and does not read it",
    )
    bias_gelu_fusion: bool = on_by_default(
        when_off="exact GELU; by default it is the tanh approximation where linear layers have biases, as in "
        "Megatron-LM, whose fused bias and GELU computes that, and exact where they have none",
        name="--no-bias-gelu-fusion",
    )
    add_bias_linear: bool = on_by_default(when_off="no biases in linear layers", name="--disable-bias-linear")
    add_qkv_bias: bool = flag(
        False, "bias on the query/key/value projection; for --disable-bias-linear models", needs=_FEW_BIASES
    )
    add_attn_proj_bias: bool = flag(
        False, "bias on the output projection of attention; for --disable-bias-linear models", needs=_FEW_BIASES
    )
    add_mlp_bias: bool = flag(
        False,
        "biases on the projections of the MLP and of experts; for --disable-bias-linear models",
        needs=_FEW_BIASES,
    )
    qk_layernorm: bool = flag(False, "normalize each head's queries and keys before they are rotated")
    softmax_scale: float | None = flag(
        None,
        "factor on the products of queries and keys before the softmax; default 1 / sqrt(size of a head)",
        within=POSITIVE,
    )
    attn_logit_softcapping: float | None = flag(
        None,
        "cap attention scores smoothly at this value C: C x tanh(score / C), as in Gemma 2; needs more time, because "
        "no fused kernel caps scores",
        within=POSITIVE,
    )
    qk_layernorm_across_heads: bool = flag(
        False,
        "normalize the queries of all heads together, and so the keys",
        needs=Need(lambda run: run.model.qk_layernorm, "queries and keys are not normalized", "add --qk-layernorm"),
    )
    window_size: str | None = flag(
        None,
        "sliding-window attention: a query sees its own key and LEFT keys before it; RIGHT must be 0. Hugging Face's "
        "sliding_window W is W-1,0 here",
        metavar="LEFT,RIGHT",
        needs=Need(
            lambda run: run.model.window is None or any(run.model.windows),
            lambda run: f"--window-attn-skip-freq {run.model.window_attn_skip_freq} gives every layer full attention",
            "give another --window-attn-skip-freq",
        ),
    )
    window_attn_skip_freq: str | None = flag(
        None,
        "layers with full attention despite --window-size: a number N for every N-th layer, or a list with one "
        "number per layer, 1 for the window and 0 for full attention, such as [1,1,0,1] or ([1]*5+[0])*4",
        metavar="PATTERN",
        needs=Need(lambda run: run.model.window is not None, "every layer has full attention", "give --window-size"),
    )
    untie_embeddings_and_output_weights: bool = flag(False, "use separate weights for the output head")
    add_output_layer_bias: bool = flag(
        False, "bias on the output head, which is added to the logits; with tied weights, too (Phi, GPT-J)"
    )
    embedding_multiplier_scale: float = flag(
        1.0,
        "token embeddings are multiplied by this, rounded to their dtype, before positions are added",
        within=POSITIVE,
    )
    residual_multiplier: float = flag(
        1.0, "outputs of attention and MLP are multiplied by this, before the residual is added", within=POSITIVE
    )
    mtp_num_layers: int = flag(
        0,
        "further tokens that training predicts behind the next one, each with a layer of its own (multi-token "
        "prediction, DeepSeek-V3); 0: none",
        within=LAYERS_OR_NONE,
    )
    logits_scaling: float = flag(1.0, "logits are divided by this", within=POSITIVE)
    final_logit_softcapping: float | None = flag(
        None, "cap logits smoothly at this value C: C x tanh(logit / C), as in Gemma 2", within=POSITIVE
    )
    attention_dropout: float = flag(0.1, "dropout on attention probabilities", within=BELOW_ONE)
    hidden_dropout: float = flag(
        0.1, "dropout on the output of attention and MLP, before the residual is added", within=BELOW_ONE
    )
    init_method_std: float = flag(0.02, "standard deviation of the initial weights", within=NOT_NEGATIVE)
    init_method_xavier_uniform: bool = flag(False, "Xavier-uniform initial weights instead of normal ones")
    apply_output_scale_init: bool = on_by_default(
        when_off="initialise attention-output and MLP-output weights like all others, not divided by sqrt(2 x layers)",
        name="--disable-output-scale-init",
    )
    vocab_size: int | None = flag(None, "vocabulary size before padding; default the tokenizer's", within=SIZE)
    make_vocab_size_divisible_by: int = flag(
        128,
        "pad the vocabulary to a multiple of this; not of this x tp, so that checkpoints do not depend on the layout",
        within=SIZE,
    )
    fixed_padded_vocab_size: int | None = flag(
        None,
        "pad the vocabulary to exactly this many rows, whatever --make-vocab-size-divisible-by is; "
        "--tensor-model-parallel-size must divide it",
        name="--padded-vocab-size",
        within=SIZE,
    )
    mask_padded_vocabulary: bool = on_by_default(
        when_off="let the padding of the vocabulary take part in the softmax of the loss, as Megatron-LM does: losses "
        "of both agree where the vocabulary is padded to as many rows. A checkpoint that was trained so, "
        "Megatron-LM's own above all, goes on so without this",
        name="--no-mask-padded-vocabulary",
    )
    fp16: bool = flag(False, "train in fp16 with loss scaling")
    bf16: bool = flag(False, "train in bf16")
    fp32_residual_connection: bool = flag(
        False,
        "keep the residual stream in fp32 in bf16/fp16 training",
        needs=Need(lambda run: run.model.fp16 or run.model.bf16, "the whole model is fp32", "add --bf16"),
    )

    def in_effect(self, field: str) -> Any:
        """Returns the value of a field by which two models are compared: as given, or derived from other fields.

        Raises ConfigError for patterns of layers that cannot be read.
        """
        value = getattr(self, _DERIVED.get(field, field))
        return 1 if value is None and field in _ROUTER_DEFAULTS else value

    @property
    def head_dim(self) -> int:
        """Number of channels of one attention head, of its queries and keys where values have another number."""
        assert self.hidden_size and self.num_attention_heads
        if self.multi_latent_attention:
            return self.latent_qk_dim
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def num_kv_heads(self) -> int:
        """Number of key/value heads; equal to the query heads without GQA."""
        assert self.num_attention_heads
        return (self.num_query_groups or 1) if self.group_query_attention else self.num_attention_heads

    @property
    def gated(self) -> bool:
        """Whether the MLP has a gate: two projections before its activation."""
        return self.swiglu or self.geglu or self.quick_geglu

    @property
    def ffn_dim(self) -> int:
        """Width of the MLP's inner activation."""
        assert self.hidden_size
        if self.ffn_hidden_size is not None:
            return self.ffn_hidden_size
        return self.hidden_size * 8 // 3 // 64 * 64 if self.gated else 4 * self.hidden_size

    @property
    def uses_ffn_dim(self) -> bool:
        """Whether some layer has an MLP of width `ffn_dim`: a dense layer, or experts without a width of their own."""
        return self.moe_ffn_hidden_size is None or not all(self.moe_layers)

    @property
    def moe_ffn_dim(self) -> int:
        """Width of an expert's inner activation."""
        return self.moe_ffn_hidden_size or self.ffn_dim

    @property
    def moe_layers(self) -> tuple[bool, ...]:
        """Whether each layer has experts. Raises ConfigError."""
        assert self.num_layers
        return self.moe_layers_of(self.num_layers)

    @property
    def delta_layers(self) -> tuple[bool, ...]:
        """Whether each layer has a gated delta net. Raises ConfigError."""
        assert self.num_layers
        return self.delta_layers_of(self.num_layers)

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding and of the head: the requested number, or `vocab_size` rounded up."""
        if self.fixed_padded_vocab_size is not None:
            return self.fixed_padded_vocab_size
        assert self.vocab_size
        step = self.make_vocab_size_divisible_by
        return -(-self.vocab_size // step) * step

    @property
    def softmax_size(self) -> int:
        """Rows of the head in the softmax: one per id, or all of them if padding is not masked."""
        assert self.vocab_size
        return self.vocab_size if self.mask_padded_vocabulary else self.padded_vocab_size

    @property
    def dtype_name(self) -> str:
        """Dtype of parameters and activations: "float32", "bfloat16" or "float16"."""
        return "bfloat16" if self.bf16 else "float16" if self.fp16 else "float32"

    @property
    def rotary_dim(self) -> int:
        """Rotated channels of a head (0 without rotary embedding). Raises ConfigError unless they form pairs.

        Megatron-LM and transformers round an odd number up, but compute the frequencies from the odd number.
        """
        if self.position_embedding_type not in ROTARY:
            return 0
        if self.multi_latent_attention:
            return self.qk_pos_emb_head_dim
        channels = int(self.head_dim * self.rotary_percent)
        if channels % 2 or channels == 0:
            raise ConfigError(
                f"--rotary-percent {self.rotary_percent} of head size {self.head_dim} rotates {channels} channels, and "
                "they are rotated in pairs; change it or --kv-channels, or use --position-embedding-type none"
            )
        return channels

    @property
    def attention_scale(self) -> float:
        """Factor on the products of queries and keys."""
        scale = self.softmax_scale or 1.0 / math.sqrt(self.head_dim)
        if self.multi_latent_attention and self.position_embedding_type == "yarn":
            scale *= yarn_temperature(self.rope_scaling_factor, self.mscale_all_dim) ** 2
        return scale

    @property
    def latent_epsilon(self) -> float:
        """Epsilon of the norms of latents."""
        return self.latent_norm_epsilon or self.norm_epsilon

    @property
    def rotates_neighbours(self) -> bool:
        """Whether a rotated channel is paired with its neighbour, as always in latent attention."""
        return self.rotary_interleaved or self.multi_latent_attention

    @property
    def yarn_magnitude(self) -> float:
        """YaRN's factor on cos and sin."""
        if self.yarn_mscale is not None:
            return self.yarn_mscale
        above, below = (yarn_temperature(self.rope_scaling_factor, m) for m in (self.mscale, self.mscale_all_dim))
        return above / below

    @property
    def longrope_factors(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """LongRoPE's divisors of the frequencies, of short and of long sequences. Raises ConfigError unless both lists
        have a positive number for each pair of rotated channels.
        """
        pairs = self.rotary_dim // 2
        return (
            channel_factors("--short-factor", self.short_factor, pairs),
            channel_factors("--long-factor", self.long_factor, pairs),
        )

    @property
    def window(self) -> int | None:
        """Number of keys that a query sees in a layer with a sliding window, including its own; None without
        --window-size.
        """
        return keys_in_window(self.window_size)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """`window` of each layer; None for layers with full attention."""
        assert self.num_layers
        return attention_windows(self.window_size, self.window_attn_skip_freq, self.num_layers)

    @property
    def layers_with_rotary(self) -> tuple[bool, ...]:
        """Whether each layer rotates its queries and keys. Raises ConfigError."""
        assert self.num_layers
        if self.no_rope_freq is None or not self.rotary_dim:
            return (self.rotary_dim > 0,) * self.num_layers
        return tuple(not skips for skips in every_layer("--no-rope-freq", self.no_rope_freq, self.num_layers, nth=1))

    @property
    def lora_projections(self) -> tuple[str, ...]:
        """Projections with an adapter; none without --lora-rank."""
        if self.lora_rank is None:
            return ()
        attention = self.latent_projections if self.multi_latent_attention else GROUPED_PROJECTIONS
        attention = (*(DELTA_PROJECTIONS if self.has_delta_net else ()), *attention)
        return lora_projections(self.lora_target_modules, attention=attention, gated=self.gated)

    @property
    def tanh_gelu(self) -> bool:
        """Whether GELU is its tanh approximation. As in Megatron-LM, the default is exact if there is no bias to fuse
        with.
        """
        return self.openai_gelu or (self.bias_gelu_fusion and self.add_bias_linear)

    @property
    def qkv_bias(self) -> bool:
        """Whether the query/key/value projection has a bias."""
        return self.add_bias_linear or self.add_qkv_bias

    @property
    def attn_proj_bias(self) -> bool:
        """Whether the output projection of attention has a bias."""
        return self.add_bias_linear or self.add_attn_proj_bias

    @property
    def mlp_bias(self) -> bool:
        """Whether the projections of the MLP, and of experts, have biases."""
        return self.add_bias_linear or self.add_mlp_bias

    @property
    def router_bias(self) -> bool:
        """Whether the router's linear layer has a bias, as Megatron-LM's has wherever linear layers have one."""
        return self.num_experts is not None and self.add_bias_linear
