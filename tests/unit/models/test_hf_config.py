"""config.json read as transformers reads it: the same logits, or one line with the file, the field and its value."""

import dataclasses
import functools
import json
import re
import time

import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron.base.errors import CheckpointError
from megatron.core.models.hf.families import FAMILIES, parse_config, read_config, write_config
from megatron.core.models.hf.source import HFSource
from megatron.kernels.ops.rope import rotary_frequencies
from megatron.spec.decoder import decoder_spec
from tests.unit.models.builds import CPU, make_ids
from tests.unit.models.hf_models import (
    LINEAR,
    LLAMA3,
    LONGROPE,
    PARTLY,
    YARN,
    edit_json,
    make_hf_model,
    save_hf_model,
)
from tests.unit.models.test_hf_conversion import LENGTH, load, logits_of

LINEAR_2 = {"type": "linear", "factor": 2.0}
OLD_YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
THETA = {"rope_type": "default", "rope_theta": 5e5}


def assert_same_logits(folder):
    """Ours and those of transformers, both from the files."""
    theirs = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa")
    ours, source = load(folder)
    tokens = make_ids(2, LENGTH)[:, :-1]
    with torch.no_grad():
        expected = theirs(tokens).logits
        difference = (logits_of(ours, tokens, source.model.vocab_size) - expected).abs().max()
    assert difference <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_parameters": THETA, "rope_scaling": LINEAR_2},
        {"rope_parameters": LLAMA3, "rope_scaling": OLD_YARN, "rope_theta": 777.0},
        {"rope_parameters": LINEAR, "rope_scaling": {}},
        {"rope_parameters": {**YARN, "rope_theta": 5.0, "original_max_position_embeddings": 1}},
        {"rope_parameters": {**YARN, "rope_theta": 5.0, "original_max_position_embeddings": 10**5}},
    ],
    ids=["both", "and a third", "empty", "edges below all frequencies", "edges above all frequencies"],
)
def test_rotary_fields_mean_what_they_mean_to_transformers(tmp_path, fields):
    save_hf_model("llama", tmp_path)
    edit_json(tmp_path / "config.json", **fields)
    assert_same_logits(tmp_path)


@pytest.mark.parametrize(
    ("name", "made", "left_out", "null"),
    [
        ("mistral", {"num_attention_heads": 16, "num_key_value_heads": 8}, "num_key_value_heads", ()),
        ("qwen2", {"num_attention_heads": 64, "num_key_value_heads": 32, "head_dim": 4}, "num_key_value_heads", ()),
        ("llama", {"num_key_value_heads": 8}, "num_key_value_heads", ()),
        ("qwen2 with windows", {}, "layer_types", ("sliding_window",)),
        ("granite", {"attention_multiplier": 1.0}, "attention_multiplier", ()),
    ],
)
def test_a_field_that_is_left_out_has_the_default_of_its_family(tmp_path, name, made, left_out, null):
    make_hf_model(name, **made).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config[left_out]
    (tmp_path / "config.json").write_text(json.dumps(config | dict.fromkeys(null)))
    assert_same_logits(tmp_path)


OLD_LONGROPE = {key: value for key, value in LONGROPE.items() if key != "rope_type"}
ORIGINAL = {"original_max_position_embeddings": 16}


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_scaling": {**OLD_LONGROPE, "type": "longrope"}},
        {"rope_scaling": {**OLD_LONGROPE, "type": "yarn"}},
        {"rope_scaling": {**OLD_LONGROPE, "type": "su", **ORIGINAL}},
        {"rope_parameters": {**LONGROPE, "original_max_position_embeddings": 64}},
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": None},
        {"rope_parameters": {**LONGROPE, "factor": 3}},
        {"rope_parameters": {**LONGROPE, "factor": 0.5}},
        {"rope_parameters": {**LONGROPE, "factor": 3.0, "attention_factor": 1.5}},
        {"rope_parameters": {**LONGROPE, **PARTLY}, "partial_rotary_factor": 0.25},
        {"rope_parameters": None, "partial_rotary_factor": 0.5},
    ],
    ids=[
        "older",
        "named yarn",
        "named su",
        "two originals",
        "default",
        "factor",
        "shrunk",
        "magnitude",
        "part",
        "plain",
    ],
)
def test_longrope_means_what_it_means_to_transformers(tmp_path, fields):
    save_hf_model("phi3, longrope", tmp_path)
    edit_json(tmp_path / "config.json", **{"rope_parameters": None, **ORIGINAL, **fields})
    assert_same_logits(tmp_path)


