"""Every family by name, from config.json as its publisher writes it: the logits of transformers, and there and back."""

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file

from megatron.base.errors import CheckpointError
from megatron.config.data import TokenizerConfig
from megatron.conversion.convert import to_checkpoint, to_hf
from megatron.core.models.hf.families import read_config
from megatron.core.models.hf.source import HFSource
from megatron.training.export import CheckpointSource
from tests.unit.models.builds import make_ids
from tests.unit.models.hf_models import edit_json, has_experts, load_quietly, save_published
from tests.unit.models.published import PUBLISHED
from tests.unit.models.test_hf_conversion import LENGTH, load, logits_of

# Without its window a Mistral is a Llama, and without LongRoPE a Phi-3 is a Mistral.
WRITTEN_AS = {
    **dict.fromkeys(("Mistral 7B v0.3", "Mistral Nemo", "Baichuan 7B"), "llama"),
    "Phi-3 mini 4k": "mistral",
    "Kimi-K2": "deepseek_v3",
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_same_bits_as_transformers(tmp_path, name):
    theirs, _ = save_published(name, tmp_path / "hf", torch.float32)
    ours, source = load(tmp_path / "hf")
    tokens = make_ids(2, LENGTH)[:, :-1]
    with torch.no_grad():
        expected = theirs(tokens).logits
        logits = logits_of(ours, tokens, source.model.vocab_size)
    # transformers computes the attention of Gemma in another way, and weights the output of an expert and not its
    # input.
    if name.startswith("Gemma") or has_experts(PUBLISHED[name]["model_type"]):
        assert (logits - expected).abs().max() <= 1e-6 * expected.abs().max()
    else:
        assert torch.equal(logits, expected)
    assert expected.std() * source.model.logits_scaling > 0.3, "a model that tells tokens apart"


@pytest.mark.parametrize("name", PUBLISHED)
def test_there_and_back(tmp_path, name, caplog):
    """The same bytes under a config.json that says the same, to this program and to transformers."""
    model, before = save_published(name, tmp_path / "hf", torch.bfloat16)
    nothing = TokenizerConfig()
    to_checkpoint(HFSource(tmp_path / "hf"), tmp_path / "ours", dtype=torch.bfloat16, tokenizer=nothing)
    to_hf(CheckpointSource(tmp_path / "ours/iter_0000000"), tmp_path / "back", dtype=torch.bfloat16, tokenizer=nothing)
    after = load_file(tmp_path / "back/model.safetensors")
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        assert torch.equal(tensor.view(torch.uint8), after[key].view(torch.uint8)), key
    found = load_quietly(tmp_path / "back", caplog, model.config._attn_implementation)
    (family, described), (_, published) = read_config(tmp_path / "back"), read_config(tmp_path / "hf")
    head_dim = None if published.multi_latent_attention else published.head_dim
    assert described == dataclasses.replace(published, kv_channels=head_dim)
    assert family.model_type == WRITTEN_AS.get(name, PUBLISHED[name]["model_type"])
    tokens = make_ids(2, LENGTH)[:, :-1]
    with torch.no_grad():
        assert torch.equal(found(tokens).logits, model(tokens).logits)


@pytest.mark.parametrize(
    ("name", "changes", "problem"),
    [
        ("Qwen2.5 7B", {"use_mrope": True}, "use_mrope is True; only False is supported"),
        ("SmolLM2", {"rope_interleaved": True}, "rope_interleaved is True; only False is supported"),
        ("Qwen3 32B", {"attention_bias": 1}, "attention_bias is 1, not a value of type bool"),
        ("Phi-4 mini", {"full_attn_mod": 2}, "full_attn_mod is 2; only 1 is supported"),
        ("Phi-4 mini", {"lm_head_bias": True}, "lm_head_bias is True; only False is supported"),
        ("Baichuan 7B", {"architectures": ["BaichuanForCausalLM"]}, "Baichuan 2 normalises its head"),
        ("Llama 1, first conversions", {"max_sequence_length": None}, "max_position_embeddings is missing"),
    ],
)
def test_a_value_that_is_not_the_published_one_is_refused(tmp_path, name, changes, problem):
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name]))
    read_config(tmp_path)
    edit_json(tmp_path / "config.json", **changes)
    with pytest.raises(CheckpointError, match=problem):
        read_config(tmp_path)
