"""Hugging Face models with experts: what config.json says of them, and which elements of their tensors a rank reads."""

import dataclasses
import functools
import json
import time

import pytest
import torch

from megatron.base.box import Box
from megatron.base.errors import CheckpointError, ConfigError
from megatron.core.models.hf.families import FAMILIES, parse_config, read_config, write_config
from megatron.core.models.hf.family.refused import REFUSED
from megatron.core.models.hf.folder import HFFolder
from megatron.core.models.hf.source import HFSource
from megatron.spec.decoder import decoder_spec
from megatron.spec.moe import MoESpec
from tests.unit.models.hf_models import CLASSES, EXPERTS, edit_json, make_hf_model, save_hf_model

FC1, FC2 = "mlp.experts.linear_fc1.weight", "mlp.experts.linear_fc2.weight"


def whole(shape):
    return Box((0,) * len(shape), shape)


@functools.cache
def make_config(name):
    """The content of config.json as transformers writes it."""
    return json.loads(make_hf_model(name).config.to_json_string())


def parse(values):
    return parse_config(FAMILIES[values["model_type"]], values, "x/config.json")


@pytest.mark.parametrize("name", ["mixtral", "qwen2 moe", "qwen3 moe", "olmoe"])
def test_stacked_experts_are_the_same_model(tmp_path, name):
    """As the hub has them, and as transformers 5 writes them when it is asked to."""
    save_hf_model(name, tmp_path / "each")
    save_hf_model(name, tmp_path / "stacked", save_original_format=False)
    each, stacked = HFSource(tmp_path / "each"), HFSource(tmp_path / "stacked")
    assert len(stacked.folder.entries) < len(each.folder.entries)
    assert each.shapes == stacked.shapes and each.model == stacked.model
    for own, shape in each.shapes.items():
        values = each.read(own, whole(shape), torch.float32)
        assert torch.equal(values, stacked.read(own, whole(shape), torch.float32)), own
        part = Box(tuple(n // 3 for n in shape), tuple(n - n // 3 - n // 4 for n in shape))
        here = tuple(slice(a, a + n) for a, n in zip(part.offset, part.shape))
        assert torch.equal(values[here], stacked.read(own, part, torch.float32)), own
        assert torch.equal(values[here], each.read(own, part, torch.float32)), own


def test_a_rank_reads_its_experts_and_no_others(tmp_path, monkeypatch):
    """Experts 1 and 2 of 5, of these the second half of the channels."""
    theirs = save_hf_model("mixtral", tmp_path)
    source, read = HFSource(tmp_path), list[str]()
    fill = HFFolder.fill
    monkeypatch.setattr(
        HFFolder, "fill", lambda self, out, names, box: read.extend(names) or fill(self, out, names, box)
    )
    fc1 = source.read(f"decoder.layers.1.{FC1}", Box((1, 0, 22, 0), (2, 2, 22, 64)), torch.float32)
    fc2 = source.read(f"decoder.layers.1.{FC2}", Box((1, 0, 22), (2, 64, 22)), torch.float32)
    at = "model.layers.1.block_sparse_moe.experts."
    assert sorted(read) == [f"{at}{number}.{name}.weight" for number in (1, 2) for name in ("w1", "w2", "w3")]
    experts = theirs.model.layers[1].mlp.experts
    assert torch.equal(fc1.flatten(1, 2), experts.gate_up_proj[1:3].unflatten(1, (2, 44))[:, :, 22:].flatten(1, 2))
    assert torch.equal(fc2, experts.down_proj[1:3, :, 22:])


@pytest.mark.parametrize("name", EXPERTS)
def test_layers_router_and_widths_are_those_of_transformers(name):
    theirs, spec = make_hf_model(name), decoder_spec(parse(make_config(name)))
    for layer, ours in zip(theirs.model.layers, spec.layers, strict=True):
        assert isinstance(ours.mlp, MoESpec) == hasattr(layer.mlp, "experts")
        if not isinstance(ours.mlp, MoESpec):
            assert ours.linears()["mlp.linear_fc2"].in_features == layer.mlp.down_proj.in_features
            continue
        router, experts = ours.mlp.router, ours.mlp.experts
        assert (router.experts, router.topk) == (layer.mlp.gate.num_experts, layer.mlp.gate.top_k)
        # The router of DeepSeek-V2 never divides the weights by their sum, and has no attribute that says so.
        assert router.normalized == getattr(layer.mlp.gate, "norm_topk_prob", "deepseek v2" not in name)
        choice = router.score_function, router.scaling, router.groups, router.has_bias
        gate, biased = layer.mlp.gate, any("e_score_correction_bias" in name for name, _ in layer.mlp.named_buffers())
        factors = getattr(gate, "routed_scaling_factor", 1.0), getattr(gate, "num_group", 1) or 1
        assert choice == ("sigmoid" if biased else "softmax", *factors, biased)
        assert experts.linear_fc2.shape == layer.mlp.experts.down_proj.shape
        shared = getattr(layer.mlp, "shared_experts", getattr(layer.mlp, "shared_expert", None))
        assert (ours.mlp.shared is None) == (shared is None)
        assert (ours.mlp.shared_gate is None) == (not hasattr(layer.mlp, "shared_expert_gate"))
        if shared is not None:
            assert ours.linears()["mlp.shared_experts.linear_fc2"].in_features == shared.down_proj.in_features


@pytest.mark.parametrize(("step", "dense"), [(1, []), (2, []), (3, [2]), (2, [1, 9]), (5, []), (1, [0, 1])])
def test_the_layers_with_experts_are_those_of_transformers(step, dense):
    """Counted from 1, where Megatron-LM's number in --moe-layer-freq counts from 0."""
    changes = {"num_hidden_layers": 6, "decoder_sparse_step": step, "mlp_only_layers": dense, "layer_types": None}
    theirs = make_hf_model("qwen2 moe", **changes)
    model = parse(json.loads(theirs.config.to_json_string()))
    assert list(model.moe_layers) == [hasattr(layer.mlp, "experts") for layer in theirs.model.layers]
    if any(model.moe_layers):
        _, written = write_config(model)
        assert parse(written).moe_layers == model.moe_layers


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe"])
def test_a_field_that_is_left_out_has_the_default_of_its_family(family):
    """norm_topk_prob among them: false, although Qwen3-MoE's files say true."""
    sizes = {"hidden_size": 2048, "num_attention_heads": 16, "vocab_size": 99, "num_hidden_layers": 2}
    values = {"model_type": family, **sizes, "intermediate_size": 96, "max_position_embeddings": 64}
    theirs = CLASSES[family][1](**values)
    assert parse(values) == parse(json.loads(theirs.to_json_string()))


MIXTRAL, QWEN2, QWEN3, OLMOE = "mixtral", "qwen2 moe", "qwen3 moe", "olmoe"


@pytest.mark.parametrize(
    ("name", "changes", "problem"),
    [
        (MIXTRAL, {"num_local_experts": 0}, "num_local_experts is 0; it must be from 1"),
        (MIXTRAL, {"num_experts_per_tok": 6}, "num_experts_per_tok is 6; there are 5 experts"),
        (MIXTRAL, {"num_experts": 6}, "num_experts is 6 and num_local_experts 5"),
        (MIXTRAL, {"router_jitter_noise": 0.1}, "router_jitter_noise is 0.1; only 0.0 is supported"),
        (MIXTRAL, {"sliding_window": 0}, "sliding_window is 0; it must be 1 or more"),
        (MIXTRAL, {"router_aux_loss_coef": "0.1"}, "router_aux_loss_coef is '0.1', not a value of"),
        (MIXTRAL, {"hidden_act": "gelu"}, "hidden_act is 'gelu'; only 'silu'"),
        (MIXTRAL, {"moe_intermediate_size": 4}, "unknown field moe_intermediate_size"),
        (QWEN2, {"num_local_experts": 6}, "unknown field num_local_experts"),
        (QWEN2, {"decoder_sparse_step": 0}, "decoder_sparse_step is 0; it must be 1 or more"),
        (QWEN2, {"mlp_only_layers": ["1"]}, "mlp_only_layers is .'1'., not a list of layers"),
        (QWEN2, {"norm_topk_prob": 1}, "norm_topk_prob is 1, not a value of type bool"),
        (QWEN2, {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size is 0; it must be"),
        (QWEN2, {"use_sliding_window": True, "layer_types": None}, "list them in layer_types"),
        (QWEN2, {"layer_types": ["sliding_attention"] * 3}, "but use_sliding_window is false"),
        (QWEN3, {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2}, "only 0, a window in all"),
        (QWEN3, {"attention_bias": 1}, "attention_bias is 1, not a value of type bool"),
        (OLMOE, {"clip_qkv": -8.0}, "clip_qkv is -8.0; it must be above 0"),
        (OLMOE, {"attention_bias": 1}, "attention_bias is 1, not a value of type bool"),
        (OLMOE, {"head_dim": 16}, "head_dim is 16; transformers needs"),
    ],
)
def test_a_value_that_cannot_be_is_refused(name, changes, problem):
    """None: the field is left out."""
    values = {key: value for key, value in (make_config(name) | changes).items() if value is not None}
    with pytest.raises(CheckpointError, match=problem) as caught:
        parse(values)
    assert str(caught.value).startswith("x/config.json") and "\n" not in str(caught.value)


@pytest.mark.parametrize("family", REFUSED)
def test_a_family_that_differs_in_its_layers_is_refused_with_the_reason(tmp_path, family):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    with pytest.raises(CheckpointError, match=f"model_type '{family}' is not supported: it") as caught:
        read_config(tmp_path)
    assert REFUSED[family] in str(caught.value) and family not in FAMILIES


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("mixtral", {"moe_router_num_groups": 1, "moe_router_topk_scaling_factor": 1.0, "ffn_hidden_size": 7}),
        ("mixtral", {"moe_router_pre_softmax": True, "moe_router_topk_normalization": "on"}),
        ("mixtral", {"moe_router_dtype": "fp64", "moe_layer_freq": "1"}),
        ("qwen3 moe", {"moe_router_topk_normalization": "on", "moe_layer_freq": "[1,1,1]"}),
    ],
)
def test_two_spellings_of_one_model_are_written_alike(name, changes):
    model = parse(make_config(name))
    like = dataclasses.replace(model, **({"moe_ffn_hidden_size": 44} if name == "mixtral" else {}), **changes)
    assert write_config(like) == write_config(model)


@pytest.mark.parametrize(
    ("name", "changes", "flag"),
    [
        ("mixtral", {"moe_router_pre_softmax": True}, "moe_router_topk_normalization False"),
        ("mixtral", {"moe_layer_freq": "2"}, "qwen3_moe, the nearest, has no qk_layernorm False"),
        ("mixtral", {"moe_router_score_function": "sigmoid"}, "moe_router_score_function sigmoid"),
        ("mixtral", {"moe_router_enable_expert_bias": True}, "moe_router_enable_expert_bias True"),
        ("mixtral", {"moe_router_topk_scaling_factor": 2.5}, "moe_router_topk_scaling_factor 2.5"),
        ("qwen3 moe", {"moe_router_num_groups": 4, "moe_router_group_topk": 2}, "moe_router_num_groups 4"),
        ("qwen3 moe", {"moe_shared_expert_intermediate_size": 8}, "moe_shared_expert_intermediate_size 8"),
        ("qwen3 moe with windows", {"window_attn_skip_freq": "2"}, "window_attn_skip_freq"),
        ("qwen2 moe", {"moe_shared_expert_gate": False}, "moe_shared_expert_gate False"),
        ("olmoe", {"add_qkv_bias": True}, "add_qkv_bias True"),
        ("olmoe", {"window_size": "4,0"}, "qk_layernorm_across_heads True"),
    ],
)
def test_a_model_that_no_family_has_is_not_written(name, changes, flag):
    model = dataclasses.replace(parse(make_config(name)), **changes)
    with pytest.raises(ConfigError, match=f"no supported Hugging Face family describes .*{flag}"):
        write_config(model)


def test_a_number_of_experts_that_the_weights_do_not_have_is_found_before_all_names_are_made(tmp_path):
    save_hf_model("mixtral", tmp_path)
    edit_json(tmp_path / "config.json", num_local_experts=2**27)
    start = time.monotonic()
    with pytest.raises(
        CheckpointError, match=r"block_sparse_moe\.gate\.weight is \[5, 64\], its config\.json requires"
    ):
        HFSource(tmp_path)
    assert time.monotonic() - start < 20


def test_an_expert_that_is_missing_is_named(tmp_path):
    save_hf_model("qwen2 moe", tmp_path)
    edit_json(tmp_path / "config.json", moe_intermediate_size=21)
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.experts\.0\.gate_proj\.weight is \[20, 64\]"):
        HFSource(tmp_path)


def test_groups_of_another_score_are_refused(tmp_path):
    changes = {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 3, "n_routed_experts": 8}
    fields = {**make_config("glm4 moe"), **changes}
    with pytest.raises(CheckpointError, match="num_experts_per_tok 3 / topk_group 2 is not 2"):
        parse(fields)
    with pytest.raises(CheckpointError, match="first_k_dense_replace is 3, and there are 3 layers"):
        parse({**make_config("glm4 moe"), "first_k_dense_replace": 3, "num_hidden_layers": 3})
