"""Adapters of modules that hold several projections, and of MLPs beside experts: as PEFT reads and writes them."""

import dataclasses
import json

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from megatron.base.box import Box
from megatron.base.errors import CheckpointError
from megatron.core.models.hf.adapter import AdaptedSource, AdapterSource
from megatron.core.models.hf.families import base_family, read_config
from megatron.core.models.hf.peft import ADAPTER_CONFIG, ADAPTER_FILE
from megatron.core.models.hf.source import HFSource
from megatron.core.models.mapping import gather
from megatron.core.models.merge import MergedSource
from megatron.spec.decoder import decoder_spec
from megatron.spec.lora import adapter_names
from megatron.tooling.restore import read_hf, restore_model
from megatron.training.export import adapter_export
from tests import pool
from tests.unit.models.builds import CPU, make_ids
from tests.unit.models.hf_models import edit_json, make_hf_model, save_hf_model, save_published
from tests.unit.models.test_adapter import assert_close, ours_of, save_adapter, theirs_of
from tests.unit.models.test_hf_conversion import LENGTH, logits_of
from tests.unit.models.test_hf_families import SHAPES, make_model

FUSED = {
    "phi3": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],
    "phi4 mini": ["qkv_proj", "down_proj"],
    "glm": ["q_proj", "v_proj", "gate_up_proj"],
    "starcoder2": ["k_proj", "c_fc", "c_proj"],
}
# Base model, projections with adapters, and the modules that PEFT adapts for them.
WRITTEN = {
    "all of phi3": ("phi3", ("all-linear",), FUSED["phi3"], []),
    "one of three": ("phi3", ("k_proj", "down_proj"), ["qkv_proj", "down_proj"], []),
    "the outer two": ("phi4 mini", ("q_proj", "v_proj", "up_proj"), ["qkv_proj", "gate_up_proj"], []),
    "all of glm": ("glm", ("all-linear",), ["q_proj", "k_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj"], []),
    "one of the MLP": ("glm", ("o_proj", "gate_proj"), ["o_proj", "gate_up_proj"], []),
    "without a gate": ("starcoder2", ("v_proj", "up_proj", "down_proj"), ["v_proj", "c_fc", "c_proj"], []),
    "names of some modules": ("phi", ("v_proj", "o_proj", "up_proj"), ["v_proj", "dense", "fc1"], []),
    "latents": (
        "deepseek v3",
        ("linear_qkv", "o_proj"),
        ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"],
        [],
    ),
    "latents of keys and values": ("moonlight", ("q_proj", "kv_b_proj"), ["q_proj", "kv_b_proj"], []),
    "delta nets": (
        "qwen3.5",
        ("in_proj", "out_proj", "q_proj"),
        ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj", "q_proj"],
        [],
    ),
    "shared experts": (
        "qwen2 moe",
        ("q_proj", "up_proj", "down_proj"),
        ["q_proj"],
        [f"mlp.{x}.weight" for x in ("up_proj", "down_proj", "shared_expert.up_proj", "shared_expert.down_proj")],
    ),
    "shared experts alone": (
        "qwen2 moe, all layers",
        ("linear_fc1",),
        [],
        ["mlp.shared_expert.gate_proj.weight", "mlp.shared_expert.up_proj.weight"],
    ),
    "dense layers beside experts": (
        "qwen3 moe with windows",
        ("k_proj", "gate_proj"),
        ["k_proj"],
        ["mlp.gate_proj.weight"],
    ),
}


class RandomAdapter:
    """Adapters of a Hugging Face folder as a Source, as a checkpoint of ours holds them."""

    def __init__(self, base, projections):
        fields = {"lora_rank": 3, "lora_alpha": 5.0, "lora_target_modules": projections}
        self.model = dataclasses.replace(HFSource(base).model, **fields)
        self.base, self.path, self.dtype = str(base), base, torch.float32
        spec, self.tensors = decoder_spec(self.model), {}
        generator = torch.Generator().manual_seed(6)
        for number, layer in enumerate(spec.layers):
            for path, linear in layer.linears().items():
                for projection in linear.projections:
                    if projection.name in spec.lora.projections:
                        names = adapter_names(f"decoder.layers.{number}.{path}", projection.name)
                        for name, matrix in zip(names, spec.lora.pair(linear, projection), strict=True):
                            self.tensors[name] = torch.randn(matrix.shape, generator=generator) * 0.2
        self.shapes = {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}

    def read(self, name, box, dtype):
        place = tuple(slice(start, start + size) for start, size in zip(box.offset, box.shape, strict=True))
        return self.tensors[name][place].to(dtype).clone()


def write(source, folder):
    export = adapter_export(source, folder, source.dtype)
    export.begin()
    export.write(export.shards)
    export.finish({}, {})


