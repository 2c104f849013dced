"""The whole decoder as data: its layers, its two ends, and every parameter by name.

`decoder_spec` is the one place that turns a ModelConfig into layers. Modules, parameter counts, the memory plan, FLOPs,
adapters, the name tables of other formats and the comparison of two models are all derived from its result.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from megatron.base.box import Box
from megatron.config.layer_forms import ALL, LEARNABLE, NONE
from megatron.config.model import ModelConfig
from megatron.config.positions import ALIBI
from megatron.schedule.partition import Stage
from megatron.spec.attention import (
    ALIBI_CHANNELS,
    AlibiSpec,
    AttentionSpec,
    CoreSpec,
    DynamicNtkScaling,
    Llama3Scaling,
    LongRopeScaling,
    QueryScaling,
    RotarySpec,
    SinksSpec,
    YarnScaling,
    longrope_magnitude,
    qkv_linear,
)
from megatron.spec.delta_net import (
    ConvolutionSpec,
    DecaySpec,
    DeltaCoreSpec,
    DeltaNetSpec,
    delta_in_proj,
    delta_latents,
)
from megatron.spec.latent_attention import LatentAttentionSpec, down_linear, up_linear
from megatron.spec.linear import COLUMN, REPLICATED, ROW, LinearSpec, Projection
from megatron.spec.lora import LoraSpec, adapter_names
from megatron.spec.mlp import MLPSpec, XieluSpec, activation_of, gate_form, mlp_spec
from megatron.spec.moe import ExpertsSpec, GateSpec, MoESpec, RouterSpec
from megatron.spec.norm import RMS_NORM, NormSpec
from megatron.spec.parameter import HEADS, SEQUENCE, Init, ParamSpec, Shard

# A module with parameters.
PartSpec = (
    LinearSpec | NormSpec | XieluSpec | RouterSpec | ExpertsSpec | GateSpec | SinksSpec | ConvolutionSpec | DecaySpec
)
WORD_EMBEDDINGS, POSITION_EMBEDDINGS = "embedding.word_embeddings.weight", "embedding.position_embeddings.weight"
EMBEDDING_NORM = "embedding.embedding_layernorm"
OUTPUT_LAYER, OUTPUT_BIAS = "output_layer.weight", "output_layer.bias"


@dataclass(frozen=True)
class LayerSpec:
    """Residual layer: x + post_norm(attention(norm(x))), then x + post_norm(mlp(norm(x))).

    attention: or a gated delta net in its place. mlp: one MLP, or a router and experts. A norm that is None is left
    out. residual_multiplier, dropout: on both terms that are added to x. parallel: the MLP reads x, as attention does,
    and both are added to it. In a parallel layer without pre_mlp_norm the MLP reads the output of input_norm.
    """

    input_norm: NormSpec | None
    attention: AttentionSpec | LatentAttentionSpec | DeltaNetSpec
    post_attention_norm: NormSpec | None
    pre_mlp_norm: NormSpec | None
    mlp: MLPSpec | MoESpec
    post_mlp_norm: NormSpec | None
    dropout: float = field(compare=False)
    residual_multiplier: float = 1.0
    parallel: bool = False

    @property
    def shares_norm(self) -> bool:
        """Whether attention and MLP read the output of one norm."""
        return self.parallel and self.pre_mlp_norm is None

    def parts(self) -> Iterator[tuple[str, PartSpec]]:
        """(path in the layer, spec) of the modules with parameters, in the order in which they are made."""
        if self.input_norm is not None:
            yield "input_layernorm", self.input_norm
        yield from ((f"self_attention.{path}", spec) for path, spec in self.attention.parts())
        if self.post_attention_norm is not None:
            yield "post_self_attn_layernorm", self.post_attention_norm
        if self.pre_mlp_norm is not None:
            yield "pre_mlp_layernorm", self.pre_mlp_norm
        yield from ((f"mlp.{path}", spec) for path, spec in self.mlp.parts())
        if self.post_mlp_norm is not None:
            yield "post_mlp_layernorm", self.post_mlp_norm

    def linears(self) -> dict[str, LinearSpec]:
        """Path in the layer -> linear layer."""
        return {path: spec for path, spec in self.parts() if isinstance(spec, LinearSpec)}

    @property
    def multiply_adds(self) -> int:
        """Per token, of all products with weights; of a token's own experts only."""
        chosen = self.mlp.multiply_adds if isinstance(self.mlp, MoESpec) else 0
        return chosen + sum(linear.multiply_adds for linear in self.linears().values())

    def parameters(self) -> tuple[tuple[str, ParamSpec], ...]:
        """(name in the layer, parameter), in the order of the module."""
        return self._parameters

    @functools.cached_property
    def _parameters(self) -> tuple[tuple[str, ParamSpec], ...]:
        return tuple(
            (f"{path}.{name}", parameter) for path, spec in self.parts() for name, parameter in spec.parameters()
        )


