"""Training begins with weights in FP8 of a Hugging Face folder, under layouts whose shards cut blocks: the same
numbers."""

import json

import pytest
import torch
from safetensors.torch import load_file

from tests import pool
from tests.parallel import test_hf_experts, test_hf_layouts
from tests.unit.models.fp8_models import quantize_folder
from tests.unit.models.test_hf_fp8 import save_model


@pytest.mark.parametrize(("name", "scheme", "tp"), [("llama", "blocks", 2), ("qwen2", "compressed, channel", 2)])
def test_tensor_parallel(tmp_path, name, scheme, tp):
    save_model(name, tmp_path / "hf", max_shard_size="200KB")
    expected = quantize_folder(tmp_path / "hf", scheme)
    fields = {"load_hf": str(tmp_path / "hf"), "bf16": True}
    folders = pool.run(tp, test_hf_layouts.through, fields, str(tmp_path))
    assert_same(folders[0], expected, torch.bfloat16)


@pytest.mark.parametrize(("name", "layout"), [("qwen3 moe", "ep 2, etp 2"), ("mixtral", "tp 2, ep 2")])
def test_experts(tmp_path, name, layout):
    save_model(name, tmp_path / "hf", torch.float32)
    expected = quantize_folder(tmp_path / "hf", "blocks")
    tp, ep, etp, pp = sizes = test_hf_experts.LAYOUTS[layout]
    ranks = pool.run(max(tp, ep * etp) * pp, test_hf_experts.through, sizes, str(tmp_path / "hf"), str(tmp_path))
    assert_same(ranks[0][0], expected, torch.float32)


def assert_same(folder, expected, dtype):
    found = load_file(folder / "model.safetensors")
    assert found.keys() == expected.keys()
    for key, values in expected.items():
        assert torch.equal(found[key], torch.from_numpy(values).to(dtype)), key
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
