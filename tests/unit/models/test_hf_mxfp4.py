"""Folders of gpt-oss with experts in MXFP4: what transformers makes of the same bytes, whole and by shards, and bf16 in
what is written."""

import itertools
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from megatron.base.box import Box
from megatron.base.errors import CheckpointError
from megatron.core.models.hf.source import HFSource
from tests.unit.models.hf_models import edit_json
from tests.unit.models.test_hf_conversion import load, logits_of
from tests.unit.models.test_hf_families import make_model
from tools.checkpoint import convert

EXPERTS, WIDTH, HIDDEN = 3, 96, 64  # rows of three blocks and of two
SHAPE = (HIDDEN, 4, 2, WIDTH, 2, 61, False)
CONFIG = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}


@pytest.fixture
def folder(tmp_path):
    """(a folder in MXFP4; by name, the bf16 tensors that it stands for). All sixteen numbers and 13 powers of two."""
    path = tmp_path / "hf"
    fields = {"num_local_experts": EXPERTS, "num_experts_per_tok": 2, "wide": 0}
    make_model("gpt_oss", SHAPE, **fields).bfloat16().save_pretrained(path)
    generator = torch.Generator().manual_seed(3)
    tensors, expected = {}, {}
    for name, tensor in load_file(path / "model.safetensors").items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors[name] = expected[name] = tensor
            continue
        count, columns, rows = tensor.shape
        blocks = torch.randint(0, 256, (count, rows, columns // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(114, 127, (count, rows, columns // 32), generator=generator, dtype=torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        expected[name] = convert_moe_packed_tensors(blocks, scales)
        assert expected[name].shape == tensor.shape
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    edit_json(path / "config.json", quantization_config=CONFIG)
    return path, expected


def test_conversion_writes_bf16(folder, tmp_path, capsys):
    path, expected = folder
    words = ["--loader", "hf", "--load-dir", str(path), "--saver", "hf", "--save-dir", f"{tmp_path}/out"]
    assert convert.main(words) == 0, capsys.readouterr().err
    found = load_file(tmp_path / "out/model.safetensors")
    assert found.keys() == expected.keys()
    assert all(tensor.dtype == torch.bfloat16 and tensor.equal(expected[name]) for name, tensor in found.items())
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())


def test_any_box_is_read_alone(folder):
    """A rank's shard begins and ends inside blocks."""
    path, _ = folder
    source = HFSource(path)
    assert source.dtype == torch.bfloat16
    for name, ends in (
        ("decoder.layers.1.mlp.experts.linear_fc1.weight", ((0, 1, 3), (0, 1, 2), (0, 17, 96), (0, 21, 45, 64))),
        ("decoder.layers.0.mlp.experts.linear_fc2.weight", ((0, 2, 3), (0, 31, 64), (0, 33, 64, 96))),
    ):
        shape = source.shapes[name]
        whole, pieces = source.read(name, Box((0,) * len(shape), shape), torch.float32), torch.zeros(shape)
        for cuts in itertools.product(*(list(itertools.pairwise(of_dim)) for of_dim in ends)):
            box = Box(tuple(a for a, _ in cuts), tuple(b - a for a, b in cuts))
            pieces[tuple(slice(a, b) for a, b in cuts)] = source.read(name, box, torch.float32)
        assert pieces.equal(whole) and whole.count_nonzero() > 0.8 * whole.numel()


def test_the_model_is_that_of_the_tensors_in_bf16(folder, tmp_path):
    path, expected = folder
    plain = tmp_path / "plain"
    plain.mkdir()
    save_file(expected, plain / "model.safetensors", {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (plain / "config.json").write_text(json.dumps({name: config[name] for name in config if name[:5] != "quant"}))
    tokens = torch.arange(1, 33).view(2, 16)
    with torch.no_grad():
        logits = [logits_of(load(of)[0], tokens, SHAPE[5]) for of in (path, plain)]
    assert logits[0].equal(logits[1]) and logits[0].isfinite().all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda name, t: torch.full_like(t, 255) if name.endswith("_scales") else t, "scales that are no numbers"),
        (lambda name, t: t[..., :1].contiguous() if name.endswith("_scales") else t, "its config.json requires"),
        (lambda name, t: t[..., :8].contiguous() if name.endswith("_blocks") else t, "its config.json requires"),
        (lambda name, t: None if name.endswith("_scales") else t, "holds no tensor .*_scales"),
    ],
)
def test_damaged_folders(folder, change, message):
    path, _ = folder
    tensors = {name: change(name, tensor) for name, tensor in load_file(path / "model.safetensors").items()}
    tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=message):
        load(path)
