"""Conversion of whole models: byte for byte there and back, and nothing half-written."""

import dataclasses
import json
import multiprocessing
import os
import random
import re
import signal

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as hf_logging

import megatron.training.export as export_module
from megatron.base.errors import CheckpointError, ConfigError
from megatron.config.data import TokenizerConfig
from megatron.config.model import ModelConfig
from megatron.conversion.convert import to_checkpoint, to_hf
from megatron.core.dist_checkpointing import tensor_file, whole
from megatron.core.dist_checkpointing.folders import find
from megatron.core.models.hf.families import read_config, write_config
from megatron.core.models.hf.source import HFSource
from megatron.core.models.source import stored_dtype
from megatron.training.export import CheckpointSource
from tests import pool
from tests.unit.models.builds import GPT, LLAMA
from tests.unit.models.hf_models import EXPERTS, MODELS, edit_json, make_hf_model, save_hf_model
from tools.checkpoint import convert

NO_TOKENIZER = TokenizerConfig()
WORDS = json.dumps(
    {
        "version": "1.0",
        "added_tokens": [],
        "model": {"type": "WordLevel", "vocab": {"<s>": 0, "</s>": 1, "a": 2}, "unk_token": "<s>"},
    }
)


def tensors_of(folder):
    return {key: t for file in folder.glob("*.safetensors") for key, t in load_file(file).items()}


def there_and_back(source, root):
    """HF -> checkpoint -> HF; the folder of the latter."""
    to_checkpoint(HFSource(source), root / "ours", dtype=HFSource(source).dtype, tokenizer=NO_TOKENIZER)
    ours = CheckpointSource(find(root / "ours", None))
    to_hf(ours, root / "back", dtype=ours.dtype, tokenizer=NO_TOKENIZER)
    return root / "back"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", sorted((MODELS | EXPERTS).keys() - {"phi3"}))
def test_there_and_back_is_byte_identical(tmp_path, name, dtype):
    model = save_hf_model(name, tmp_path / "hf", dtype, max_shard_size="40KB")
    back = there_and_back(tmp_path / "hf", tmp_path)
    before, after = tensors_of(tmp_path / "hf"), tensors_of(back)
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        assert tensor.dtype == after[key].dtype == stored_dtype(key, dtype)
        assert torch.equal(tensor.view(torch.uint8), after[key].view(torch.uint8)), key
    (family, described), (_, before) = read_config(back), read_config(tmp_path / "hf")
    assert described == dataclasses.replace(
        before, kv_channels=None if before.multi_latent_attention else before.head_dim
    )
    # Without its window a Mistral is a Llama; what says otherwise is beside a tokenizer, which this folder has not.
    assert family.model_type == ("llama" if name == "mistral without window" else model.config.model_type)
    AutoConfig.from_pretrained(back)


def test_a_phi3_without_longrope_stays_one_by_the_config_beside_its_tokenizer(tmp_path):
    save_hf_model("phi3", tmp_path / "hf")
    (tmp_path / "hf" / "tokenizer.json").write_text(WORDS)
    words = ["--loader", "hf", "--saver", "megatron", "--load-dir", f"{tmp_path}/hf", "--save-dir", f"{tmp_path}/ours"]
    assert convert.main(words) == 0
    words = ["--loader", "megatron", "--saver", "hf", "--load-dir", f"{tmp_path}/ours", "--save-dir", f"{tmp_path}/b"]
    assert convert.main(words) == 0
    before, after = tensors_of(tmp_path / "hf"), tensors_of(tmp_path / "b")
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor.view(torch.uint8), after[key].view(torch.uint8)) for key, tensor in before.items())
    assert read_config(tmp_path / "b")[0].model_type == "phi3"


