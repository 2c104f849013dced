"""Layers that predict further tokens in folders of Hugging Face: DeepSeek-V3, GLM-4.5 and GLM-4.7-Flash."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron.base.box import Box
from megatron.base.errors import CheckpointError
from megatron.config.data import TokenizerConfig
from megatron.config.rules.check import check
from megatron.conversion.convert import to_checkpoint, to_hf
from megatron.core.dist_checkpointing.folders import find
from megatron.core.models.hf.source import HFSource
from megatron.training.checkpoint import save_checkpoint
from megatron.training.export import CheckpointSource, save_hf
from megatron.training.setup import build
from megatron.training.start import take_shape_from_files
from tests import pool
from tests.unit.config.runs import make_run
from tests.unit.conversion.test_convert import NO_TOKENIZER, there_and_back
from tests.unit.models.builds import CPU, LLAMA, make_model
from tests.unit.models.hf_models import edit_json, save_hf_model
from tools.checkpoint import convert

NAMES = ["glm4 moe", "deepseek v3", "glm 4.7 flash", "deepseek v3.2", "glm 5"]
DROPOUT = {"attention_dropout": 0.0, "hidden_dropout": 0.0}


def with_predictions(name, folder, number=1, dtype=torch.float32):
    """A model as it is published: layers behind the last one, like it, that predict further tokens. Returns their
    number of the first of them."""
    save_hf_model(name, folder, dtype)
    config = json.loads((folder / "config.json").read_text())
    layers, h = config["num_hidden_layers"], config["hidden_size"]
    edit_json(folder / "config.json", num_nextn_predict_layers=number)
    tensors = load_file(folder / "model.safetensors")
    last, generator = f"model.layers.{layers - 1}.", torch.Generator().manual_seed(5)
    head = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])
    for depth in range(number):
        theirs = f"model.layers.{layers + depth}."
        further = {theirs + key.removeprefix(last): t for key, t in tensors.items() if key.startswith(last)}
        shapes = {
            "enorm.weight": (h,),
            "hnorm.weight": (h,),
            "shared_head.norm.weight": (h,),
            "eh_proj.weight": (h, 2 * h),
        }
        further |= {theirs + key: torch.empty(shape, dtype=dtype) for key, shape in shapes.items()}
        tensors |= {key: torch.randn(t.shape, generator=generator).to(t.dtype) for key, t in further.items()}
        tensors[f"{theirs}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors[f"{theirs}shared_head.head.weight"] = head.clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return layers


def assert_same_files(back, folder):
    found, before = load_file(back / "model.safetensors"), load_file(folder / "model.safetensors")
    assert found.keys() == before.keys()
    for key, tensor in before.items():
        assert found[key].dtype == tensor.dtype and found[key].equal(tensor), key


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("number", "dtype"), [(1, torch.bfloat16), (2, torch.float32)], ids=["one", "two"])
def test_there_and_back_is_byte_identical(tmp_path, name, number, dtype):
    layers = with_predictions(name, tmp_path / "hf", number, dtype)
    source = HFSource(tmp_path / "hf")
    assert source.model.mtp_num_layers == number and source.model.num_layers == layers
    back = there_and_back(tmp_path / "hf", tmp_path)
    assert_same_files(back, tmp_path / "hf")
    assert json.loads((back / "config.json").read_text())["num_nextn_predict_layers"] == number


def test_each_tensor_has_its_place(tmp_path):
    layers = with_predictions("deepseek v3", tmp_path)
    source, tensors = HFSource(tmp_path), load_file(tmp_path / "model.safetensors")

    def read(name):
        shape = source.shapes[f"mtp.layers.0.{name}"]
        return source.read(f"mtp.layers.0.{name}", Box((0,) * len(shape), shape), torch.float32)

    theirs = f"model.layers.{layers}."
    for ours, name in (
        ("enorm.weight", "enorm.weight"),
        ("hnorm.weight", "hnorm.weight"),
        ("eh_proj.weight", "eh_proj.weight"),
        ("final_layernorm.weight", "shared_head.norm.weight"),
        ("transformer_layer.input_layernorm.weight", "input_layernorm.weight"),
        ("transformer_layer.mlp.router.weight", "mlp.gate.weight"),
        ("transformer_layer.mlp.router.expert_bias", "mlp.gate.e_score_correction_bias"),
    ):
        assert read(ours).equal(tensors[theirs + name]), ours
    gate = tensors[f"{theirs}mlp.experts.3.gate_proj.weight"]
    assert read("transformer_layer.mlp.experts.linear_fc1.weight")[3, 0].equal(gate)


@pytest.mark.parametrize("predicts", [0, 1])
def test_a_run_takes_them_if_it_is_told_to(tmp_path, predicts):
    with_predictions("glm4 moe", tmp_path / "hf")
    flags = {"load_hf": str(tmp_path / "hf"), "mtp_num_layers": predicts, **DROPOUT}
    run = take_shape_from_files(
        make_run(**flags, save=f"{tmp_path}/run", save_interval=100, save_hf=f"{tmp_path}/back")
    )
    check(run, 1)
    trainer = build(run, pool.groups(), CPU)
    assert any(name.startswith("mtp.") for name in trainer.parameters) == bool(predicts)
    path = save_checkpoint(trainer)
    back = save_hf(trainer, path)
    if predicts:
        assert_same_files(back, tmp_path / "hf")
    # A new run that begins with the weights may leave them out.
    rest = {"load": f"{tmp_path}/run", "finetune": True, **DROPOUT}
    fields = {name: value for name, value in vars(run.model).items() if name not in ("bf16", "mtp_num_layers")}
    second = build(make_run(**fields | rest), pool.groups(), CPU)
    assert not any(name.startswith("mtp.") for name in second.parameters)
    assert trainer.step.forward_backward(trainer.readers.train.read(1)).read() > 0


def test_a_folder_without_them_has_none(tmp_path):
    """transformers writes their number, and not their weights."""
    save_hf_model("glm4 moe", tmp_path)
    edit_json(tmp_path / "config.json", num_nextn_predict_layers=1)
    source = HFSource(tmp_path)
    assert source.model.mtp_num_layers == 0 and not any(name.startswith("mtp.") for name in source.shapes)
    with_predictions("glm4 moe", tmp_path / "other")
    edit_json(tmp_path / "other/config.json", num_nextn_predict_layers=0)
    with pytest.raises(CheckpointError, match=r"tensors that its config\.json does not describe"):
        HFSource(tmp_path / "other")


@pytest.mark.parametrize("name", ["embed_tokens.weight", "shared_head.head.weight"])
def test_copies_that_differ_are_refused_by_name(tmp_path, capsys, name):
    layers = with_predictions("glm4 moe", tmp_path / "hf")
    tensors = load_file(tmp_path / "hf/model.safetensors")
    tensors[f"model.layers.{layers}.{name}"][3, 4] += 1
    save_file(tensors, tmp_path / "hf/model.safetensors", {"format": "pt"})
    words = ["--loader", "hf", "--saver", "megatron", "--load-dir", f"{tmp_path}/hf", "--save-dir", f"{tmp_path}/ours"]
    assert convert.main(words) == 2
    assert f"model.layers.{layers}.{name} differs from" in capsys.readouterr().err
    assert not (tmp_path / "ours").exists()


def test_copies_may_be_missing(tmp_path):
    layers = with_predictions("glm4 moe", tmp_path / "hf")
    path = tmp_path / "hf/model.safetensors"
    tensors = {key: t for key, t in load_file(path).items() if "shared_head.head" not in key}
    save_file(tensors, path, {"format": "pt"})
    back = load_file(there_and_back(tmp_path / "hf", tmp_path) / "model.safetensors")
    assert back.keys() - tensors.keys() == {f"model.layers.{layers}.shared_head.head.weight"}


def test_a_family_without_them_is_written_without_them(tmp_path, caplog):
    run = make_run(
        **{**LLAMA, "mtp_num_layers": 1, "seq_length": 16}, save=f"{tmp_path}/ours", save_interval=100, mock_data=True
    )
    trainer = build(run, pool.groups(), CPU)
    source = CheckpointSource(save_checkpoint(trainer))
    with caplog.at_level("INFO"):
        to_hf(source, tmp_path / "hf", dtype=torch.float32, tokenizer=NO_TOKENIZER)
    assert "layers that predict further tokens are left out: folders of llama hold none" in caplog.text
    found, plain = HFSource(tmp_path / "hf"), make_model(LLAMA, pool.groups())
    assert found.shapes.keys() == dict(plain.named_parameters()).keys()
    to_checkpoint(found, tmp_path / "again", dtype=torch.float32, tokenizer=TokenizerConfig())
    assert CheckpointSource(find(tmp_path / "again", None)).model.mtp_num_layers == 0
