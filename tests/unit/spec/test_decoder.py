"""The description of the decoder against the modules that are built from it."""

import dataclasses
import itertools

import pytest

from megatron.config.model import ModelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.parameter import local_parameters
from megatron.schedule.partition import Stage, partition
from megatron.spec.decoder import decoder_spec
from megatron.spec.parameter import local_shape
from tests import pool
from tests.unit.models.builds import FACTORS, GEMMA2, GPT, LLAMA, LONGROPE, make_build

VARIANTS = {
    "llama": LLAMA,
    "gpt": GPT,
    "tied": {**LLAMA, "untie_embeddings_and_output_weights": False},
    "qk norm": {**LLAMA, "qk_layernorm": True, "add_qkv_bias": True},
    "some layers without rotary": {**LLAMA, "no_rope_freq": "2", "rotary_percent": 0.5, "rotary_interleaved": True},
    "norms on both sides": {**GPT, "post_norm": True},
    "parallel": {**GPT, "parallel_residual": True},
    "one norm": {**GPT, "parallel_residual": True, "shared_norm": True},
    "norms with a weight, clipped": {**GPT, "norm_parameters": "weight", "clip_qkv": 8.0},
    "weights per head": {**LLAMA, "qk_layernorm": True, "qk_layernorm_weight_per_head": True},
    "norms without parameters": {**LLAMA, "norm_parameters": "none", "qk_layernorm": True},
    "norms behind": {**LLAMA, "pre_norm": False, "post_norm": True},
    "heads normed together": {**LLAMA, "qk_layernorm": True, "qk_layernorm_across_heads": True},
    "longrope": {**LLAMA, **LONGROPE},
    "squared relu": {**GPT, "squared_relu": True, "add_bias_linear": False, "apply_layernorm_1p": True},
    "xielu": {**GPT, "xielu": True},
    "factors": {**LLAMA, **FACTORS},
    "gemma 2": GEMMA2,
    "predictions": {**LLAMA, "mtp_num_layers": 2},
    "output bias": {**LLAMA, "add_output_layer_bias": True},
    "predictions, tied, output bias": {
        **LLAMA,
        "mtp_num_layers": 1,
        "untie_embeddings_and_output_weights": False,
        "add_output_layer_bias": True,
    },
}