@dataclass(frozen=True)
class PredictionSpec:
    """Prediction of one further token (DeepSeek-V3, arXiv 2412.19437, section 2.2): from the hidden states of the depth
    before and the embeddings of the token that it predicts, norm(layer(projection([norm(embedding), norm(hidden)]))).

    Embedding and head are those of the decoder, the layer is like its last one.
    """

    embedding_norm: NormSpec
    hidden_norm: NormSpec
    projection: LinearSpec
    layer: LayerSpec
    final_norm: NormSpec

    def parts(self) -> Iterator[tuple[str, PartSpec]]:
        """(path, spec) of the modules with parameters, in the order in which they are made."""
        yield "enorm", self.embedding_norm
        yield "hnorm", self.hidden_norm
        yield "eh_proj", self.projection
        yield from ((f"transformer_layer.{path}", spec) for path, spec in self.layer.parts())
        yield "final_layernorm", self.final_norm

    def parameters(self) -> Iterator[tuple[str, ParamSpec]]:
        """(name in the module, parameter), in the order of the module."""
        for path, spec in self.parts():
            yield from ((f"{path}.{name}", parameter) for name, parameter in spec.parameters())


@dataclass(frozen=True)
class EmbeddingSpec:
    """Token embedding [rows, h], sharded by rows, and a learned position table [positions, h], which is replicated.

    multiplier: factor on the token embeddings, rounded to their dtype, before positions are added. norm: of the sum, or
    None.
    """

    words: ParamSpec
    positions: ParamSpec | None
    dropout: float = field(compare=False)
    multiplier: float = 1.0
    norm: NormSpec | None = None


@dataclass(frozen=True)
class Placed:
    """A parameter of a pipeline rank.

    stage: the one that uses it; None where two stages of the rank do. on_both_ends: another pipeline rank has a copy.
    """

    spec: ParamSpec
    stage: int | None
    on_both_ends: bool = False