def test_a_config_beside_the_tokenizer_goes_along(tmp_path):
    save_hf_model("mistral without window", tmp_path / "hf")
    edit_json(tmp_path / "hf" / "config.json", eos_token_id=[2, 7])
    (tmp_path / "hf" / "tokenizer.json").write_text(WORDS)
    words = ["--loader", "hf", "--saver", "megatron", "--load-dir", f"{tmp_path}/hf", "--save-dir", f"{tmp_path}/ours"]
    assert convert.main(words) == 0
    words = ["--loader", "megatron", "--saver", "hf", "--load-dir", f"{tmp_path}/ours", "--save-dir", f"{tmp_path}/b"]
    assert convert.main([*words, "--bf16"]) == 0
    config = json.loads((tmp_path / "b/config.json").read_text())
    assert config["model_type"] == "mistral" and config["eos_token_id"] == [2, 7]
    assert config["torch_dtype"] == "bfloat16" and "dtype" not in config
    assert (tmp_path / "b/tokenizer.json").read_text() == WORDS


def test_transformers_loads_it_without_a_warning(tmp_path, caplog):
    model = save_hf_model("qwen2", tmp_path / "hf", torch.bfloat16)
    back = there_and_back(tmp_path / "hf", tmp_path)
    hf_logging.enable_propagation()
    try:
        loaded, info = AutoModelForCausalLM.from_pretrained(back, output_loading_info=True)
    finally:
        hf_logging.disable_propagation()
    assert not any(info.values()), info
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == []
    assert loaded.dtype == torch.bfloat16
    assert all(torch.equal(p, dict(loaded.named_parameters())[key]) for key, p in model.named_parameters())


def test_several_shards_have_an_index(tmp_path, monkeypatch):
    save_hf_model("llama", tmp_path / "hf")
    monkeypatch.setattr(export_module, "SHARD_BYTES", 50_000)
    to_hf(HFSource(tmp_path / "hf"), tmp_path / "out", dtype=torch.float32, tokenizer=NO_TOKENIZER)
    shards = sorted(tmp_path.glob("out/*.safetensors"))
    assert len(shards) > 3 and all(file.stat().st_size < 60_000 for file in shards)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    expected = dict(make_hf_model("llama").named_parameters())
    assert all(torch.equal(p, expected[key]) for key, p in model.named_parameters())


@pytest.mark.slow
def test_small_blocks_give_the_same_files(tmp_path, monkeypatch):
    save_hf_model("llama with biases", tmp_path / "hf")
    source = HFSource(tmp_path / "hf")
    for number, size in enumerate((2**25, 4 * 100, 4)):
        monkeypatch.setattr(whole, "BLOCK_BYTES", size)
        to_checkpoint(source, tmp_path / f"ours{number}", dtype=torch.float32, tokenizer=NO_TOKENIZER)
    files = [sorted(tmp_path.glob(f"ours{number}/iter_0000000/*")) for number in range(3)]
    assert len(files[0]) == 2
    for other in files[1:]:
        assert [a.read_bytes() for a in files[0]] == [b.read_bytes() for b in other]


@pytest.mark.parametrize(("flag", "dtype"), [("--bf16", torch.bfloat16), ("--fp16", torch.float16)])
def test_a_dtype_is_rounded_to_once(tmp_path, flag, dtype):
    model = save_hf_model("llama", tmp_path / "hf")
    words = ["--loader", "hf", "--saver", "megatron", "--load-dir", f"{tmp_path}/hf", "--save-dir", f"{tmp_path}/ours"]
    assert convert.main([*words, flag]) == 0
    words = ["--loader", "megatron", "--saver", "hf", "--load-dir", f"{tmp_path}/ours", "--save-dir", f"{tmp_path}/b"]
    assert convert.main(words) == 0
    found = tensors_of(tmp_path / "b")
    assert all(torch.equal(p.to(dtype), found[key]) for key, p in model.named_parameters())
    assert json.loads((tmp_path / "b/config.json").read_text())["torch_dtype"] == str(dtype).removeprefix("torch.")


