"""Megatron-LM's arguments: what is read from them, what is refused by name, and what a model of ours becomes."""

import math

import pytest
import torch

from megatron.base.errors import CheckpointError, ConfigError
from megatron.config.model import ModelConfig
from megatron.core.models.mcore.arguments import arguments_of, flags_beside, model_of, refuse_what_has_no_argument
from megatron.core.models.mcore.delta_arguments import delta_arguments
from megatron.core.models.mcore.form_arguments import form_arguments
from megatron.kernels.ops.rope import rotary_frequencies
from megatron.spec.decoder import decoder_spec, rotary_spec
from tests.unit.models.builds import CPU, DELTA, GPT, LLAMA, LONGROPE
from tests.unit.models.megatron_arguments import ARGUMENTS, megatron_arguments

FIRST, LATEST = "core 0.12", "d98e8a6"
ROPE = {"position_embedding_type": "rope"}
YARN = {"position_embedding_type": "yarn"}


def read(version=LATEST, **changes):
    return model_of(megatron_arguments(version, **changes), "file")


@pytest.mark.parametrize("version", ARGUMENTS)
def test_every_argument_is_decided(version):
    """Whatever its value: none of them is unknown."""
    arguments = megatron_arguments(version)
    assert model_of(arguments, "file").num_layers == 2
    for name in arguments:
        try:
            model_of({**arguments, name: 12345}, "file")
        except CheckpointError as error:
            assert "not known" not in str(error), name


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("mtp_use_repeated_layer", True),
        ("mtp_num_layers", 1),  # beside the table of positions
        ("mtp_num_layers", -1),
        ("is_hybrid_model", True),
        ("hybrid_layer_pattern", "M-M*"),
        ("hybrid_override_pattern", "M-M*"),
        ("heterogeneous_layers_config_path", "layers.json"),
        ("heterogeneous_layers_config_encoded_json", "{}"),
        ("experimental_attention_variant", "gated_delta_net"),
        ("linear_attention_freq", 4),
        ("enable_mhc_connections", True),
        ("spec", ["some.module", "spec"]),
        ("yaml_cfg", "gpt.yaml"),
        ("attention_output_gate", 1),
        ("softmax_type", "learned"),
        ("qk_l2_norm", True),
        ("quick_geglu", 1),
        ("glu_linear_offset", "1"),
        ("activation_func_clamp_value", 0.0),
        ("apply_residual_connection_post_layernorm", True),
        ("mrope_section", [16, 24, 24]),
        ("use_mup", True),
        ("use_te_activation_func", True),
        ("use_transformer_engine_op_fuser", True),
        ("position_embedding_type", "mrope"),
        ("position_embedding_type", "relative"),
        ("normalization", "L2Norm"),
        ("hidden_size", 0),
        ("num_layers", "2"),
        ("num_attention_heads", -4),
        ("layernorm_epsilon", math.nan),
        ("rotary_percent", 0.0),
        ("swiglu", "yes"),
        ("window_size", 7),
    ],
)
def test_what_changes_the_model_is_refused_by_name(name, value):
    with pytest.raises(CheckpointError) as caught:
        read(**{name: value})
    message = str(caught.value)
    assert f"argument {name} is {value!r}" in message and "not known" not in message and "\n" not in message


def test_all_that_is_refused_is_named_at_once():
    with pytest.raises(CheckpointError, match=r"argument qk_l2_norm is True, argument use_mup is True, which is not"):
        read(use_mup=True, qk_l2_norm=True)


def test_what_changes_nothing_passes():
    plain = read()
    assert (
        read(apply_query_key_layer_scaling=True, moe_router_topk=6, mup_width_mult=2.0, lr=3.0, fp8="hybrid") == plain
    )
    assert read(**ROPE, bias_swiglu_fusion=False, swiglu=True) == read(**ROPE, swiglu=True, use_te_activation_func=True)