@pytest.mark.parametrize("fields", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("stages", [1, 2])
def test_names_shapes_and_places_are_those_of_the_modules(fields, stages):
    build = make_build(fields, pool.groups())
    spec = decoder_spec(build.config)
    for stage in partition(build.config.num_layers, range(stages)):
        model = GPTModel(build, [stage])
        made, described = local_parameters(model), spec.rank_parameters([stage])
        assert list(made) == list(described)
        for name, parameter in made.items():
            assert parameter.info.spec == described[name].spec
            assert tuple(parameter.shape) == local_shape(described[name].spec, {"tp": 1, "ep": 1, "etp": 1})
            assert parameter.info.on_both_ends == described[name].on_both_ends


def test_a_rank_with_both_ends_uses_a_tied_weight_in_two_stages():
    spec = decoder_spec(make_build(VARIANTS["tied"], pool.groups()).config)
    ends = [Stage(0, range(0, 1), embedding=True, head=False), Stage(3, range(1, 2), embedding=False, head=True)]
    words = spec.rank_parameters(ends)["embedding.word_embeddings.weight"]
    assert words.stage is None and not words.on_both_ends


def test_a_parameter_is_used_by_its_stage_and_an_adapter_by_that_of_its_layer():
    build = make_build({**VARIANTS["tied"], "lora_rank": 2}, pool.groups())
    model = GPTModel(
        build, [Stage(0, range(0, 1), embedding=True, head=False), Stage(3, range(1, 2), embedding=False, head=True)]
    )
    stages = {name: model.stage_of(name) for name in local_parameters(model)}
    assert stages["embedding.word_embeddings.weight"] is None
    assert stages["decoder.layers.0.mlp.linear_fc2.weight"] == 0
    assert {stage for name, stage in stages.items() if name.startswith("decoder.layers.1.") and ".lora." in name} == {3}
    assert stages["decoder.final_layernorm.weight"] == 3


def test_projections_cover_the_outputs_of_every_linear_layer_once():
    for fields in VARIANTS.values():
        for linear in decoder_spec(make_build(fields, pool.groups()).config).layers[0].linears().values():
            assert sum(each.outputs.numel for each in linear.projections) * linear.in_features == linear.weight.numel
            ends = [each.outputs.end(linear.join) for each in linear.projections]
            starts = [each.outputs.offset[linear.join] for each in linear.projections]
            assert starts == [0, *ends[:-1]]


def test_models_are_the_same_when_their_descriptions_are():
    """Training hyperparameters do not make another model; another shape or activation does."""
    config = make_build(GPT, pool.groups()).config
    same = {"hidden_dropout": 0.3, "attention_dropout": 0.2, "init_method_std": 1.0, "bf16": True}
    assert decoder_spec(config) == decoder_spec(make_build({**GPT, **same}, pool.groups()).config)
    others = [
        {"squared_relu": True},
        {"xielu": True},
        {"num_layers": 3},
        {"ffn_hidden_size": 96},
        {"add_bias_linear": False},
    ]
    others += [{name: factor} for name, factor in FACTORS.items()]
    others += [{"post_norm": True}, {"post_norm": True, "pre_norm": False}]
    others += [{"softmax_scale": 0.3}, {"attn_logit_softcapping": 30.0}, {"final_logit_softcapping": 30.0}]
    others += [{"geglu": True}, {"geglu": True, "bias_gelu_fusion": False}]
    others += [{"softmax_type": "off-by-one"}, {"softmax_type": "learnable"}, {"quick_geglu": True}]
    others += [{"geglu": True, "glu_linear_offset": 1.0}, {"geglu": True, "activation_func_clamp_value": 7.0}]
    others += [{"norm_parameters": "weight", "qk_layernorm_weight_per_head": True}]
    others += [{"norm_parameters": "weight"}, {"norm_parameters": "none"}, {"clip_qkv": 8.0}]
    others += [{"position_embedding_type": "rope"}, {"position_embedding_type": "rope", "dynamic_ntk_factor": 2.0}]
    others += [{"position_embedding_type": "yarn"}, {"position_embedding_type": "yarn", "llama_4_scaling_beta": 0.1}]
    others += [{"position_embedding_type": "rope", "qk_layernorm_after_rope": True}]
    others += [{"normalization": "RMSNorm"}, {"normalization": "RMSNorm", "qk_layernorm_across_heads": True}]
    described = [decoder_spec(make_build({**GPT, **other}, pool.groups()).config) for other in ({}, *others)]
    assert all(one != other for one, other in itertools.combinations(described, 2))


def test_pipeline_ranks_hold_the_whole_model_once_and_a_tied_embedding_twice():
    spec = decoder_spec(make_build({**VARIANTS["tied"], "num_layers": 4}, pool.groups()).config)
    first, last = (spec.rank_parameters([stage]) for stage in partition(4, range(2)))
    assert set(first) | set(last) == set(spec.parameters())
    assert set(first) & set(last) == {"embedding.word_embeddings.weight"}


def test_a_model_config_alone_is_enough_for_the_number_of_parameters():
    config = ModelConfig(num_layers=1, hidden_size=8, num_attention_heads=2, vocab_size=16)
    config = dataclasses.replace(config, max_position_embeddings=4, make_vocab_size_divisible_by=1)
    parameters = decoder_spec(config).parameters()
    # Embeddings; per layer two norms, QKV, projection, and the MLP's two GEMMs with biases; the final norm.
    layer = 2 * 16 + (24 * 8 + 24) + (64 + 8) + (32 * 8 + 32) + (32 * 8 + 8)
    assert sum(parameter.numel for parameter in parameters.values()) == 16 * 8 + 4 * 8 + layer + 16