@dataclass(frozen=True)
class DecoderSpec:
    """Embedding, layers, final norm and output layer.

    tied: the output layer shares the weight of the word embeddings, and no bias. vocabulary: token ids, without padding
    rows. predictions: of further tokens in training, on the stage of the head. softmax_size: rows of the output layer
    that take part in the softmax. logits_scaling: its results are divided by this. logits_softcap: then they are capped
    smoothly at it; None: they are not. query_scaling: of the queries of all layers.
    """

    embedding: EmbeddingSpec
    layers: tuple[LayerSpec, ...]
    final_norm: NormSpec
    output: LinearSpec
    tied: bool
    vocabulary: int
    softmax_size: int
    lora: LoraSpec | None = None
    logits_scaling: float = 1.0
    logits_softcap: float | None = None
    predictions: tuple[PredictionSpec, ...] = ()
    query_scaling: QueryScaling | None = None

    def layer(self, number: int) -> LayerSpec:
        """Returns a layer by its number in the whole model, from 0; those of predictions follow the decoder's."""
        first = len(self.layers)
        return self.layers[number] if number < first else self.predictions[number - first].layer

    @functools.cached_property
    def rotaries(self) -> tuple[RotarySpec, ...]:
        """The rotary embeddings of the layers that have one, each once, in the order of the layers."""
        embeddings = (layer.attention.rotary for layer in self.layers)
        return tuple(dict.fromkeys(rotary for rotary in embeddings if rotary is not None))

    @property
    def hidden_size(self) -> int:
        """Channels of the hidden states."""
        return self.final_norm.size

    @property
    def first_core(self) -> CoreSpec:
        """The core of the first layer with attention, which is that of all of them but for windows."""
        cores = (layer.attention.core for layer in self.layers)
        return next(core for core in cores if isinstance(core, CoreSpec))

    @functools.cached_property
    def position_channels(self) -> int:
        """Channels of positions behind those of each key, in the layers with attention; 0 without ALiBi."""
        cores = (layer.attention.core for layer in self.layers)
        return max((core.position_channels for core in cores if isinstance(core, CoreSpec)), default=0)

    @property
    def embeds_at_both_ends(self) -> bool:
        """Whether the stage with the head uses the word embeddings, too: in its head, or for predictions."""
        return self.tied or bool(self.predictions)

    def rank_parameters(self, stages: Sequence[Stage]) -> dict[str, Placed]:
        """Name -> parameter of a pipeline rank that holds `stages`, in the order of GPTModel; adapters are left out."""
        first = next((stage.number for stage in stages if stage.embedding), None)
        last = next((stage.number for stage in stages if stage.head), None)
        parameters: dict[str, Placed] = {}
        if first is not None or (last is not None and self.embeds_at_both_ends):
            users = {number for number in (first, last if self.embeds_at_both_ends else None) if number is not None}
            copied = self.embeds_at_both_ends and (first is None or last is None)
            parameters[WORD_EMBEDDINGS] = Placed(self.embedding.words, users.pop() if len(users) == 1 else None, copied)
        if first is not None and self.embedding.positions is not None:
            parameters[POSITION_EMBEDDINGS] = Placed(self.embedding.positions, first)
        if first is not None and self.embedding.norm is not None:
            for name, parameter in self.embedding.norm.parameters():
                parameters[f"{EMBEDDING_NORM}.{name}"] = Placed(parameter, first)
        for stage in stages:
            for number in stage.layers:
                for name, parameter in self.layers[number].parameters():
                    parameters[f"decoder.layers.{number}.{name}"] = Placed(parameter, stage.number)
        if last is not None:
            for name, parameter in self.final_norm.parameters():
                parameters[f"decoder.final_layernorm.{name}"] = Placed(parameter, last)
            if not self.tied:
                parameters[OUTPUT_LAYER] = Placed(self.output.weight, last)
            if self.output.bias is not None:
                parameters[OUTPUT_BIAS] = Placed(self.output.bias, last)
            for depth, prediction in enumerate(self.predictions):
                for name, parameter in prediction.parameters():
                    parameters[f"mtp.layers.{depth}.{name}"] = Placed(parameter, last)
        return parameters

    def rank_adapters(self, stages: Sequence[Stage]) -> dict[str, Placed]:
        """Name -> parameter of the adapters of a pipeline rank that holds `stages`; none without adapters."""
        if self.lora is None:
            return {}
        return {
            f"decoder.layers.{number}.{name}": Placed(parameter, stage.number)
            for stage in stages
            for number in stage.layers
            for path, linear in self.layers[number].linears().items()
            for projection in linear.projections
            if projection.name in self.lora.projections
            for name, parameter in zip(
                adapter_names(path, projection.name), self.lora.pair(linear, projection), strict=True
            )
        }

    def parameters(self) -> dict[str, ParamSpec]:
        """Name -> parameter of the whole model."""
        whole = (Stage(0, range(len(self.layers)), embedding=True, head=True),)
        return {name: placed.spec for name, placed in self.rank_parameters(whole).items()}