class TestUnknown:
    def arguments(self, **more):
        return {**megatron_arguments(LATEST), **more}

    def test_on(self):
        with pytest.raises(CheckpointError, match=r"argument a is True, argument b is 0.5, .* --ignore-arguments a b$"):
            model_of(self.arguments(b=0.5, a=True), "file")

    def test_off(self):
        assert model_of(self.arguments(a=False, b=None, c=0, d=[], e=""), "file") == read()

    def test_ignored(self):
        assert model_of(self.arguments(a=True), "file", ignored=("a",)) == read()
        with pytest.raises(CheckpointError, match="argument b is 3, which is not known"):
            model_of(self.arguments(a=True, b=3), "file", ignored=("a",))

    @pytest.mark.parametrize("name", ["use_mup", "hidden_size", "lr", "nowhere"])
    def test_only_what_is_not_known_can_be_ignored(self, name):
        with pytest.raises(ConfigError, match=f"--ignore-arguments {name}: only arguments"):
            model_of(self.arguments(), "file", ignored=(name,))


class TestNorms:
    """Renamed in core 0.16. A newer run that took its arguments from an older checkpoint has both, and reads its
    own."""

    def test_old_names(self):
        model = read(FIRST, norm_epsilon=1e-6, apply_layernorm_1p=True)
        assert model.norm_epsilon == 1e-6 and model.apply_layernorm_1p

    def test_new_names(self):
        model = read(LATEST, layernorm_epsilon=1e-6, layernorm_zero_centered_gamma=True)
        assert model.norm_epsilon == 1e-6 and model.apply_layernorm_1p

    def test_both(self):
        arguments = {
            **megatron_arguments(LATEST, layernorm_epsilon=1e-6),
            "apply_layernorm_1p": True,
            "norm_epsilon": 1e-3,
        }
        model = model_of(arguments, "file")
        assert model.norm_epsilon == 1e-6 and not model.apply_layernorm_1p


class TestGELU:
    @pytest.mark.parametrize("version", [FIRST, LATEST])
    @pytest.mark.parametrize(
        ("arguments", "is_tanh"),
        [
            ({}, True),
            ({"bias_gelu_fusion": False}, False),
            ({"bias_gelu_fusion": False, "openai_gelu": True}, False),  # which core does not read
            ({"add_bias_linear": False, "bias_gelu_fusion": False}, False),
            ({"add_bias_linear": False, "bias_gelu_fusion": True}, False),
        ],
    )
    def test_form(self, version, arguments, is_tanh):
        assert read(version, **arguments).tanh_gelu is is_tanh

    def test_unknown_form(self):
        arguments = megatron_arguments(LATEST)
        del arguments["bias_gelu_fusion"]
        with pytest.raises(CheckpointError, match="do not contain bias_gelu_fusion"):
            model_of(arguments, "file")
        assert model_of({**arguments, "swiglu": True}, "file").swiglu


