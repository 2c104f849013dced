"""Hugging Face folders with weights in FP8: the numbers that numpy makes of the same bytes and scales, everywhere."""

import json
import re

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from megatron.base.box import Box
from megatron.core.models.hf.families import read_config
from megatron.core.models.hf.folder import HFFolder
from megatron.core.models.hf.fp8 import ScaledWeights, Scaling
from megatron.core.models.hf.source import HFSource
from tests.unit.models.fp8_models import BLOCKS, SCHEMES, compressed, e4m3_values, quantize_folder
from tests.unit.models.hf_models import edit_json, make_hf_model
from tests.unit.models.test_hf_many_tensors import measure
from tools.checkpoint import convert

# Last blocks of 64, 32, 48 and 24 rows or columns.
DENSE = {"hidden_size": 192, "intermediate_size": 160, "num_hidden_layers": 2, "head_dim": 24}
WIDTHS = {"qwen3_moe": "moe_intermediate_size", "qwen2_moe": "moe_intermediate_size", "mixtral": "intermediate_size"}
EXPERTS = {"mixtral": "mixtral", "qwen3 moe": "qwen3_moe", "qwen2 moe": "qwen2_moe"}


def save_model(name, folder, dtype=torch.bfloat16, **options):
    """A model with matrices of several blocks, of which the last ones are smaller."""
    sizes = {key: value for key, value in DENSE.items() if key != "head_dim" or name in ("llama", "qwen3 moe")}
    if name in EXPERTS:
        sizes |= {WIDTHS[EXPERTS[name]]: 136, ("num_local_experts" if name == "mixtral" else "num_experts"): 4}
        sizes |= {"num_experts_per_tok": 2}
    make_hf_model(name, dtype, **sizes).save_pretrained(folder, **options)


def tensors_of(folder):
    return {key: tensor for file in folder.glob("*.safetensors") for key, tensor in load_file(file).items()}


def test_the_numbers_of_the_bytes_are_those_of_torch():
    found = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    assert np.array_equal(found, e4m3_values(), equal_nan=True)


FOLDERS = [
    *(("llama", scheme) for scheme in SCHEMES),
    *((name, "blocks") for name in ("phi3", *EXPERTS)),
    ("qwen3 moe", "compressed, channel"),
]


@pytest.mark.parametrize(("name", "scheme"), FOLDERS)
def test_conversion_multiplies_by_the_scales(tmp_path, capsys, name, scheme):
    """The tool writes what numpy has, rounded once; from several files, and transformers loads it."""
    save_model(name, tmp_path / "hf", max_shard_size="200KB")
    expected = quantize_folder(tmp_path / "hf", scheme)
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 1
    for flag, dtype in (("--fp32", torch.float32), (None, torch.bfloat16)):
        out = tmp_path / str(dtype)
        words = ["--loader", "hf", "--load-dir", f"{tmp_path}/hf", *([flag] if flag else [])]
        assert convert.main([*words, "--saver", "hf", "--save-dir", str(out)]) == 0, capsys.readouterr().err
        found = tensors_of(out)
        assert found.keys() == expected.keys()
        for key, values in expected.items():
            assert found[key].dtype == dtype and torch.equal(found[key], torch.from_numpy(values).to(dtype)), key
        config = json.loads((out / "config.json").read_text())
        assert "quantization_config" not in config and config["torch_dtype"] == str(dtype).removeprefix("torch.")
    _, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True, experts_implementation="eager")
    assert not any(info.values()), info