def test_the_first_name_of_longrope_is_read():
    """Files of the first Phi-3 say "su", without the original length inside, which transformers 5 no longer takes."""
    old, new = (
        make_config("phi3, longrope") | {"rope_parameters": {**OLD_LONGROPE, "type": kind}}
        for kind in ("su", "longrope")
    )
    assert parse_config(FAMILIES["phi3"], old, "x") == parse_config(FAMILIES["phi3"], new, "x")


@pytest.mark.parametrize(("residual", "embedding"), [(0.1, 0.1), (0.0, 0.0)])
def test_dropout_of_phi3_is_that_of_hidden_states(residual, embedding):
    values = make_config("phi3") | {"resid_pdrop": residual, "embd_pdrop": embedding, "attention_dropout": 0.3}
    found = parse_config(FAMILIES["phi3"], values, "x")
    assert (found.hidden_dropout, found.attention_dropout) == (residual, 0.3)


def test_both_lists_survive_an_export_without_the_folder(tmp_path):
    """To the last bit, with the original length and the factor on cos and sin."""
    save_hf_model("phi4 mini", tmp_path)
    _, model = read_config(tmp_path)
    for magnitude in (None, 1.1):
        family, written = write_config(dataclasses.replace(model, longrope_mscale=magnitude))
        assert family.model_type == "phi3" and written["original_max_position_embeddings"] == 16
        scaling = {"type": "longrope", "short_factor": PARTLY["short_factor"], "long_factor": PARTLY["long_factor"]}
        assert written["rope_scaling"] == scaling | ({} if magnitude is None else {"attention_factor": magnitude})


def refuses(name, changes, problem):
    """`changes` as edit_json has them."""
    values = {
        key: value for key, value in (make_config(name) | changes).items() if not (key in changes and value is None)
    }
    with pytest.raises(CheckpointError, match=problem) as caught:
        parse_config(FAMILIES[name], values, "x/config.json")
    assert str(caught.value).startswith("x/config.json") and "\n" not in str(caught.value)


@functools.cache
def make_config(name):
    """The content of config.json as transformers writes it."""
    return json.loads(make_hf_model(name).config.to_json_string())


SIZES = ["num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim"]
SIZES += ["intermediate_size", "vocab_size", "max_position_embeddings", "sliding_window"]


@pytest.mark.parametrize("value", [0, -1, 2.0, "3", True, [3], float("nan")], ids=repr)
@pytest.mark.parametrize("name", SIZES)
def test_a_size_that_cannot_be_is_one_line_with_file_field_and_value(name, value):
    refuses("mistral", {name: value}, rf"config\.json: {name} is {re.escape(repr(value))}[;,] ")