class TestPositions:
    def test_the_flag_of_old(self):
        assert read(FIRST, use_rotary_position_embeddings=True).position_embedding_type == "rope"

    def test_llama3(self):
        model = read(**ROPE, use_rope_scaling=True, rope_scaling_factor=32.0)
        assert model.use_rope_scaling and model.rope_scaling_factor == 32.0
        assert not read(use_rope_scaling=True).use_rope_scaling, "without rotary positions nothing reads it"

    def test_yarn(self):
        model = read(
            **YARN,
            **{"rotary_scaling_factor": 16.0, "yarn_original_max_position_embeddings": 2048, "yarn_beta_fast": 24.0},
            **{"yarn_beta_slow": 2.0, "mscale": 0.7, "mscale_all_dim": 0.2, "rotary_base": 500000},
        )
        assert (model.rope_scaling_factor, model.rope_scaling_original_max_position_embeddings) == (16.0, 2048)
        assert (model.yarn_beta_fast, model.yarn_beta_slow, model.rotary_base) == (24.0, 2.0, 500000.0)
        temperature = (0.07 * math.log(16) + 1) / (0.02 * math.log(16) + 1)
        assert rotary_frequencies(rotary_spec(model), CPU)[1] == pytest.approx(temperature, rel=1e-12)

    def test_yarns_defaults(self):
        model = read(**YARN)
        assert (model.rope_scaling_factor, model.rope_scaling_original_max_position_embeddings) == (1.0, 4096)
        assert (model.yarn_beta_fast, model.yarn_beta_slow, rotary_frequencies(rotary_spec(model), CPU)[1]) == (
            32.0,
            1.0,
            1.0,
        )

    @pytest.mark.parametrize(
        ("arguments", "problem"),
        [
            ({**YARN, "rotary_percent": 0.5}, "rotary_percent is 0.5 beside YaRN"),
            (
                {**ROPE, "kv_channels": 10, "rotary_percent": 0.5},
                "rotary_percent is 0.5: of head size 10 an odd number",
            ),
            ({**ROPE, "use_rope_scaling": True, "rotary_seq_len_interpolation_factor": 2}, "are both given"),
            ({"window_size": (4, 4)}, "looks ahead"),
            ({"window_size": (4, 0), "window_attn_skip_freq": [1, 0, 1]}, "is for 3 layers"),
            ({"group_query_attention": True, "num_query_groups": 3}, "4 heads cannot share 3"),
            ({"num_attention_heads": 5}, "hidden size 32 is not a multiple of 5"),
        ],
    )
    def test_what_does_not_go_together(self, arguments, problem):
        with pytest.raises(CheckpointError, match=problem):
            read(**arguments)

    def test_windows(self):
        assert read(window_size=(4, 0), window_attn_skip_freq=2).windows == (5, None)
        assert read(window_size=(4, 0), window_attn_skip_freq=[0, 1]).windows == (None, 5)
        assert read(window_size=(-1, -1)).windows == (None, None)


@pytest.mark.parametrize(("version", "size"), [(FIRST, 100), ("core 0.16", 100), (LATEST, 99)])
def test_the_vocabulary_of_a_null_tokenizer(version, size):
    assert read(version, tokenizer_type="NullTokenizer").vocab_size == size


def test_a_vocabulary_that_only_has_its_padded_size():
    assert read(vocab_size=None).vocab_size == 128
    assert model_of(megatron_arguments(LATEST, vocab_size=None), "file", 99).vocab_size == 99
    with pytest.raises(CheckpointError, match="give --true-vocab-size"):
        read(vocab_size=None, padded_vocab_size=None)