def test_stacked_experts(tmp_path):
    """A scale for each block of each expert of `gate_up_proj` [E, 2 f, h], whose halves begin within a block."""
    save_model("qwen3 moe", tmp_path, save_original_format=False)
    expected = quantize_folder(tmp_path, "blocks")
    source = HFSource(tmp_path)
    own = "decoder.layers.1.mlp.experts.linear_fc"
    fc1, fc2 = (read_whole(source, f"{own}{number}.weight") for number in (1, 2))
    theirs = expected["model.layers.1.mlp.experts.gate_up_proj"]
    assert "model.layers.1.mlp.experts.gate_up_proj_scale_inv" in source.folder.entries
    assert torch.equal(fc1, torch.from_numpy(theirs).view(4, 2, 136, 192))
    assert torch.equal(fc2, torch.from_numpy(expected["model.layers.1.mlp.experts.down_proj"]))


def read_whole(source, name):
    shape = source.shapes[name]
    return source.read(name, Box((0,) * len(shape), shape), torch.float32)


@pytest.mark.parametrize("scheme", ["blocks", "compressed, channel", "per tensor, vllm"])
def test_any_rectangle_of_a_weight(tmp_path, scheme):
    """Wherever it begins in a block; also into memory with gaps between its rows."""
    save_model("llama", tmp_path)
    expected = quantize_folder(tmp_path, scheme)
    source, generator = HFSource(tmp_path), np.random.default_rng(5)
    for name in ("model.layers.0.mlp.down_proj.weight", "model.layers.1.self_attn.q_proj.weight"):
        for _ in range(25):
            offset = tuple(int(generator.integers(size)) for size in expected[name].shape)
            ends = [int(generator.integers(at, size)) + 1 for at, size in zip(offset, expected[name].shape)]
            box = Box(offset, tuple(end - at for at, end in zip(offset, ends)))
            out = torch.full((box.shape[0], box.shape[1] + 3), -1.0)[:, : box.shape[1]]
            source.weights.fill(out, [name], box)
            cut = tuple(slice(at, end) for at, end in zip(offset, ends))
            assert np.array_equal(out.numpy(), expected[name][cut]), (name, box)


def test_transformers_has_the_same_numbers(tmp_path):
    """Of a folder whose matrices are whole blocks: transformers spreads scales over others unevenly."""
    shape = {"hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 1, "num_key_value_heads": 4}
    make_hf_model("llama", torch.bfloat16, **shape).save_pretrained(tmp_path)
    quantize_folder(tmp_path, "blocks")
    theirs = dict(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).named_parameters())
    source = HFSource(tmp_path)
    assert source.dtype == torch.bfloat16 and len(source.weights.scales) == 7
    for own, name in (("self_attention.linear_proj", "self_attn.o_proj"), ("mlp.linear_fc2", "mlp.down_proj")):
        expected = theirs[f"model.layers.0.{name}.weight"]
        box = Box((0, 0), tuple(expected.shape))
        found = source.read(f"decoder.layers.0.{own}.weight", box, torch.bfloat16)
        assert torch.equal(found.view(expected.shape), expected)


def test_a_model_is_described_as_without_fp8(tmp_path):
    save_model("llama", tmp_path)
    before = read_config(tmp_path)
    quantize_folder(tmp_path, "blocks")
    assert read_config(tmp_path) == before


def read_scaled(folder, name, size):
    weights = ScaledWeights(HFFolder(folder), Scaling("block", ("_scale_inv",)), {name: (size, size)})
    out = torch.empty(size, size, dtype=torch.bfloat16)
    weights.fill(out, [name], Box((0, 0), (size, size)))
    assert out[0, 0] == out[-1, -1] == 2
    return out