@functools.lru_cache(maxsize=64)
def decoder_spec(model: ModelConfig) -> DecoderSpec:
    """The decoder that the flags describe. The vocabulary and the range of learned positions must be known."""
    assert model.num_layers and model.hidden_size and model.vocab_size
    hidden, init = model.hidden_size, _init(model, 1.0)
    positions = None
    if model.position_embedding_type == "learned_absolute":
        assert model.max_position_embeddings
        positions = ParamSpec((model.max_position_embeddings, hidden), init, input_sharding=SEQUENCE)
    words = ParamSpec((model.padded_vocab_size, hidden), init, (Shard("tp", 0),), embedding_or_output=True)
    rows = (model.padded_vocab_size,)
    head = (Projection("lm_head", Box((0,), rows)),)
    layers = tuple(
        _layer(model, None if has_delta_net else window, has_rotary, has_experts, has_delta_net)
        for window, has_rotary, has_experts, has_delta_net in zip(
            model.windows, model.layers_with_rotary, model.moe_layers, model.delta_layers, strict=True
        )
    )
    return DecoderSpec(
        EmbeddingSpec(
            words,
            positions,
            model.hidden_dropout,
            model.embedding_multiplier_scale,
            _norm(model, hidden, SEQUENCE) if model.embed_layernorm else None,
        ),
        layers,
        _norm(model, hidden, SEQUENCE),
        LinearSpec(hidden, rows, COLUMN, head, model.add_output_layer_bias, init, embedding_or_output=True),
        not model.untie_embeddings_and_output_weights,
        model.vocab_size,
        model.softmax_size,
        LoraSpec(model.lora_rank, model.lora_alpha, model.lora_projections, model.lora_dropout)
        if model.lora_rank
        else None,
        model.logits_scaling,
        model.final_logit_softcapping,
        (_prediction(model, layers[-1]),) * model.mtp_num_layers,
        None
        if model.llama_4_scaling_beta is None
        else QueryScaling(model.llama_4_scaling_beta, model.rope_scaling_original_max_position_embeddings),
    )


def _prediction(model: ModelConfig, layer: LayerSpec) -> PredictionSpec:
    assert model.hidden_size
    h = model.hidden_size
    norm = _norm(model, h, SEQUENCE)
    outputs = (Projection("eh_proj", Box((0,), (h,))),)
    return PredictionSpec(norm, norm, LinearSpec(2 * h, (h,), REPLICATED, outputs, init=_init(model, 1.0)), layer, norm)


def attention_core(model: ModelConfig, window: int | None) -> CoreSpec:
    """Attention between the projections of a layer in which a query sees `window` keys at most."""
    assert model.num_attention_heads
    position_channels = ALIBI_CHANNELS if model.position_embedding_type == ALIBI else 0
    return CoreSpec(
        model.num_attention_heads,
        model.num_kv_heads,
        model.head_dim + position_channels,
        model.v_head_dim if model.multi_latent_attention else model.head_dim,
        window,
        model.attention_scale,
        model.attn_logit_softcapping,
        model.attention_dropout,
        model.softmax_type,
        position_channels,
    )


@functools.lru_cache(maxsize=64)
def _layer(
    model: ModelConfig, window: int | None, has_rotary: bool, has_experts: bool, has_delta_net: bool
) -> LayerSpec:
    assert model.num_layers and model.hidden_size and model.num_attention_heads
    h, scale = model.hidden_size, output_scale(model.num_layers) if model.apply_output_scale_init else 1.0
    init, output_init = _init(model, 1.0), _init(model, scale)
    core, rotary = attention_core(model, window), rotary_spec(model, local=window is not None) if has_rotary else None
    attention: AttentionSpec | LatentAttentionSpec | DeltaNetSpec = (
        _delta_net(model, init, output_init)
        if has_delta_net
        else (_latent_attention if model.multi_latent_attention else _grouped_attention)(
            model, core, rotary, init, output_init
        )
    )
    mlp = _moe(model, init, output_init) if has_experts else _mlp(model, model.ffn_dim, init, output_init)
    norm = _norm(model, h, SEQUENCE)
    before, after = norm if model.pre_norm else None, norm if model.post_norm else None
    return LayerSpec(
        before,
        attention,
        after,
        None if model.shared_norm else before,
        mlp,
        after,
        model.hidden_dropout,
        model.residual_multiplier,
        model.parallel_residual,
    )