SIGMOID = {
    **{"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True, "moe_router_num_groups": 2},
    **{"moe_router_group_topk": 1, "moe_router_topk_scaling_factor": 2.5, "moe_shared_expert_intermediate_size": 16},
}
CLAMPED = {
    "quick_geglu": True,
    "glu_linear_offset": 1.0,
    "activation_func_clamp_value": 7.0,
    "softmax_type": "learnable",
}
EXPORTED = {
    "mixtral": ({**LLAMA, "num_experts": 4}, ["--moe-router-dtype", "fp32"]),
    "qwen2 moe": (
        {
            **{**LLAMA, "num_experts": 4, "moe_layer_freq": "[0,1]", "moe_ffn_hidden_size": 16},
            **{
                "moe_router_pre_softmax": True,
                "moe_shared_expert_intermediate_size": 8,
                "moe_shared_expert_gate": True,
            },
        },
        ["--moe-shared-expert-gate", "--moe-router-dtype", "fp32"],
    ),
    "sigmoid": (
        {**LLAMA, "num_experts": 4, **SIGMOID, "moe_router_dtype": "fp64"},
        ["--moe-router-num-groups", "2", "--moe-router-group-topk", "1", "--moe-router-dtype", "fp64"],
    ),
    "llama": (LLAMA, []),
    "llama 3.1": (
        {**LLAMA, "use_rope_scaling": True, "rope_scaling_factor": 32.0, "rotary_base": 500000.0},
        ["--use-rope-scaling", "--rope-scaling-factor", "32.0"],
    ),
    "qwen": (
        {**LLAMA, "add_qkv_bias": True, "norm_epsilon": 1e-6, "qk_layernorm": True},
        ["--norm-epsilon", "1e-06", "--qk-layernorm"],
    ),
    "some layers without rotary": ({**LLAMA, "no_rope_freq": "2"}, ["--no-rope-freq", "[0,1]"]),
    "interleaved": ({**LLAMA, "rotary_interleaved": True}, []),
    "linear": ({**LLAMA, "rotary_seq_len_interpolation_factor": 4.0}, ["--rotary-seq-len-interpolation-factor", "4"]),
    "yarn": (
        {
            **LLAMA,
            **{**YARN, "rope_scaling_factor": 16.0, "rope_scaling_original_max_position_embeddings": 2048},
            **{"yarn_mscale": 1.5, "yarn_beta_fast": 24.0},
        },
        (
            "--rotary-scaling-factor 16.0 --yarn-original-max-position-embeddings 2048 --yarn-beta-fast 24.0 "
            f"--yarn-beta-slow 1.0 --mscale {0.5 / (0.1 * math.log(16.0))!r} --mscale-all-dim 0.0"
        ).split(),
    ),
    "window": (
        {**LLAMA, "window_size": "7,0", "window_attn_skip_freq": "2"},
        ["--window-size", "7,0", "--window-attn-skip-freq", "[1,0]"],
    ),
    "partly rotary": ({**LLAMA, "kv_channels": 8, "rotary_percent": 0.5}, []),
    "gpt": ({**GPT, "apply_layernorm_1p": True}, ["--apply-layernorm-1p", "--qk-layernorm"]),
    "exact gelu": ({**GPT, "bias_gelu_fusion": False}, ["--qk-layernorm", "--no-bias-gelu-fusion"]),
    "exact gelu, no biases": ({**GPT, "qk_layernorm": False, "add_bias_linear": False}, []),
    "clamped gate, sinks": (
        {**GPT, "qk_layernorm": False, **CLAMPED},
        [
            *("--no-bias-gelu-fusion", "--quick-geglu", "--glu-linear-offset", "1.0"),
            *("--activation-func-clamp-value", "7.0", "--softmax-type", "learnable"),
        ],
    ),
    "squared relu": ({**GPT, "qk_layernorm": False, "squared_relu": True}, ["--no-bias-gelu-fusion"]),
    "delta nets": (
        {**DELTA, "rotary_percent": 0.5},
        [
            *("--apply-layernorm-1p", "--qk-layernorm", "--attention-output-gate"),
            *("--experimental-attention-variant", "gdn", "--linear-conv-kernel-dim", "4"),
            *("--linear-key-head-dim", "6", "--linear-value-head-dim", "10"),
            *("--linear-num-key-heads", "4", "--linear-num-value-heads", "8", "--linear-attention-freq", "[1,0]"),
        ],
    ),
    "no positions": ({**GPT, "qk_layernorm": False, "position_embedding_type": "none"}, []),
}


@pytest.mark.parametrize("name", EXPORTED)
def test_a_model_there_and_back(name):
    fields, flags = EXPORTED[name]
    model = ModelConfig(**fields)
    arguments = arguments_of(model)
    found = model_of(arguments, "file")
    assert arguments_of(found) == arguments and flags_beside(model) == flags
    assert (found.windows, found.num_kv_heads, found.vocab_size) == (
        model.windows,
        model.num_kv_heads,
        model.vocab_size,
    )
    assert found.rotary_interleaved == model.rotary_interleaved
    assert [layer.mlp for layer in decoder_spec(found).layers] == [layer.mlp for layer in decoder_spec(model).layers]
    assert found.layers_with_rotary == model.layers_with_rotary
    assert found.tanh_gelu == model.tanh_gelu or model.gated or model.squared_relu
    assert form_arguments(found) == form_arguments(model)
    if model.rotary_dim:
        for ours, theirs in zip(
            rotary_frequencies(rotary_spec(model), CPU),
            rotary_frequencies(rotary_spec(found), CPU),
            strict=True,
        ):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)


