"""Adapters of PEFT put on a model: its logits and merged weights, slice by slice over tp, or a line that says why
not."""

import dataclasses
import itertools
import json

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from megatron.base.box import Box
from megatron.base.errors import CheckpointError
from megatron.core.models.hf.adapter import AdaptedSource, AdapterSource, read_adapter_config
from megatron.core.models.hf.families import read_config
from megatron.core.models.hf.family.family import ExpertNames
from megatron.core.models.hf.family.qwen import QWEN2
from megatron.core.models.hf.peft import ADAPTER_CONFIG, ADAPTER_FILE, adapter_config, adapter_table
from megatron.core.models.hf.source import HFSource
from megatron.core.models.mapping import gather
from megatron.core.models.merge import MergedSource
from megatron.core.parameter import local_parameters
from megatron.tooling.restore import read_hf, restore_model, with_adapter
from tests import pool
from tests.unit.models.builds import CPU, make_ids, sections
from tests.unit.models.hf_models import edit_json, save_hf_model
from tests.unit.models.test_hf_conversion import LENGTH, logits_of

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
KINDS = {
    "all": {"target_modules": ALL, "lora_alpha": 12, "lora_dropout": 0.1},
    "some": {"target_modules": ["q_proj", "v_proj", "up_proj", "o_proj"], "init_lora_weights": "gaussian"},
    "rank-stabilised": {"target_modules": ["k_proj", "down_proj"], "use_rslora": True},
    "by a pattern": {"target_modules": r".*\.(q|gate)_proj"},
}


def save_adapter(folder, kind="all", base="qwen2", **changes):
    """PEFT's own files of a random adapter beside `folder`/base; the adapted model of PEFT."""
    model = save_hf_model(base, folder / "base")
    torch.manual_seed(5)
    adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=3, **{**KINDS[kind], **changes}))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape) * 0.1)
    adapted.save_pretrained(folder / "adapter")
    return adapted.eval()


@torch.no_grad()
def theirs_of(model):
    return model(make_ids(2, LENGTH)[:, :-1]).logits


@torch.no_grad()
def ours_of(base, adapter):
    saved = with_adapter(read_hf(str(base), str(adapter)), str(adapter))
    model, build = restore_model(saved, pool.groups(), CPU)
    return logits_of(model, make_ids(2, LENGTH)[:, :-1], build.config.vocab_size)


def assert_close(one, other, limit=1e-5):
    assert (one - other).abs().max() <= limit * other.abs().max()


@pytest.mark.parametrize("kind", KINDS)
def test_the_logits_of_peft(tmp_path, kind):
    expected = theirs_of(save_adapter(tmp_path, kind))
    before = theirs_of(AutoModelForCausalLM.from_pretrained(tmp_path / "base"))
    assert (expected - before).abs().max() > 0.1 * before.abs().max()
    assert_close(ours_of(tmp_path / "base", tmp_path / "adapter"), expected)


@pytest.mark.parametrize("base", ["llama with one group", "qwen3", "llama with biases", "granite"])
def test_of_other_families(tmp_path, base):
    expected = theirs_of(save_adapter(tmp_path, base=base))
    assert_close(ours_of(tmp_path / "base", tmp_path / "adapter"), expected)