def test_memory_is_that_of_the_result_and_of_one_mapped_weight(tmp_path):
    """And not a copy in fp32, which would be twice the result."""
    size, name = 6144, "w.weight"
    weight = torch.full((size, size), 56, dtype=torch.uint8).view(torch.float8_e4m3fn)  # one
    scales = torch.full((size // 128, size // 128), 2.0)
    save_file({name: weight, f"{name}_scale_inv": scales}, tmp_path / "model.safetensors")
    del weight
    _, memory, _ = measure(read_scaled, tmp_path, name, size)
    assert 2 * size**2 <= memory < 3 * size**2 + 40e6


def change(folder, **tensors):
    """Set tensors of a folder with one file; None removes one."""
    path = folder / "model.safetensors"
    held = {key: tensor for key, tensor in (load_file(path) | tensors).items() if tensor is not None}
    save_file(held, path, {"format": "pt"})


Q = "model.layers.0.self_attn.q_proj.weight"
SCALE = f"{Q}_scale_inv"
BAD_SCALES = [
    (None, rf"holds no tensor {SCALE} with the scales of {Q}, which is in FP8"),
    (
        torch.ones(2, 1),
        rf"tensor {SCALE} is torch.float32 \[2, 1\]; {Q} \[192, 192\], scaled by block, requires .*\[2, 2\]",
    ),
    (torch.ones(2, 2, dtype=torch.int32), rf"tensor {SCALE} is torch.int32 \[2, 2\]"),
    (torch.tensor([[1.0, 2.0], [float("nan"), 1.0]]), f"tensor {SCALE} has scales that are negative or not finite"),
    (torch.tensor([[1.0, 2.0], [1.0, -1.0]]), f"tensor {SCALE} has scales that are negative or not finite"),
]


@pytest.mark.parametrize(("scale", "problem"), BAD_SCALES)
def test_wrong_scales_are_one_line_and_write_nothing(tmp_path, capsys, scale, problem):
    save_model("llama", tmp_path / "hf")
    quantize_folder(tmp_path / "hf", "blocks")
    change(tmp_path / "hf", **{SCALE: scale})
    refused(tmp_path, capsys, problem)


CONFIGS = [
    (None, rf"tensor {re.escape(Q)[:10]}.* is in FP8, and config.json has no quantization_config"),
    ({**BLOCKS, "quant_method": "gptq"}, "quant_method 'gptq' is not supported; fp8, compressed-tensors"),
    ({**BLOCKS, "weight_block_size": [64, 128]}, r"weight_block_size is \[64, 128\]; only \[128, 128\]"),
    ({**BLOCKS, "weight_block_size": 128}, "weight_block_size is 128, not a value of type list"),
    (
        {**BLOCKS, "weight_block_size": None},
        r"_scale_inv is torch.float32 \[2, 2\]; .* scaled by tensor, requires .*\[\] or \[1\]",
    ),
    ({**BLOCKS, "fmt": "e5m2"}, "fmt is 'e5m2'; only 'e4m3'"),
    ({**BLOCKS, "bits": 4}, "quantization_config: unknown field bits = 4"),
    ({"weight_block_size": [128, 128]}, "quant_method is missing"),
    ({**compressed("block", block_structure=[128, 64])}, r"block_structure is \[128, 64\]; only"),
    ({**compressed("group", group_size=32)}, "strategy is 'group'; tensor, channel, block"),
    ({**compressed("channel", num_bits=4)}, "num_bits is 4; only 8"),
    ({**compressed("channel", type="int")}, "type is 'int'; only 'float'"),
    ({**compressed("channel"), "config_groups": {}}, "config_groups scales weights by nothing"),
    ({**compressed("channel"), "kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme is"),
    ({**compressed("channel")}, f"holds no tensor {re.escape(Q)[:10]}.*_scale with the scales of"),
]


@pytest.mark.parametrize(("config", "problem"), CONFIGS)
def test_another_format_is_one_line_and_writes_nothing(tmp_path, capsys, config, problem):
    save_model("llama", tmp_path / "hf")
    quantize_folder(tmp_path / "hf", "blocks")
    edit_json(tmp_path / "hf/config.json", quantization_config=config)
    refused(tmp_path, capsys, problem)


def refused(tmp_path, capsys, problem):
    capsys.readouterr()
    words = ["--loader", "hf", "--saver", "megatron", "--load-dir", f"{tmp_path}/hf", "--save-dir", f"{tmp_path}/ours"]
    assert convert.main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    assert re.search(problem, error), error
    assert not (tmp_path / "ours").exists()