@pytest.mark.parametrize("version", [FIRST, LATEST])
def test_every_argument_that_is_written_is_megatrons(version):
    newer = {
        "moe_shared_expert_gate",
        "layernorm_epsilon",
        "layernorm_zero_centered_gamma",
        "window_size",
        "window_attn_skip_freq",
        "no_rope_freq",
        *CLAMPED,
        *delta_arguments(ModelConfig(**DELTA)),
    }
    older = {"norm_epsilon", "apply_layernorm_1p"}
    for fields, _ in EXPORTED.values():
        names = arguments_of(ModelConfig(**fields)).keys()
        yarn = {name for name in names if name.startswith("yarn_")}
        assert names - ARGUMENTS[version].keys() <= (newer | yarn if version == FIRST else older)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        (
            {**LLAMA, "use_rope_scaling": True, "rope_scaling_original_max_position_embeddings": 4096},
            "--rope-scaling-original-max-position-embeddings 4096",
        ),
        (
            {**LLAMA, "use_rope_scaling": True, "rope_scaling_low_freq_factor": 2.0},
            "--rope-scaling-low-freq-factor 2.0",
        ),
        (
            {**LLAMA, "use_rope_scaling": True, "rope_scaling_high_freq_factor": 8.0},
            "--rope-scaling-high-freq-factor 8.0",
        ),
        ({**LLAMA, "rotary_seq_len_interpolation_factor": 1.5}, "--rotary-seq-len-interpolation-factor 1.5"),
        ({**LLAMA, **YARN, "kv_channels": 8, "rotary_percent": 0.5}, "--rotary-percent 0.5"),
        ({**LLAMA, **YARN, "rope_scaling_factor": 1.0, "yarn_mscale": 1.5}, "--yarn-mscale 1.5"),
        ({**LLAMA, "kv_channels": 6, "rotary_percent": 0.5}, "--rotary-percent 0.5 of head size 6"),
        (
            {**LLAMA, "window_size": "3,0", "window_attn_skip_freq": "2", "rotary_base_local": 500.0},
            "--rotary-base-local 500.0",
        ),
        ({**LLAMA, **LONGROPE}, "--position-embedding-type longrope"),
        (
            {**LLAMA, "position_embedding_type": "alibi", "embed_layernorm": True},
            "--embed-layernorm, --position-embedding-type alibi",
        ),
        ({**LLAMA, "dynamic_ntk_factor": 2.0}, "--dynamic-ntk-factor 2.0"),
        (
            {**LLAMA, "position_embedding_type": "yarn", "llama_4_scaling_beta": 0.1},
            "--llama-4-scaling-beta 0.1",
        ),
        ({**LLAMA, "qk_layernorm": True, "qk_layernorm_after_rope": True}, "--qk-layernorm-after-rope"),
        ({**GPT, "add_bias_linear": False, "openai_gelu": True}, "--openai-gelu"),
        ({**LLAMA, "softmax_scale": 0.25}, "--softmax-scale 0.25"),
        ({**LLAMA, "attn_logit_softcapping": 50.0}, "--attn-logit-softcapping 50.0"),
        ({**LLAMA, "final_logit_softcapping": 30.0}, "--final-logit-softcapping 30.0"),
        ({**LLAMA, "swiglu": False, "geglu": True}, "--geglu"),
        ({**LLAMA, "embedding_multiplier_scale": 12.0}, "--embedding-multiplier-scale 12.0"),
        (
            {**LLAMA, "residual_multiplier": 0.5, "logits_scaling": 8.0},
            "--residual-multiplier 0.5, --logits-scaling 8.0",
        ),
        ({**DELTA, "normalization": "LayerNorm"}, "--normalization LayerNorm"),
        (
            {**DELTA, "swiglu": False, "squared_relu": True},
            "--experimental-attention-variant gdn without --swiglu",
        ),
        (
            {
                **LLAMA,
                "normalization": "RMSNorm",
                "swiglu": True,
                "experimental_attention_variant": "kda",
                "linear_attention_freq": "2",
            },
            "--experimental-attention-variant kda",
        ),
        ({**LLAMA, "post_norm": True}, "--post-norm"),
        ({**GPT, "norm_parameters": "weight"}, "--norm-parameters weight"),
        (
            {**LLAMA, "qk_layernorm": True, "qk_layernorm_weight_per_head": True},
            "--qk-layernorm-weight-per-head",
        ),
        ({**LLAMA, "norm_parameters": "none", "clip_qkv": 8.0}, "--norm-parameters none, --clip-qkv 8.0"),
        ({**LLAMA, "parallel_residual": True}, "--parallel-residual"),
        ({**LLAMA, "parallel_residual": True, "shared_norm": True}, "--parallel-residual, --shared-norm"),
        ({**LLAMA, "post_norm": True, "pre_norm": False}, "--no-pre-norm, --post-norm"),
        ({**LLAMA, "add_output_layer_bias": True}, "--add-output-layer-bias"),
    ],
)
def test_what_has_no_argument_there_is_named(fields, named):
    with pytest.raises(ConfigError) as caught:
        refuse_what_has_no_argument(ModelConfig(**fields))
    message = str(caught.value)
    assert message.startswith(f"--saver mcore: Megatron-LM has no argument for {named}") and "\n" not in message


