"""DeepSeek-V3.2 and GLM-5: attention to all keys is theirs while their indexer chooses all of them, and no longer."""

import dataclasses
import json

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from megatron.base.errors import CheckpointError, ConfigError
from megatron.config.context_limit import context_limit
from megatron.config.data import TokenizerConfig
from megatron.config.model import ModelConfig
from megatron.config.rules.check import check
from megatron.core.inference.generate import check_lengths
from megatron.core.models.hf.families import read_config, write_config
from megatron.core.models.hf.source import HFSource
from megatron.tooling.restore import Saved
from megatron.tooling.tool import context_length
from megatron.training.export import CheckpointSource
from megatron.training.start import take_shape_from_files
from tests.unit.config.runs import make_run
from tests.unit.conversion.test_convert import tensors_of
from tests.unit.models.builds import assert_gradients, losses, make_ids
from tests.unit.models.fp8_models import quantize_folder
from tests.unit.models.hf_models import INDEXER, edit_json, save_hf_model
from tests.unit.models.published import PUBLISHED
from tests.unit.models.test_hf_carried import assert_same, begin
from tests.unit.models.test_hf_conversion import in_our_names, load, logits_of
from tests.unit.models.test_hf_predictions import with_predictions
from tools.checkpoint import convert

NAMES = ["deepseek v3.2", "glm 5"]
TOPK = INDEXER["index_topk"]
DROPOUT = {"attention_dropout": 0.0, "hidden_dropout": 0.0}


def indexers(tensors):
    return {key: tensor for key, tensor in tensors.items() if ".self_attn.indexer." in key}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("samples", "length"), [(1, 7), (3, 33), (2, TOPK)])
def test_logits_and_gradients_up_to_the_keys_that_are_chosen(tmp_path, name, samples, length):
    theirs = save_hf_model(name, tmp_path)
    ours, source = load(tmp_path)
    ids = make_ids(samples, length)
    tokens, labels = ids[:, :-1], ids[:, 1:]
    assert tokens.shape == (samples, length)
    with torch.no_grad():
        logits = logits_of(ours, tokens, theirs.config.vocab_size)
    expected = theirs(tokens).logits
    assert (logits - expected).abs().max() <= 1e-5 * expected.abs().max()
    losses(ours, ids).mean().backward()
    F.cross_entropy(expected.transpose(1, 2), labels).backward()
    gradients = {key: parameter.grad for key, parameter in theirs.named_parameters()}
    assert indexers(gradients) and all(gradient is None for gradient in indexers(gradients).values())
    assert_gradients({key: p.grad for key, p in ours.named_parameters()}, in_our_names(source, gradients))


@pytest.mark.parametrize("name", NAMES)
def test_beyond_them_it_is_another_function(tmp_path, name):
    """So a longer sequence has to be refused."""
    theirs = save_hf_model(name, tmp_path)
    ours, _ = load(tmp_path)
    tokens = make_ids(2, TOPK + 20)[:, :-1]
    with torch.no_grad():
        expected = theirs(tokens).logits
        difference = (logits_of(ours, tokens, theirs.config.vocab_size) - expected).abs().amax(-1)
    assert difference[:, :TOPK].max() <= 1e-5 * expected.abs().max()
    assert difference[:, TOPK + 5 :].max() > 1e-2 * expected.abs().max()


@pytest.mark.parametrize("name", NAMES)
def test_a_longer_sequence_is_refused_by_name(tmp_path, name):
    save_hf_model(name, tmp_path)
    assert context_limit(read_config(tmp_path)[1]) == (TOPK, "--indexer-topk")
    check(take_shape_from_files(make_run(load_hf=f"{tmp_path}", **DROPOUT, seq_length=TOPK)), 1)
    longer = {"load_hf": f"{tmp_path}", "seq_length": TOPK + 1, **DROPOUT}
    with pytest.raises(
        ConfigError, match=rf"--seq-length {TOPK + 1} is above --indexer-topk {TOPK}.*give --seq-length"
    ):
        check(take_shape_from_files(make_run(**longer)), 1)
    check(take_shape_from_files(make_run(**longer, override_model_fields=("indexer_topk",))), 1)
    model = read_config(tmp_path)[1]
    check_lengths([TOPK - 4], 4, model)
    with pytest.raises(ConfigError, match=rf"above the model's --indexer-topk {TOPK}; give --max-new-tokens 3"):
        check_lengths([TOPK - 3], 4, model)


def test_the_server_and_evaluation_stop_there(tmp_path):
    save_hf_model("glm 5", tmp_path)
    saved = Saved(tmp_path, read_config(tmp_path)[1], TokenizerConfig())
    assert context_length(saved, None, "--max-sequence-length", 4096) == TOPK
    assert context_length(saved, TOPK, "--context-length") == TOPK
    with pytest.raises(ConfigError, match=rf"--context-length {TOPK + 1} is above the model's --indexer-topk {TOPK}"):
        context_length(saved, TOPK + 1, "--context-length")


def test_the_shorter_limit_counts():
    assert context_limit(ModelConfig(max_position_embeddings=64, indexer_topk=80)) == (64, "--max-position-embeddings")
    assert context_limit(ModelConfig()) is None