def test_a_packed_tensor_of_queries_keys_and_values(tmp_path):
    """Baichuan-7B is a Llama whose three projections are one tensor."""
    model = save_hf_model("llama without groups", tmp_path / "hf")
    tensors = dict(model.state_dict())
    for layer in range(3):
        at = f"model.layers.{layer}.self_attn."
        tensors[f"{at}W_pack.weight"] = torch.cat([tensors.pop(f"{at}{x}_proj.weight") for x in "qkv"])
    folder = tmp_path / "baichuan"
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((tmp_path / "hf/config.json").read_text())
    drop = ("attention_bias", "mlp_bias", "num_key_value_heads", "head_dim")
    config = {key: value for key, value in config.items() if key not in drop}
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "baichuan"}))
    back = tensors_of(there_and_back(folder, tmp_path))
    assert all(torch.equal(tensor, back[key]) for key, tensor in model.state_dict().items())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "baichuan", "z_loss_weight": 0}))
    with pytest.raises(CheckpointError, match="Baichuan 2"):
        read_config(folder)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"model_type": "bert"}, "model_type 'bert' is not supported; llama, mistral"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; only 'silu'"),
        ({"logit_scale": 0.5}, "unknown field logit_scale = 0.5"),
        (
            {"attention_multiplier": 2.0, "residual_multiplier": 3},
            "unknown fields attention_multiplier = 2.0, residual",
        ),
        ({"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, "rope type 'longrope' is not supported"),
        ({"rope_parameters": {"rope_type": "proportional", "factor": 2.0}}, "rope type 'proportional' is not"),
        ({"rope_parameters": {"rope_type": "default", "odd": 2.0}}, "unknown field odd = 2.0"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5; only 1.0"),
        ({"rope_parameters": {"rope_type": "linear"}}, "factor is missing"),
        ({"attention_bias": "qkv"}, "attention_bias is 'qkv', not a value of type bool"),
        ({"num_hidden_layers": "three"}, "num_hidden_layers is 'three', not a value of type int"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"num_key_value_heads": True}, "num_key_value_heads is True, not a value of type int"),
        ({"quantization_config": {"bits": 4}}, "quantization_config: quant_method is missing"),
    ],
)
def test_a_config_that_would_change_the_maths_is_refused_by_name(tmp_path, changes, problem):
    save_hf_model("llama", tmp_path)
    edit_json(tmp_path / "config.json", **changes)
    with pytest.raises(CheckpointError, match=problem) as caught:
        read_config(tmp_path)
    assert "\n" not in str(caught.value) and "config.json" in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({**GPT, "qk_layernorm": False, "normalization": "RMSNorm"}, "normalization RMSNorm"),
        ({**LLAMA, "squared_relu": True, "swiglu": False, "post_norm": True}, "arcee, the nearest, has no post_norm"),
        ({**LLAMA, "qk_layernorm": True, "add_bias_linear": True}, "qk_layernorm True"),
        ({**LLAMA, "apply_layernorm_1p": True}, "apply_layernorm_1p True"),
        ({**LLAMA, "rotary_interleaved": True, "qk_layernorm": True}, "rotary_interleaved True"),
        ({**LLAMA, "window_size": "3,0", "window_attn_skip_freq": "2", "logits_scaling": 2.0}, "logits_scaling 2.0"),
        ({**LLAMA, "window_size": "3,0", "logits_scaling": 8.0}, "mistral, the nearest, has no logits_scaling 8.0"),
    ],
)
def test_a_model_that_no_family_holds_is_refused(fields, named):
    with pytest.raises(ConfigError, match=named):
        write_config(ModelConfig(**fields))


def bad_shard(folder):
    file = max(folder.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-5])


def other_shape(folder):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"] = torch.ones(65)
    save_file(tensors, path)


def other_tensors(folder, remove="", add=""):
    path = folder / "model.safetensors"
    tensors = {key: t for key, t in load_file(path).items() if key != remove}
    save_file({**tensors, **({add: torch.ones(2)} if add else {})}, path)