def _grouped_attention(
    model: ModelConfig, core: CoreSpec, rotary: RotarySpec | None, init: Init, output_init: Init
) -> AttentionSpec:
    assert model.hidden_size
    q_norm, k_norm = (_heads_norm(model, number) for number in (core.heads, core.groups))
    return AttentionSpec(
        qkv_linear(model.hidden_size, core, bias=model.qkv_bias, init=init, gated=model.attention_output_gate),
        _output_projection(model, core, output_init),
        q_norm,
        k_norm,
        rotary,
        core,
        model.attention_output_gate,
        SinksSpec(core.heads, init) if core.softmax_type == LEARNABLE else None,
        model.clip_qkv,
        AlibiSpec(core.heads, model.alibi_bias_max, 1.0 if model.scale_alibi_bias else 1.0 / core.scale)
        if core.position_channels
        else None,
        rotary is not None and q_norm is not None and model.qk_layernorm_after_rope,
    )


def _delta_net(model: ModelConfig, init: Init, output_init: Init) -> DeltaNetSpec:
    assert model.hidden_size
    core = DeltaCoreSpec(
        model.linear_num_key_heads,
        model.linear_num_value_heads,
        model.linear_key_head_dim,
        model.linear_value_head_dim,
        model.linear_conv_kernel_dim,
        model.decays_by_channel,
    )
    out, name = (model.hidden_size,), "o_proj" if core.by_channel else "out_proj"
    return DeltaNetSpec(
        delta_in_proj(model.hidden_size, core, init),
        ConvolutionSpec(core.key_heads, core.convolved, core.taps),
        DecaySpec(core.value_heads, core.qk_dim if core.by_channel else None),
        NormSpec(core.v_dim, RMS_NORM, model.norm_epsilon, HEADS),
        LinearSpec(core.output_channels, out, ROW, (Projection(name, Box((0,), out)),), init=output_init),
        core,
        delta_latents(model.hidden_size, core, init) if core.by_channel else None,
    )


def _latent_attention(
    model: ModelConfig, core: CoreSpec, rotary: RotarySpec | None, init: Init, output_init: Init
) -> LatentAttentionSpec:
    h, queries, latent = model.hidden_size, model.q_lora_rank, model.kv_lora_rank
    assert h and latent
    rotated, heads = model.qk_pos_emb_head_dim, core.heads
    return LatentAttentionSpec(
        None if queries is None else down_linear("q_a_proj", h, queries, init),
        None if queries is None else _latent_norm(model, queries),
        up_linear("q_proj", h, heads, core.qk_dim, init)
        if queries is None
        else up_linear("q_b_proj", queries, heads, core.qk_dim, init),
        down_linear("kv_a_proj_with_mqa", h, latent + rotated, init),
        _latent_norm(model, latent),
        up_linear("kv_b_proj", latent, heads, core.qk_dim - rotated + core.v_dim, init),
        _output_projection(model, core, output_init),
        rotary,
        rotated,
        core,
        model.indexer_topk,
    )


def _output_projection(model: ModelConfig, core: CoreSpec, init: Init) -> LinearSpec:
    assert model.hidden_size
    out = (model.hidden_size,)
    return LinearSpec(
        core.output_channels,
        out,
        ROW,
        (Projection("o_proj", Box((0,), out)),),
        has_bias=model.attn_proj_bias,
        init=init,
    )


def _mlp(model: ModelConfig, width: int, init: Init, output_init: Init) -> MLPSpec:
    assert model.hidden_size
    return mlp_spec(
        model.hidden_size,
        width,
        activation_of(model),
        gated=model.gated,
        bias=model.mlp_bias,
        init=init,
        output_init=output_init,
        gate=gate_form(model),
    )


