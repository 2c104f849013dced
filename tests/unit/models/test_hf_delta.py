"""Qwen3-Next and Qwen3.5: gated delta nets and attention with an output gate, against transformers."""

import json

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import Qwen3_5Config
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForConditionalGeneration

from megatron.base.errors import CheckpointError
from megatron.core.inference.engine.slots import SlotDecoder
from megatron.core.models.hf.families import read_config
from megatron.spec.decoder import decoder_spec
from megatron.tooling.restore import read_hf, restore_model
from tests import pool
from tests.unit.conversion.test_convert import tensors_of, there_and_back
from tests.unit.models.builds import CPU, assert_gradients, losses, make_ids
from tests.unit.models.hf_models import DELTA_NETS, SHAPE, edit_json, random_model, save_hf_model
from tests.unit.models.test_hf_carried import assert_same
from tests.unit.models.test_hf_conversion import in_our_names, load, logits_of
from tests.unit.models.test_hf_generation import continue_greedily, continued_by_transformers, on_a_rank


@pytest.mark.parametrize("name", DELTA_NETS)
@pytest.mark.parametrize(("samples", "length"), [(1, 7), (3, 65), (2, 131)])
def test_logits_and_gradients(tmp_path, name, samples, length):
    """Lengths around the chunks of 64 tokens in which both compute the delta rule."""
    theirs = save_hf_model(name, tmp_path)
    ours, source = load(tmp_path)
    ids = make_ids(samples, length)
    tokens, labels = ids[:, :-1], ids[:, 1:]
    with torch.no_grad():
        logits = logits_of(ours, tokens, theirs.config.vocab_size)
    expected = theirs(tokens).logits
    assert (logits - expected).abs().max() <= 1e-5 * expected.abs().max()
    losses(ours, ids).mean().backward()
    F.cross_entropy(expected.transpose(1, 2), labels).backward()
    gradients = {key: parameter.grad for key, parameter in theirs.named_parameters()}
    assert_gradients({key: p.grad for key, p in ours.named_parameters()}, in_our_names(source, gradients))


@pytest.mark.parametrize("name", DELTA_NETS)
def test_64_tokens_are_those_of_transformers(tmp_path, name):
    """Without caches on our side."""
    theirs = save_hf_model(name, tmp_path)
    ours, _ = load(tmp_path)
    prompt, vocab = make_ids(2, 5)[:, :-1], theirs.config.vocab_size
    expected = theirs.generate(prompt, max_new_tokens=64, do_sample=False, eos_token_id=None, pad_token_id=0)
    tokens = prompt
    with torch.no_grad():
        for _ in range(64):
            tokens = torch.cat([tokens, logits_of(ours, tokens, vocab)[:, -1:].argmax(-1)], dim=1)
    assert tokens.equal(expected)


def test_64_tokens_with_the_states_of_sequences(tmp_path):
    """Generation keeps states, on one process and on two that share the heads."""
    expected = continued_by_transformers(save_hf_model("qwen3.5 moe", tmp_path), 64)
    assert continue_greedily(tmp_path, pool.groups(), 64) == expected
    assert pool.run(2, on_a_rank, tmp_path, 64) == [expected] * 2


def test_what_generation_keeps_does_not_depend_on_the_length(tmp_path):
    save_hf_model("qwen3.5", tmp_path)
    cores = [layer.attention.cached for layer in decoder_spec(read_config(tmp_path)[1]).layers]
    model, build = restore_model(read_hf(str(tmp_path)), pool.groups(), CPU)
    for capacity in (8, 80):
        caches = SlotDecoder(model, build, slots=3, capacity=capacity)._caches
        assert [cache.nbytes for cache in caches] == [3 * core.cache_bytes(1, capacity, 4) for core in cores]
    short, long = ([core.cache_bytes(1, capacity, 4) for core in cores] for capacity in (8, 80))
    assert (short[0], short[2]) == (long[0], long[2]) and long[1] == 10 * short[1]


def with_predictions(folder):
    """Adds the tensors of a layer that predicts a further token, as on the hub."""
    tensors = load_file(folder / "model.safetensors")
    tensors |= {"mtp.fc.weight": torch.randn(4, 8), "mtp.layers.0.mlp.experts.gate_up_proj": torch.randn(2, 6, 4)}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    edit_json(folder / "config.json", mtp_num_hidden_layers=1, mtp_use_dedicated_embeddings=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", DELTA_NETS)
def test_there_and_back_with_the_layers_that_predict(tmp_path, name, dtype):
    save_hf_model(name, tmp_path / "hf", dtype)
    with_predictions(tmp_path / "hf")
    back = there_and_back(tmp_path / "hf", tmp_path)
    assert_same(tensors_of(back), tensors_of(tmp_path / "hf"))
    (family, model), (before, described) = read_config(back), read_config(tmp_path / "hf")
    assert family is before and model == described


def test_a_folder_with_images_comes_back(tmp_path):
    """As on the hub: the language model behind a prefix, beside the model for images and the layers that predict."""
    text = {**SHAPE, **DELTA_NETS["qwen3.5"][1], "num_key_value_heads": 2, "max_position_embeddings": 128}
    text["rope_parameters"] = {
        "rope_type": "default",
        "rope_theta": 1e6,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    }
    images = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 64}
    config = Qwen3_5Config(text_config=text, vision_config=images, tie_word_embeddings=True)
    theirs = random_model(Qwen3_5ForConditionalGeneration, config)
    theirs.save_pretrained(tmp_path / "hf")
    with_predictions(tmp_path / "hf")
    ours, source = load(tmp_path / "hf")
    assert source.carried.prefix == "model.language_model."
    tokens = make_ids(2, 70)[:, :-1]
    with torch.no_grad():
        expected = theirs(tokens).logits
        logits = logits_of(ours, tokens, 99)
    assert (logits - expected).abs().max() <= 1e-5 * expected.abs().max()
    back = there_and_back(tmp_path / "hf", tmp_path)
    assert_same(tensors_of(back), tensors_of(tmp_path / "hf"))
    config, before = (json.loads((folder / "config.json").read_text()) for folder in (back, tmp_path / "hf"))
    assert {key for key in config if config[key] != before.get(key)} <= {"torch_dtype"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"linear_key_scale": 0.5}, "unknown field linear_key_scale = 0.5"),
        ({"attn_output_gate": False}, "attn_output_gate is False; only True is supported"),
        ({"linear_num_value_heads": 6}, "linear_num_value_heads 6 is not a multiple of linear_num_key_heads 4"),
        ({"layer_types": ["linear_attention"] * 3}, "layer_types has to name 3 layers"),
        (
            {"layer_types": ["linear_attention", "sliding_attention", "full_attention"]},
            "each full_attention or linear_",
        ),
    ],
)
def test_other_models_are_refused(tmp_path, changes, message):
    save_hf_model("qwen3.5", tmp_path)
    edit_json(tmp_path / "config.json", **changes)
    with pytest.raises(CheckpointError, match=message):
        read_config(tmp_path)


def test_every_fourth_layer_has_attention_where_a_file_has_no_list(tmp_path):
    """As in published files of Qwen3-Next, whose layers are these."""
    values = {"full_attention_interval": 4, "num_hidden_layers": 8, "mlp_only_layers": []}
    save_hf_model("qwen3 next", tmp_path)
    edit_json(tmp_path / "config.json", layer_types=None, **values)
    _, model = read_config(tmp_path)
    assert model.delta_layers == (True, True, True, False) * 2