def test_the_merged_weights_of_peft(tmp_path):
    merged = save_adapter(tmp_path).merge_and_unload().state_dict()
    base = HFSource(tmp_path / "base")
    source = MergedSource(AdaptedSource(base, AdapterSource(tmp_path / "adapter", base.model)))
    assert source.shapes == base.shapes
    for name, shape in base.table.theirs.items():
        box = Box((0,) * len(shape), shape)
        found = gather(
            base.table.of_theirs(name, box), box, torch.float32, lambda n, b: source.read(n, b, torch.float32)
        )
        torch.testing.assert_close(found, merged[name], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_the_way_back_of_the_export(tmp_path, kind):
    """Every element of the adapter's file comes back, bit for bit, under a configuration that means the same."""
    save_adapter(tmp_path, kind)
    source = AdapterSource(tmp_path / "adapter", HFSource(tmp_path / "base").model)
    stored = load_file(tmp_path / "adapter" / ADAPTER_FILE)
    table = adapter_table(source.model, {}, ExpertNames().shared)
    assert table.theirs == {name: tuple(tensor.shape) for name, tensor in stored.items()}
    for name, tensor in stored.items():
        box = Box((0, 0), tuple(tensor.shape))
        pieces = table.of_theirs(name, box)
        assert gather(pieces, box, tensor.dtype, lambda n, b: source.read(n, b, torch.float32)).equal(tensor)
    (tmp_path / "again").mkdir()
    (tmp_path / "again" / ADAPTER_CONFIG).write_text(json.dumps(adapter_config(source.model, QWEN2, None)))
    save_file(stored, tmp_path / "again" / ADAPTER_FILE)
    assert read_adapter_config(tmp_path / "again") == read_adapter_config(tmp_path / "adapter")


def part(rank, size, folder):
    """This rank's sections."""
    saved = with_adapter(read_hf(str(folder / "base")), str(folder / "adapter"))
    model, _ = restore_model(saved, pool.groups(tp=size), CPU)
    return sections({name: p for name, p in local_parameters(model).items() if ".lora." in name})


def test_a_rank_reads_its_own_slices(tmp_path):
    save_adapter(tmp_path)
    source = AdapterSource(tmp_path / "adapter", HFSource(tmp_path / "base").model)
    ranks = pool.run(2, part, tmp_path)
    for name, offset, piece in itertools.chain(*ranks):
        assert source.read(name, Box(offset, piece.shape), torch.float32).equal(torch.from_numpy(piece)), name
    assert all({name for name, _, _ in rank} == source.shapes.keys() for rank in ranks)


def test_an_adapter_beside_the_model_is_applied_or_refused(tmp_path):
    """transformers applies it unasked."""
    save_adapter(tmp_path).save_pretrained(tmp_path / "base")
    expected = theirs_of(AutoModelForCausalLM.from_pretrained(tmp_path / "base"))
    with pytest.raises(CheckpointError, match=r"base holds an adapter .* give --load-adapter .*base"):
        HFSource(tmp_path / "base")
    with pytest.raises(CheckpointError, match="holds an adapter in addition to the model"):
        read_hf(str(tmp_path / "base"), str(tmp_path / "adapter"))
    assert_close(ours_of(tmp_path / "base", tmp_path / "base"), expected)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"use_dora": True}, "unknown field use_dora = True; only plain LoRA"),
        ({"modules_to_save": ["lm_head"]}, r"unknown field modules_to_save = \['lm_head'\]"),
        ({"layers_to_transform": [0], "layers_pattern": "layers"}, "layers_pattern = 'layers', layers_to_transform ="),
        ({"rank_pattern": {"q_proj": 4}}, "rank_pattern = {'q_proj': 4}"),
        ({"alpha_pattern": {"q_proj": 4}}, "alpha_pattern"),
        ({"bias": "all"}, "bias is 'all'; only 'none'"),
        ({"lora_bias": True}, "lora_bias = True"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out = True"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa', which may change the base"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3'; only 'LORA'"),
        ({"task_type": "SEQ_CLS"}, "task_type is 'SEQ_CLS'; only 'CAUSAL_LM'"),
        ({"r": 0}, "r is 0; it must be 1 or more"),
        ({"lora_alpha": "16"}, "lora_alpha is '16', not a value of type int or float"),
        ({"lora_dropout": 1.0}, "lora_dropout is 1.0; it must be at least 0 and below 1"),
        ({"target_modules": None}, "target_modules is missing"),
        ({"target_modules": ["embed_tokens", "q_proj"]}, "target_modules names embed_tokens; only q_proj"),
        (
            {"target_modules": ["q_proj"]},
            "target_modules names q_proj, and adapter_model.safetensors has tensors of down",
        ),
    ],
)
def test_what_it_needs_and_is_not_here_is_refused_by_name(adapter, changes, problem):
    edit_json(adapter / ADAPTER_CONFIG, **changes)
    with pytest.raises(CheckpointError, match=problem) as caught:
        read_adapter_config(adapter)
    assert "\n" not in str(caught.value) and ADAPTER_CONFIG in str(caught.value)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapter")
    save_adapter(folder)
    return folder