def _moe(model: ModelConfig, init: Init, output_init: Init) -> MoESpec:
    assert model.hidden_size and model.num_experts
    router = RouterSpec(
        model.hidden_size,
        model.num_experts,
        model.moe_router_topk,
        model.moe_router_score_function,
        model.normalizes_topk,
        model.moe_router_topk_scaling_factor or 1.0,
        model.moe_router_num_groups or 1,
        model.moe_router_group_topk or 1,
        model.moe_router_group_score,
        model.groups_by_logits,
        model.moe_router_dtype,
        model.moe_router_enable_expert_bias,
        init,
        linear_bias=model.router_bias,
    )
    activation, gated = activation_of(model), model.gated
    experts = ExpertsSpec(
        model.hidden_size,
        model.num_experts,
        model.moe_ffn_dim,
        activation,
        gated,
        init,
        output_init,
        has_bias=model.mlp_bias,
        gate=gate_form(model),
    )
    width = model.moe_shared_expert_intermediate_size
    shared = None if width is None else _mlp(model, width, init, output_init)
    gate = GateSpec(model.hidden_size, init) if model.moe_shared_expert_gate else None
    return MoESpec(router, experts, shared, gate)


def output_scale(num_layers: int) -> float:
    """Factor on the initial weights that write to the residual stream: 1 / sqrt(2 x layers) (GPT-2)."""
    return 1.0 / math.sqrt(2.0 * num_layers)


def _init(model: ModelConfig, scale: float) -> Init:
    if model.init_method_xavier_uniform:
        return Init("xavier", 1.0)
    return Init("normal", model.init_method_std * scale)


def _norm(model: ModelConfig, size: int, input_sharding: str) -> NormSpec:
    return NormSpec(
        size,
        model.normalization,
        model.norm_epsilon,
        input_sharding,
        model.apply_layernorm_1p,
        has_weight=model.norm_parameters != NONE,
        has_bias=model.norm_parameters == ALL,
    )


def _heads_norm(model: ModelConfig, heads: int) -> NormSpec | None:
    """The norm of queries or keys of this many heads."""
    if not model.qk_layernorm:
        return None
    norm = _norm(model, model.head_dim, HEADS)
    if model.qk_layernorm_weight_per_head:
        return dataclasses.replace(norm, heads=heads, per_head=True)
    return dataclasses.replace(norm, heads=heads) if model.qk_layernorm_across_heads else norm


def _latent_norm(model: ModelConfig, channels: int) -> NormSpec | None:
    if not model.qk_layernorm:
        return None
    norm = _norm(model, channels, SEQUENCE)
    return dataclasses.replace(norm, epsilon=model.latent_epsilon)


def rotary_spec(model: ModelConfig, *, local: bool = False) -> RotarySpec | None:
    """The rotary embedding that the flags describe, or None. local: that of a layer with a sliding window."""
    if not model.rotary_dim:
        return None
    if local and model.rotary_base_local is not None:
        return RotarySpec(model.rotary_dim, model.rotary_base_local, model.rotates_neighbours)
    original, factor = model.rope_scaling_original_max_position_embeddings, model.rope_scaling_factor
    llama3 = yarn = longrope = dynamic = None
    if model.use_rope_scaling:
        llama3 = Llama3Scaling(
            factor, model.rope_scaling_low_freq_factor, model.rope_scaling_high_freq_factor, original
        )
    if model.position_embedding_type == "yarn":
        yarn = YarnScaling(
            factor,
            model.yarn_beta_fast,
            model.yarn_beta_slow,
            original,
            model.yarn_magnitude,
            model.yarn_correction_range_round_to_int,
        )
    if model.position_embedding_type == "longrope":
        magnitude = model.longrope_mscale
        if magnitude is None:
            # A plan of the memory does not know the context, and needs no magnitude.
            magnitude = longrope_magnitude((model.max_position_embeddings or original) / original, original)
        longrope = LongRopeScaling(*model.longrope_factors, original, magnitude)
    if model.dynamic_ntk_factor is not None and model.max_position_embeddings is not None:
        dynamic = DynamicNtkScaling(model.dynamic_ntk_factor, model.max_position_embeddings)
    return RotarySpec(
        model.rotary_dim,
        model.rotary_base,
        model.rotates_neighbours,
        model.rotary_seq_len_interpolation_factor,
        llama3,
        yarn,
        longrope,
        dynamic,
    )