def whole(source, name):
    shape = source.shapes[name]
    return source.read(name, Box((0,) * len(shape), shape), torch.float32)


def save_base(name, folder):
    if name == "qwen2 moe, all layers":
        make_hf_model("qwen2 moe", decoder_sparse_step=1).save_pretrained(folder)
    elif name == "phi":
        make_model(name, SHAPES[1]).save_pretrained(folder)
    else:
        save_hf_model(name, folder)


@torch.no_grad()
def logits_with(base, source):
    """Of our model with the adapters of `source`."""
    saved = dataclasses.replace(read_hf(str(base)), model=source.model, adapter=source)
    model, build = restore_model(saved, pool.groups(), CPU)
    return logits_of(model, make_ids(2, LENGTH)[:, :-1], build.config.vocab_size)


@pytest.mark.parametrize("base", FUSED)
def test_the_logits_of_an_adapter_that_peft_trained(tmp_path, base):
    expected = theirs_of(save_adapter(tmp_path, base=base, target_modules=FUSED[base]))
    before = theirs_of(AutoModelForCausalLM.from_pretrained(tmp_path / "base"))
    assert (expected - before).abs().max() > 0.1 * before.abs().max()
    assert_close(ours_of(tmp_path / "base", tmp_path / "adapter"), expected)