FLAT = {"num_experts": 8, "add_bias_linear": False}


class TestExperts:
    @pytest.mark.parametrize("version", ARGUMENTS)
    def test_every_argument_is_decided(self, version):
        """With experts those of experts count, and none of them is unknown."""
        arguments = megatron_arguments(version, **FLAT)
        assert model_of(arguments, "file").num_experts == 8
        for name in arguments:
            try:
                model_of({**arguments, name: 12345}, "file")
            except CheckpointError as error:
                assert "not known" not in str(error), name
        with pytest.raises(CheckpointError, match="argument moe_later is True, which is not known"):
            model_of({**arguments, "moe_later": True}, "file")

    def test_all_of_them(self):
        found = read(
            **FLAT,
            **{"moe_layer_freq": [0, 1], "moe_ffn_hidden_size": 24, "moe_router_topk": 3, "moe_router_dtype": "fp64"},
            **{"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True},
            **{"moe_router_num_groups": 4, "moe_router_group_topk": 2, "moe_router_topk_scaling_factor": 2.5},
            **{"moe_shared_expert_intermediate_size": 16, "moe_shared_expert_gate": True},
            **{"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.1, "moe_grouped_gemm": True},
        )
        assert found.moe_layers == (False, True) and found.moe_ffn_dim == 24 and found.moe_router_dtype == "fp64"
        router = decoder_spec(found).layers[1].mlp.router
        assert (router.topk, router.score_function, router.has_bias, router.scaling) == (3, "sigmoid", True, 2.5)
        assert (router.groups, router.group_topk, router.group_score, router.normalized) == (4, 2, "sum", True)
        assert decoder_spec(found).layers[1].mlp.shared.width == 16 and found.moe_shared_expert_gate

    def test_defaults(self):
        """Without --moe-router-dtype theirs has logits of the model's dtype."""
        found = read(**FLAT, moe_layer_freq=1)
        assert found.moe_layers == (True, True) and found.moe_router_dtype == "fp32" and found.normalizes_topk
        assert read(**FLAT, moe_layer_freq=2).moe_layers == (True, False)
        assert not read(**FLAT, moe_router_pre_softmax=True).normalizes_topk

    @pytest.mark.parametrize(("topk", "score"), [(1, "sigmoid"), (2, "softmax")])
    def test_sinkhorn_decides_about_the_scores(self, topk, score):
        ignored = {"moe_router_num_groups": 4, "moe_router_group_topk": 2, "moe_router_topk_scaling_factor": 2.5}
        found = read(**FLAT, **ignored, moe_router_load_balancing_type="sinkhorn", moe_router_topk=topk)
        router = decoder_spec(found).layers[1].mlp.router
        assert (router.score_function, router.normalized, router.groups, router.scaling) == (score, False, 1, 1.0)

    @pytest.mark.parametrize(
        ("name", "value", "reason"),
        [
            ("num_experts", 0, "not supported"),
            ("moe_router_topk", 9, "and there are 8 experts"),
            ("moe_router_dtype", "bf16", "not supported"),
            ("moe_router_score_function", "sqrtsoftplus", "not supported"),
            ("moe_router_load_balancing_type", ["aux_loss", "quantile_balancing"], "and quantile_balancing chooses"),
            ("moe_router_enable_expert_bias", True, "not supported with softmax scores"),
            ("moe_router_num_groups", 4, "and moe_router_group_topk is None"),
            ("moe_shared_expert_gate", True, "and there is no shared expert"),
            ("moe_layer_freq", "2", "not supported"),
            ("moe_latent_size", 16, "not supported"),
            ("moe_apply_probs_on_input", True, "not supported"),
            ("moe_input_jitter_eps", 0.1, "not supported"),
            ("moe_mlp_glu_interleave_size", 32, "not supported"),
            ("moe_shared_expert_glu_interleave_size", 32, "not supported"),
            ("moe_extended_tp", True, "not supported"),
            ("moe_single_grouped_weight", True, "not supported"),
        ],
    )
    def test_what_is_not_here_is_refused_by_name(self, name, value, reason):
        with pytest.raises(CheckpointError) as caught:
            model_of({**megatron_arguments(LATEST, **FLAT), name: value}, "file")
        message = str(caught.value)
        assert f"argument {name} is {value!r}" in message and reason in message and "\n" not in message

    @pytest.mark.parametrize("groups", [(3, 1), (4, 5), (4, 1)], ids=["8 experts", "of 4 groups", "2 in one"])
    def test_groups_that_do_not_fit(self, groups):
        number, chosen = groups
        with pytest.raises(CheckpointError, match=f"moe_router_num_groups is {number}, which does not fit 8 experts"):
            read(**FLAT, moe_router_topk=3, moe_router_num_groups=number, moe_router_group_topk=chosen)

    def test_layers_that_do_not_fit(self):
        with pytest.raises(CheckpointError, match=r"file: --moe-layer-freq \[1, 0, 1\] is for 3 layers"):
            read(**FLAT, moe_layer_freq=[1, 0, 1])

    @pytest.mark.parametrize(
        ("fields", "named"),
        [
            ({"moe_router_topk_normalization": "off"}, "--moe-router-topk-normalization off"),
            ({"moe_router_enable_expert_bias": True}, "--moe-router-enable-expert-bias"),
            ({"moe_router_pre_softmax": True, "moe_router_topk_normalization": "on"}, "--moe-router-topk-norm"),
            (
                {"moe_router_num_groups": 2, "moe_router_group_topk": 1, "moe_router_group_score": "max"},
                "--moe-router-group-score max",
            ),
        ],
    )
    def test_what_has_no_argument_there_is_named(self, fields, named):
        with pytest.raises(ConfigError, match=f"Megatron-LM has no argument for {named}"):
            refuse_what_has_no_argument(ModelConfig(**LLAMA, num_experts=4, **fields))

    def test_the_same_by_another_name(self):
        """The best expert of a group is the sum of its best one; a normalization that follows anyway."""
        fields = {"moe_router_num_groups": 2, "moe_router_group_topk": 2, "moe_router_group_score": "max"}
        refuse_what_has_no_argument(ModelConfig(**LLAMA, num_experts=4, moe_router_topk_normalization="on", **fields))