@pytest.mark.parametrize(
    ("name", "changes", "problem"),
    [
        ("llama", {"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; it must be from 1 to"),
        (
            "llama",
            {"num_attention_heads": 6, "head_dim": None},
            "hidden_size 64 is not a multiple of num_attention_heads 6",
        ),
        ("llama", {"num_key_value_heads": 3}, "num_attention_heads 8 is not a multiple of num_key_value_heads 3"),
        ("llama", {"head_dim": 7}, "head_dim is 7; rotary embeddings need an even one"),
        ("llama", {"rms_norm_eps": 0}, "rms_norm_eps is 0; it must be above 0"),
        ("llama", {"rms_norm_eps": float("inf")}, "rms_norm_eps is inf; it must be above 0 and finite"),
        ("llama", {"rms_norm_eps": "1e-5"}, "rms_norm_eps is '1e-5', not a value of type int or float"),
        ("llama", {"initializer_range": -1}, "initializer_range is -1; it must be 0 or more"),
        ("llama", {"attention_dropout": 1.0}, "attention_dropout is 1.0; it must be at least 0 and below 1"),
        ("llama", {"tie_word_embeddings": "false"}, "tie_word_embeddings is 'false', not a value of type bool"),
        ("llama", {"rope_parameters": [1]}, r"rope_parameters is \[1\], not a value of type dict"),
        ("llama", {"rope_parameters": {**LINEAR, "factor": 0}}, "rope_parameters: factor is 0; it must be above 0"),
        ("llama", {"rope_parameters": {**LINEAR, "factor": -2.0}}, "factor is -2.0; it must be above 0"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": -2}}, "rope_scaling: factor is -2; it must be above 0"),
        ("llama", {"rope_parameters": {**LLAMA3, "factor": 0.0}}, "factor is 0.0; it must be 1 or more"),
        ("llama", {"rope_parameters": {**YARN, "factor": 0.5}}, "factor is 0.5; it must be 1 or more"),
        ("llama", {"rope_parameters": {**YARN, "beta_fast": 0}}, "beta_fast is 0; it must be above 0"),
        ("llama", {"rope_parameters": {**YARN, "beta_slow": 64}}, "beta_slow 64.0 is above beta_fast 32.0"),
        ("llama", {"rope_parameters": {**YARN, "truncate": 1}}, "truncate is 1, not a value of type bool"),
        ("llama", {"rope_parameters": {**YARN, "attention_factor": -1}}, "attention_factor is -1; it must be above 0"),
        ("llama", {"rope_parameters": {**LLAMA3, "low_freq_factor": 4}}, "low_freq_factor 4.0 is not below high_freq"),
        (
            "llama",
            {"rope_parameters": {**LLAMA3, "original_max_position_embeddings": 0}},
            "embeddings is 0; it must be",
        ),
        ("llama", {"rope_parameters": {"rope_theta": 1.0}}, "rope_theta is 1.0; it must be above 1"),
        ("llama", {"rope_parameters": {}, "rope_theta": -5}, "rope_theta is -5; it must be above 1"),
        ("phi3", {"resid_pdrop": 0.1}, "resid_pdrop is 0.1 and embd_pdrop 0.0; one probability"),
        ("phi3", {"rope_parameters": LINEAR}, "rope type 'linear' is not supported in this family"),
        ("phi3", {"rope_parameters": YARN}, "unknown field factor|short_factor is missing"),
        (
            "phi3",
            {"rope_parameters": {**LONGROPE, "short_factor": [1.0] * 3}},
            "short_factor has 3 numbers, and a head has 4",
        ),
        (
            "phi3",
            {"rope_parameters": {**LONGROPE, "long_factor": [1, 2, 3, 0]}},
            "long_factor is 0; it must be above 0",
        ),
        (
            "phi3",
            {"rope_parameters": {**LONGROPE, "long_factor": [1, 2, 3, True]}},
            "long_factor has True, not a value of",
        ),
        (
            "phi3",
            {"rope_parameters": {**LONGROPE, "long_factor": "1,2,3,4"}},
            "long_factor is '1,2,3,4', not a value of",
        ),
        ("phi3", {"rope_parameters": {**LONGROPE, "short_mscale": 1.2}}, "unknown field short_mscale"),
        (
            "phi3",
            {"rope_parameters": LONGROPE, "original_max_position_embeddings": 1},
            "embeddings is 1; it must be above 1",
        ),
        ("phi3", {"rope_parameters": LONGROPE, "head_dim": 16}, "head_dim is 16; with LongRoPE transformers needs"),
        ("llama", {"rope_parameters": LONGROPE}, "rope type 'longrope' is not supported"),
        ("qwen2", {"max_window_layers": -1}, "max_window_layers is -1; it must be 0 or more"),
        ("qwen2", {"layer_types": ["full_attention"]}, r"layer_types \['full_attention'\] is not one of"),
        ("qwen2", {"layer_types": [{}] * 3}, "layer_types .* is not one of"),
        ("granite", {"residual_multiplier": 0}, "residual_multiplier is 0; it must be above 0"),
        ("granite", {"logits_scaling": "8"}, "logits_scaling is '8', not a value of type int or float"),
        ("granite", {"mlp_bias": 1}, "mlp_bias is 1, not a value of type bool"),
    ],
)
def test_a_value_that_cannot_be_is_refused(name, changes, problem):
    refuses(name, changes, problem)


@pytest.mark.parametrize(
    "field",
    [
        {"transformers.js_config": {"use_external_data_format": True}},
        {"_flash_attn_2_enabled": True},
        {"keys_to_ignore_at_inference": ["past_key_values"]},
        {"output_router_logits": True},
        {"hidden_dropout": 0},
        {"use_bias": False},
        {"layer_types": ["full_attention"] * 3},
        {"rope_interleaved": None},
    ],
    ids=lambda field: next(iter(field)),
)
def test_a_field_that_asks_for_nothing_passes(field):
    values = make_config("llama")
    with_field = parse_config(FAMILIES["llama"], values | field, "config.json")
    assert with_field == parse_config(FAMILIES["llama"], values, "config.json")


@pytest.mark.parametrize(
    "field",
    [
        {"use_bias": True},
        {"hidden_dropout": 0.1},
        {"use_rmsnorm": False},
        {"is_causal": False},
        {"layer_types": ["full_attention", "linear_attention", "full_attention"]},
    ],
    ids=str,
)
def test_a_field_that_asks_for_something_unknown_is_refused(field):
    refuses("llama", field, f"unknown field {next(iter(field))}")


@pytest.mark.parametrize(
    "changed",
    [
        {"beta_fast": 512.0},
        {"beta_slow": 0.1},
        {"factor": 8.0},
        {"original_max_position_embeddings": 32},
        {"attention_factor": 1.5},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_a_model_with_other_yarn_numbers_than_the_folder_keeps_its_own(tmp_path, changed):
    """The folder's config.json is taken over when it is that of the model, to the last of YaRN's numbers."""
    save_hf_model("llama, yarn", tmp_path / "like")
    (tmp_path / "other").mkdir()
    config = json.loads((tmp_path / "like/config.json").read_text())
    for name, numbers in {"like": {"original_max_position_embeddings": 10**5}, "other": changed}.items():
        config["rope_parameters"] |= numbers
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    (_, like), (_, model) = read_config(tmp_path / "like"), read_config(tmp_path / "other")
    _, kept = write_config(like, tmp_path / "like")
    assert kept == json.loads((tmp_path / "like/config.json").read_text())
    family, written = write_config(model, tmp_path / "like")
    found = parse_config(family, written, "written")
    ours, theirs = (rotary_frequencies(decoder_spec(each).rotaries[0], CPU)[0] for each in (found, model))
    assert ours.equal(theirs)
    ours, theirs = (rotary_frequencies(decoder_spec(each).rotaries[0], CPU)[1] for each in (found, model))
    assert ours == theirs


@pytest.mark.parametrize("changes", [{"num_hidden_layers": 99_999}, {"num_attention_heads": 10**9, "head_dim": 8}])
def test_a_size_that_the_weights_do_not_have_is_found_before_all_names_are_made(tmp_path, changes):
    save_hf_model("llama", tmp_path)
    edit_json(tmp_path / "config.json", **{**changes, "num_key_value_heads": None})
    start = time.monotonic()
    with pytest.raises(CheckpointError, match=r"holds no tensor model\.layers\.99998|o_proj\.weight is \[64, 64\]"):
        HFSource(tmp_path)
    assert time.monotonic() - start < 20