@pytest.fixture
def adapter(made, tmp_path):
    """A copy of an adapter's folder that the test may change."""
    for name in (ADAPTER_CONFIG, ADAPTER_FILE):
        (tmp_path / name).write_bytes((made / "adapter" / name).read_bytes())
    return tmp_path


def one_tensor_less(folder):
    tensors = load_file(folder / ADAPTER_FILE)
    del tensors["base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"]
    save_file(tensors, folder / ADAPTER_FILE)


def another_rank(folder):
    edit_json(folder / ADAPTER_CONFIG, r=5)


def only_pickled(folder):
    (folder / ADAPTER_FILE).rename(folder / "adapter_model.bin")


def cut(folder):
    (folder / ADAPTER_FILE).write_bytes((folder / ADAPTER_FILE).read_bytes()[:-3])


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (
            one_tensor_less,
            r"layers\.1\.self_attn\.q_proj\.lora_A\.weight is nothing, .* requires on this model \[3, 64\]",
        ),
        (another_rank, r"is \[3, .*requires on this model \[5, "),
        (only_pickled, "adapter_model.bin, which could run code"),
        (cut, "adapter_model.safetensors is damaged"),
        (lambda folder: (folder / ADAPTER_FILE).unlink(), "adapter_model.safetensors cannot be read"),
        (
            lambda folder: (folder / ADAPTER_CONFIG).unlink(),
            "adapter_config.json is not there; give a folder in PEFT's",
        ),
        (lambda folder: (folder / ADAPTER_CONFIG).write_text("[]"), "is not a JSON object"),
        (lambda folder: (folder / ADAPTER_CONFIG).write_text("{"), "cannot be read"),
    ],
)
def test_a_damaged_folder(made, adapter, damage, problem):
    damage(adapter)
    with pytest.raises(CheckpointError, match=problem) as caught:
        AdapterSource(adapter, HFSource(made / "base").model)
    assert "\n" not in str(caught.value)


def test_another_model(made, adapter, tmp_path):
    save_hf_model("llama with wide heads", tmp_path / "wide")
    with pytest.raises(CheckpointError, match="give the model that the adapter was trained on"):
        AdapterSource(adapter, HFSource(tmp_path / "wide").model)
    adapted = AdapterSource(adapter, HFSource(made / "base").model).model
    with pytest.raises(CheckpointError, match="the model has LoRA adapters already"):
        AdapterSource(adapter, adapted)


@pytest.mark.parametrize("base", ["mixtral", "olmoe", "qwen2 moe"])
def test_adapters_of_attention_beside_experts(tmp_path, base):
    """The logits of PEFT, and its names there and back."""
    theirs = theirs_of(save_adapter(tmp_path, "all", base, target_modules=ALL[:4]))
    assert_close(ours_of(tmp_path / "base", tmp_path / "adapter"), theirs)
    family, model = read_config(tmp_path / "base")
    adapted = AdapterSource(tmp_path / "adapter", model).model
    assert list(adapted.lora_target_modules) == ALL[:4]
    every = dataclasses.replace(adapted, lora_target_modules=("all-linear",))
    if base != "qwen2 moe":  # whose shared expert has adapters, too
        assert adapter_config(every, family, None) == adapter_config(adapted, family, None)


def test_adapters_of_experts_are_refused(tmp_path):
    save_adapter(tmp_path, "all", "qwen3 moe", lora_dropout=0.0)
    with pytest.raises(CheckpointError, match=r"has tensor .*\.experts\..*; routed experts take no adapters"):
        read_adapter_config(tmp_path / "adapter")