@pytest.mark.parametrize("name", NAMES)
def test_training_leaves_the_indexer_as_it_is(tmp_path, name):
    """With a trained layer for prediction, whose attention has an indexer, too."""
    layers = with_predictions(name, tmp_path / "hf")
    before = tensors_of(tmp_path / "hf")
    assert any(f"layers.{layers}." in key for key in indexers(before))
    _, untouched, _ = begin(tmp_path / "first", load_hf=f"{tmp_path}/hf", mtp_num_layers=1)
    assert_same(tensors_of(untouched), before)
    _, back, _ = begin(tmp_path / "second", 2, load_hf=f"{tmp_path}/hf", mtp_num_layers=1)
    after = tensors_of(back)
    assert after.keys() == before.keys()
    changed = {key for key in before if not after[key].equal(before[key])}
    assert any("self_attn.kv_b_proj" in key for key in changed) and not indexers(dict.fromkeys(changed))
    config, first = (json.loads((folder / "config.json").read_text()) for folder in (back, tmp_path / "hf"))
    assert {key for key in config if config[key] != first.get(key)} <= {"torch_dtype", "attention_dropout"}


def test_without_the_indexer_it_is_a_model_of_another_family(tmp_path, caplog):
    """Longer sequences may be trained on purpose: then DeepSeek-V3 is what has been trained."""
    save_hf_model("deepseek v3.2", tmp_path / "hf")
    flags = {"load_hf": f"{tmp_path}/hf", "override_model_fields": ("indexer_topk",), "seq_length": TOPK + 8}
    with caplog.at_level("WARNING"):
        _, back, _ = begin(tmp_path, **flags)
    assert "are dropped: a folder of deepseek_v3 does not hold them" in caplog.text
    family, model = read_config(back)
    assert family.model_type == "deepseek_v3" and model.indexer_topk is None
    assert not indexers(tensors_of(back))


def test_a_converted_model_is_not_loaded_as_one_without_an_indexer(tmp_path):
    save_hf_model("glm 5", tmp_path / "hf")
    words = ["--loader", "hf", "--saver", "megatron", "--load-dir", f"{tmp_path}/hf", "--save-dir", f"{tmp_path}/ours"]
    assert convert.main(words) == 0
    source = CheckpointSource(tmp_path / "ours/iter_0000000")
    fields = {name: value for name, value in vars(source.model).items() if name != "indexer_topk"}
    with pytest.raises(CheckpointError, match=f"indexer_topk is {TOPK} there and None here"):
        begin(tmp_path, **{**fields, **DROPOUT}, load=f"{tmp_path}/ours")


def test_a_model_without_its_config_json_is_not_written(tmp_path):
    save_hf_model("glm 5", tmp_path)
    with pytest.raises(ConfigError, match=r"--indexer-topk 80\) is written with the config\.json that it came with"):
        write_config(read_config(tmp_path)[1])


def test_megatron_lm_gets_the_model_without_the_indexer(tmp_path, capsys):
    save_hf_model("deepseek v3.2", tmp_path / "hf")
    edit_json(tmp_path / "hf/config.json", rope_parameters=None, rms_norm_eps=1e-6)
    words = ["--loader", "hf", "--saver", "mcore", "--load-dir", f"{tmp_path}/hf", "--save-dir", f"{tmp_path}/theirs"]
    code = convert.main(words)
    printed = capsys.readouterr()
    assert code == 0, printed.err
    (line,) = [line for line in printed.out.splitlines() if "dropped" in line]
    assert f"without its indexer the model is the same up to {TOPK} tokens" in line


def test_an_indexer_in_fp8(tmp_path):
    """It is written in the precision of the folder, as all tensors are."""
    save_hf_model("glm 5", tmp_path / "hf", torch.bfloat16)
    expected = indexers(quantize_folder(tmp_path / "hf", "blocks"))
    stored = load_file(tmp_path / "hf/model.safetensors")
    assert any(tensor.dtype == torch.float8_e4m3fn for tensor in indexers(stored).values())
    _, back, _ = begin(tmp_path, load_hf=f"{tmp_path}/hf", bf16=True)
    found = indexers(tensors_of(back))
    assert found.keys() == expected.keys()
    for key, values in expected.items():
        assert found[key].equal(torch.from_numpy(values).bfloat16()), key
    assert "quantization_config" not in json.loads((back / "config.json").read_text())


def test_the_fields_of_deepseeks_files_are_taken(tmp_path):
    """Those that transformers does not read, too."""
    published = {**PUBLISHED["DeepSeek-V3"], "model_type": "deepseek_v32", **INDEXER}
    (tmp_path / "config.json").write_text(json.dumps(published))
    (tmp_path / "v3").mkdir()
    (tmp_path / "v3/config.json").write_text(json.dumps(PUBLISHED["DeepSeek-V3"]))
    (family, model), (_, without) = read_config(tmp_path), read_config(tmp_path / "v3")
    assert family.model_type == "deepseek_v32" and model == dataclasses.replace(without, indexer_topk=TOPK)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"layer_types": ["full_attention"] * 3}, "layer_types"),
        ({"index_topk": 0}, "index_topk is 0"),
        ({"rope_interleave": False}, "rope_interleave is False"),
        ({"mlp_layer_types": ["dense"] * 3}, "mlp_layer_types has to name 3 layers"),
        ({"indexer_gadget": 2}, "unknown field indexer_gadget"),
    ],
)
def test_other_values_are_refused_by_name(tmp_path, fields, reason):
    save_hf_model("glm 5", tmp_path)
    edit_json(tmp_path / "config.json", **fields)
    with pytest.raises(CheckpointError, match=reason):
        HFSource(tmp_path)