@pytest.mark.parametrize("base", FUSED)
def test_the_merged_weights_of_peft(tmp_path, base):
    merged = (
        save_adapter(tmp_path, base=base, target_modules=FUSED[base], use_rslora=True).merge_and_unload().state_dict()
    )
    plain = HFSource(tmp_path / "base")
    source = MergedSource(AdaptedSource(plain, AdapterSource(tmp_path / "adapter", plain.model)))
    for name, shape in plain.table.theirs.items():
        box = Box((0,) * len(shape), shape)
        pieces = plain.table.of_theirs(name, box)
        tensor = gather(pieces, box, torch.float32, lambda n, b: source.read(n, b, torch.float32))
        torch.testing.assert_close(tensor, merged[name], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("case", WRITTEN)
def test_peft_applies_what_is_written(tmp_path, case):
    base, projections, modules, parameters = WRITTEN[case]
    save_base(base, tmp_path / "base")
    source = RandomAdapter(tmp_path / "base", projections)
    write(source, tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter" / ADAPTER_CONFIG).read_text())
    assert config["target_modules"] == modules and config.get("target_parameters", []) == parameters
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base", experts_implementation="eager")
    before = theirs_of(plain)
    with_peft = theirs_of(PeftModel.from_pretrained(plain, tmp_path / "adapter").eval())
    ours = logits_with(tmp_path / "base", source)
    assert (ours - before).abs().max() > 0.05 * before.abs().max()
    assert_close(ours, with_peft)


@pytest.mark.parametrize("case", WRITTEN)
def test_what_is_written_is_read_back(tmp_path, case):
    """Bit for bit; a projection without an adapter beside others in its module comes back with zeros."""
    base, projections, _, _ = WRITTEN[case]
    save_base(base, tmp_path / "base")
    source = RandomAdapter(tmp_path / "base", projections)
    write(source, tmp_path / "adapter")
    again = AdapterSource(tmp_path / "adapter", HFSource(tmp_path / "base").model)
    assert (again.model.lora_rank, again.model.lora_alpha) == (3, 5.0)
    assert source.shapes.keys() <= again.shapes.keys()
    for name in again.shapes:
        expected = source.tensors.get(name, torch.zeros(again.shapes[name]))
        assert whole(again, name).equal(expected), name


@pytest.mark.parametrize("base", FUSED)
def test_an_adapter_of_peft_is_written_with_the_same_function(tmp_path, base):
    """With its one A for each projection; the next reading gives the same tensors."""
    save_adapter(tmp_path, base=base, target_modules=FUSED[base])
    plain = HFSource(tmp_path / "base").model
    first = AdapterSource(tmp_path / "adapter", plain)
    stored = load_file(tmp_path / "adapter" / ADAPTER_FILE)
    one_a = "decoder.layers.1.mlp.linear_fc1.lora.up_proj.a"
    if "gate_up_proj" in FUSED[base]:
        name = "base_model.model.model.layers.1.mlp.gate_up_proj.lora_A.weight"
        assert whole(first, one_a).equal(stored[name])
    first.base, first.path = str(tmp_path / "base"), tmp_path / "adapter"
    write(first, tmp_path / "written")
    second = AdapterSource(tmp_path / "written", plain)
    assert second.model == first.model and second.shapes == first.shapes
    assert all(whole(second, name).equal(whole(first, name)) for name in first.shapes)
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    one = theirs_of(PeftModel.from_pretrained(read, tmp_path / "written").eval())
    assert_close(one, ours_of(tmp_path / "base", tmp_path / "adapter"))


def test_the_packed_weight_of_baichuan(tmp_path):
    """W + alpha / r B A by hand: transformers has no such model."""
    base, name = tmp_path / "base", "self_attn.W_pack"
    save_published("Baichuan 7B", base, torch.float32)
    plain = HFSource(base)
    family, model = read_config(base)
    assert base_family(dataclasses.replace(model, lora_rank=4), base) is family
    adapter, size = tmp_path / "adapter", model.hidden_size
    adapter.mkdir()
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 6, "target_modules": ["W_pack"]}
    (adapter / ADAPTER_CONFIG).write_text(json.dumps(config))
    generator, tensors = torch.Generator().manual_seed(2), {}
    for layer in range(model.num_layers):
        for matrix, shape in {"A": (4, size), "B": (3 * size, 4)}.items():
            key = f"base_model.model.model.layers.{layer}.{name}.lora_{matrix}.weight"
            tensors[key] = torch.randn(shape, generator=generator)
    save_file(tensors, adapter / ADAPTER_FILE)
    source = AdapterSource(adapter, plain.model)
    source.base, source.path = str(base), adapter
    write(source, tmp_path / "written")
    written = load_file(tmp_path / "written" / ADAPTER_FILE)
    again = AdapterSource(tmp_path / "written", plain.model)
    for layer in range(model.num_layers):
        key = f"model.layers.{layer}.{name}"
        a, b = (tensors[f"base_model.model.{key}.lora_{matrix}.weight"] for matrix in "AB")
        many_a, many_b = (written[f"base_model.model.{key}.lora_{matrix}.weight"] for matrix in "AB")
        assert many_a.shape == (12, size)
        torch.testing.assert_close(many_b @ many_a, b @ a)
        box = Box((0, 0), (3 * size, size))
        expected = plain.folder.view(f"{key}.weight").float() + 6 / 4 * b @ a
        for adapters in (source, again):
            merged = MergedSource(AdaptedSource(plain, adapters))
            pieces = plain.table.of_theirs(f"{key}.weight", box)
            tensor = gather(pieces, box, torch.float32, lambda n, b, merged=merged: merged.read(n, b, torch.float32))
            torch.testing.assert_close(tensor, expected, rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fused")
    save_hf_model("phi3", folder / "base")
    write(RandomAdapter(folder / "base", ("all-linear",)), folder / "adapter")
    return folder


@pytest.fixture
def written(made, tmp_path):
    """A copy of an adapter of ours that the test may change."""
    for name in (ADAPTER_CONFIG, ADAPTER_FILE):
        (tmp_path / name).write_bytes((made / "adapter" / name).read_bytes())
    return tmp_path


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"alpha_pattern": {}}, "rank_pattern = .*'qkv_proj': 9.* and alpha_pattern = {}; only plain LoRA of one rank"),
        ({"rank_pattern": {"qkv_proj": 9}}, "alpha_pattern"),
        ({"r": 4}, "rank_pattern"),
        ({"use_rslora": True}, "alpha_pattern"),
        ({"rank_pattern": {}, "alpha_pattern": {}}, r"is \[6, 64\], .* requires on this model \[3, 64\]"),
    ],
)
def test_other_ranks_are_refused(made, written, changes, problem):
    edit_json(written / ADAPTER_CONFIG, **changes)
    with pytest.raises(CheckpointError, match=problem) as caught:
        AdapterSource(written, HFSource(made / "base").model)
    assert "\n" not in str(caught.value)


def test_blocks_that_peft_trained_further_are_refused(made, written):
    tensors = load_file(written / ADAPTER_FILE)
    name = "base_model.model.model.layers.2.mlp.gate_up_proj.lora_B.weight"
    tensors[name][-1, 0] = 1e-3
    save_file(tensors, written / ADAPTER_FILE)
    with pytest.raises(
        CheckpointError, match=r"layers\.2\.mlp\.gate_up_proj\.lora_B\.weight has values outside the blocks"
    ):
        AdapterSource(written, HFSource(made / "base").model)


def test_a_module_and_its_part_together_are_refused(made, written):
    tensors = load_file(written / ADAPTER_FILE)
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    save_file({**tensors, name: torch.zeros(3, 64)}, written / ADAPTER_FILE)
    config = json.loads((written / ADAPTER_CONFIG).read_text())
    edit_json(written / ADAPTER_CONFIG, target_modules=[*config["target_modules"], "q_proj"])
    with pytest.raises(CheckpointError, match=r"q_proj\.lora_A\.weight is \[3, 64\], .* nothing"):
        AdapterSource(written, HFSource(made / "base").model)