def only_pickled(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


@pytest.mark.parametrize(
    ("damage", "shards", "problem"),
    [
        (lambda folder: max(folder.glob("*.safetensors")).unlink(), "40KB", "is not there, though .* names it"),
        (bad_shard, "40KB", "is damaged or no safetensors file: it has"),
        (other_shape, "1GB", r"tensor model.norm.weight is \[65\], its config.json requires \[64\]"),
        (lambda f: other_tensors(f, remove="lm_head.weight"), "1GB", "holds no tensor lm_head.weight"),
        (lambda f: other_tensors(f, add="model.layers.0.x"), "1GB", "does not describe, model.layers.0.x among"),
        (only_pickled, "1GB", "pytorch_model.bin, which could run code"),
        (lambda folder: (folder / "config.json").unlink(), "1GB", "config.json is not there"),
        (lambda folder: (folder / "config.json").write_text("{"), "1GB", "config.json cannot be read"),
        (lambda folder: (folder / "model.safetensors").unlink(), "1GB", "holds neither model.safetensors nor"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(tmp_path, capsys, damage, shards, problem):
    save_hf_model("llama", tmp_path / "hf", max_shard_size=shards)
    damage(tmp_path / "hf")
    capsys.readouterr()
    words = ["--loader", "hf", "--saver", "megatron", "--load-dir", f"{tmp_path}/hf", "--save-dir", f"{tmp_path}/ours"]
    assert convert.main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    assert re.search(problem, error), error
    assert not (tmp_path / "ours").exists()


def test_old_leftovers_are_let_pass_only_where_they_say_nothing_new(tmp_path):
    model = save_hf_model("llama 3.2", tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    tensors["lm_head.weight"] = model.get_input_embeddings().weight.detach().clone()
    save_file(tensors, path)
    HFSource(tmp_path)
    tensors["lm_head.weight"][3, 5] += 1
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match=r"ties the head to the embedding, but lm_head\.weight differs"):
        HFSource(tmp_path)


@pytest.mark.parametrize("saver", ["megatron", "hf"])
def test_a_folder_in_use_is_left_alone(tmp_path, capsys, saver):
    save_hf_model("llama", tmp_path / "hf")
    words = ["--loader", "hf", "--saver", saver, "--load-dir", f"{tmp_path}/hf", "--save-dir", f"{tmp_path}/out"]
    assert convert.main(words) == 0
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert convert.main(words) == 2
    assert "give another folder" in capsys.readouterr().err
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


@pytest.mark.parametrize("saver", ["megatron", "hf"])
def test_a_full_disk_leaves_nothing(tmp_path, capsys, monkeypatch, saver):
    save_hf_model("llama", tmp_path / "hf")

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tensor_file, "_crc", full)
    capsys.readouterr()
    words = ["--loader", "hf", "--saver", saver, "--load-dir", f"{tmp_path}/hf", "--save-dir", f"{tmp_path}/out/x"]
    assert convert.main(words) == 2
    assert capsys.readouterr().err == "error: the disk: No space left on device; make room, or write elsewhere\n"
    assert not (tmp_path / "out" / "x").exists()


def convert_until_killed(words, calls):
    """Die at the `calls`-th block that is written."""
    real, seen = tensor_file._crc, 0

    def count(*args):
        nonlocal seen
        seen += 1
        if seen == calls:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args)

    tensor_file._crc, whole.BLOCK_BYTES = count, 4096
    convert.main(words)


@pytest.mark.parametrize("saver", ["megatron", "hf"])
def test_a_kill_at_any_moment_leaves_no_half_model(tmp_path, saver):
    save_hf_model("llama", tmp_path / "hf")
    out, rng = tmp_path / "out", random.Random(3)
    context = multiprocessing.get_context("forkserver")  # a fork of this process would wait for its threads of OpenMP
    context.set_forkserver_preload(pool.PRELOAD)
    words = ["--loader", "hf", "--saver", saver, "--load-dir", f"{tmp_path}/hf", "--save-dir", str(out)]
    killed = 0
    for _ in range(20):
        process = context.Process(target=convert_until_killed, args=(words, rng.randrange(1, 120)))
        process.start()
        process.join(60)
        if process.exitcode == 0:
            break
        killed += 1
        assert process.exitcode == -signal.SIGKILL
        assert not out.exists() if saver == "hf" else find(out, None) is None
    assert killed >= 5
    if process.exitcode != 0:
        assert convert.main(words) == 0
    shapes = HFSource(tmp_path / "hf").shapes
    assert (HFSource(out) if saver == "hf" else CheckpointSource(find(out, None))).shapes == shapes
    assert list(tmp_path.rglob("*.tmp*")) == []
