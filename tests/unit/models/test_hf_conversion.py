"""Hugging Face models in our decoder: the same logits and gradients, from the files that transformers writes."""

import dataclasses
import json

import pytest
import torch
import torch.nn.functional as F
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
)

from megatron.base.box import Box
from megatron.base.errors import CheckpointError
from megatron.conversion.align import first_choices
from megatron.core.models.gpt import GPTModel
from megatron.core.models.hf.families import parse_config, read_config, write_config
from megatron.core.models.hf.names import table
from megatron.core.models.hf.source import HFSource
from megatron.core.models.source import fill, is_buffer
from megatron.core.parameter import local_parameters
from megatron.core.tensor_parallel.random import RngTracker
from megatron.core.transformer.context import Build
from megatron.kernels.choose import choose_kernels
from tests import pool
from tests.unit.models.builds import CPU, assert_gradients, losses, make_ids, sections
from tests.unit.models.hf_models import EXPERTS, MODELS, save_hf_model
from tests.unit.models.hf_routing import of_ours, of_theirs

LENGTH = 40  # longer than any window


def load(folder, **changes):
    """Our model with the folder's weights, and its source."""
    source, groups = HFSource(folder), pool.groups()
    config = dataclasses.replace(source.model, attention_dropout=0.0, hidden_dropout=0.0, **changes)
    model = GPTModel(Build(config, groups, False, choose_kernels(config, CPU), RngTracker(1, groups, CPU), CPU))
    parameters = local_parameters(model)
    biases = {name: tuple(buffer.shape) for name, buffer in model.named_buffers() if is_buffer(name)}
    assert source.shapes == {name: p.info.spec.shape for name, p in parameters.items()} | biases
    fill(parameters, source, dict(model.named_buffers()))
    return model, source


def logits_of(model, tokens, vocab):
    """Ours as transformers has them, [b, s, vocabulary]."""
    return model(tokens, torch.arange(tokens.shape[1]).unsqueeze(0))[..., :vocab].transpose(0, 1)


def in_our_names(source, tensors):
    """Their named tensors as ours, by the table: the way back of what `fill` does. In memory experts are stacked."""
    found, names = {}, table(read_config(source.path)[0], source.model, stacked=True)
    for name, shape in source.shapes.items():
        if is_buffer(name):
            continue
        whole = torch.zeros(shape)
        for box, theirs, their_box in names.of_ours(name, Box((0,) * len(shape), shape)):
            place, there = (tuple(slice(a, a + n) for a, n in zip(b.offset, b.shape)) for b in (box, their_box))
            whole[place] = tensors[theirs][there].view(box.shape)
        found[name] = whole
    return found


GEMMA2 = [name for name in MODELS if name.startswith("gemma2")]


@pytest.mark.parametrize("name", MODELS | EXPERTS)
def test_fp32_logits_and_gradients(tmp_path, name):
    theirs = save_hf_model(name, tmp_path)
    ours, source = load(tmp_path)
    ids = make_ids(2, LENGTH)
    tokens, labels, vocab = ids[:, :-1], ids[:, 1:], theirs.config.vocab_size
    with torch.no_grad():
        logits = logits_of(ours, tokens, vocab)
    expected = theirs(tokens).logits
    assert (logits - expected).abs().max() <= 1e-5 * expected.abs().max()
    losses(ours, ids).mean().backward()
    F.cross_entropy(expected.transpose(1, 2), labels).backward()
    gradients = {key: parameter.grad for key, parameter in theirs.named_parameters()}
    assert_gradients({key: p.grad for key, p in ours.named_parameters()}, in_our_names(source, gradients))


# With one group theirs is a product of 8 columns alone, which the library sums in another way than within a wider one.
# Gemma 2 runs with transformers' own attention only, because torch's does not cap scores.
@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("llama with one group", *GEMMA2)])
def test_fp32_logits_are_the_same_bits(tmp_path, name):
    """With torch's attention on both sides, all sums are taken in the same order, the one product for queries, keys and
    values included."""
    vocab = save_hf_model(name, tmp_path).config.vocab_size
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="sdpa")
    ours, _ = load(tmp_path)
    tokens = make_ids(3, LENGTH)[:, :-1]
    with torch.no_grad():
        logits = logits_of(ours, tokens, vocab)
        assert torch.equal(logits, theirs(tokens).logits)


@pytest.mark.parametrize("name", ["llama", "qwen2", "mistral", "qwen3", "smollm3", "glm", "granite", "phi3, longrope"])
def test_bf16_takes_the_same_first_choices(tmp_path, name):
    save_hf_model(name, tmp_path, torch.bfloat16)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16, attn_implementation="eager")
    ours, source = load(tmp_path, bf16=True, attention_backend="unfused")
    assert source.dtype == torch.bfloat16
    tokens = make_ids(40, LENGTH)[:, :-1]
    with torch.no_grad():
        logits = logits_of(ours, tokens, theirs.config.vocab_size)
        expected = theirs(tokens).logits
    assert logits.eq(expected).float().mean() > 0.8
    # Random models have many positions whose two likeliest tokens are neighbours in bf16: one rounding swaps them.
    ours_first, theirs_first = (x.argmax(-1, keepdim=True) for x in (logits, expected))
    lost = (expected.gather(-1, theirs_first) - expected.gather(-1, ours_first)).float()
    assert (lost > 0).float().mean() <= 5e-3
    assert (lost <= 2 * torch.finfo(torch.bfloat16).eps * expected.gather(-1, theirs_first).abs()).all()


@pytest.mark.parametrize("name", ["mixtral", "qwen2 moe", "qwen3 moe", "olmoe"])
def test_bf16_takes_the_same_experts_and_first_choices(tmp_path, name):
    save_hf_model(name, tmp_path, torch.bfloat16)
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.bfloat16, attn_implementation="eager", experts_implementation="eager"
    )
    model, _ = load(tmp_path, bf16=True, attention_backend="unfused")
    tokens = make_ids(400, 8)[:, :-1]
    expected, theirs_chosen, judged = of_theirs(theirs, tokens)
    logits, ours_chosen = of_ours(model, tokens, theirs.config.vocab_size)
    found = first_choices(logits[judged], expected[judged])
    assert judged.float().mean() > 0.3
    for mine, other in zip(ours_chosen, theirs_chosen, strict=True):
        assert torch.equal(mine[judged], other[judged])
    assert found.same + found.ties >= 0.999 * found.positions


def load_part(rank, size, folder):
    """This rank's sections at tp = size."""
    groups = pool.groups(tp=size)
    source = HFSource(folder)
    config = source.model
    build = Build(config, groups, False, choose_kernels(config, CPU), RngTracker(1, groups, CPU), CPU)
    model = GPTModel(build)
    parameters = local_parameters(model)
    fill(parameters, source, dict(model.named_buffers()))
    return sections(parameters)


@pytest.mark.parametrize("name", ["llama", "llama with one group", "qwen2 tied", "qwen3", "llama with biases", "phi3"])
def test_a_rank_reads_its_own_slices(tmp_path, name):
    save_hf_model(name, tmp_path)
    whole = {key: p.detach() for key, p in load(tmp_path)[0].named_parameters()}
    for rank in pool.run(2, load_part, tmp_path):
        assert {key for key, _, _ in rank} == whole.keys()
        for key, offset, piece in rank:
            place = tuple(slice(a, a + n) for a, n in zip(offset, piece.shape))
            assert torch.equal(whole[key][place], torch.from_numpy(piece)), key


TEXT = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "vocab_size": 96,
    "max_position_embeddings": 64,
}
IMAGES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
IMAGES = {**IMAGES, "image_size": 16, "patch_size": 4}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("in_memory", [False, True])
@pytest.mark.parametrize("kind", ["mistral3", "llava", "gemma3"])
def test_the_language_model_of_a_model_that_sees_images(tmp_path, kind, in_memory, tied):
    """Its names are those of the hub, or those that transformers has in memory."""
    if kind == "mistral3":
        text, images = {"model_type": "mistral", **TEXT, "sliding_window": None}, {"model_type": "pixtral", **IMAGES}
        config = Mistral3Config(text_config=text, vision_config=images, tie_word_embeddings=tied)
        theirs = Mistral3ForConditionalGeneration(config)
    elif kind == "gemma3":
        text = {"model_type": "gemma3_text", **TEXT, "sliding_window": 5, "query_pre_attn_scalar": 20}
        images = {"model_type": "siglip_vision_model", **IMAGES}
        config = Gemma3Config(
            text_config=text, vision_config=images, tie_word_embeddings=tied, mm_tokens_per_image=4, image_token_id=95
        )
        theirs = Gemma3ForConditionalGeneration(config)
    else:
        text, images = {"model_type": "llama", **TEXT}, {"model_type": "clip_vision_model", **IMAGES}
        config = LlavaConfig(text_config=text, vision_config=images, tie_word_embeddings=tied)
        theirs = LlavaForConditionalGeneration(config)
    theirs.save_pretrained(tmp_path, save_original_format=not in_memory)
    ours, source = load(tmp_path)
    assert any("vision" in name for name in source.carried.tensors)
    assert source.model.untie_embeddings_and_output_weights is not tied
    tokens = make_ids(2, 24)[:, :-1] % 90 + 3
    with torch.no_grad():
        expected = theirs(tokens).logits
        logits = logits_of(ours, tokens, 96)
    assert (logits - expected).abs().max() <= 1e-5 * expected.abs().max()
    family, values = write_config(source.model, like=tmp_path)
    assert family.model_type == values["model_type"] == text["model_type"] and "vision_config" not in values


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (
            "gemma3",
            {
                "model_type": "gemma3_text",
                "hidden_size": 2560,
                "intermediate_size": 10240,
                "num_hidden_layers": 34,
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                "sliding_window": 1024,
            },
        ),
        ("llava", {"model_type": "llama", "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "vocab_size": 32064}),
        (
            "llava_next",
            {
                "model_type": "mistral",
                "intermediate_size": 14336,
                "max_position_embeddings": 32768,
                "num_key_value_heads": 8,
                "rope_theta": 1e6,
                "sliding_window": None,
                "vocab_size": 32064,
            },
        ),
    ],
    ids=("gemma3", "llava", "llava_next"),
)
def test_sizes_that_a_language_model_of_a_publisher_leaves_out_are_those_of_transformers(tmp_path, kind, text):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, "text_config": text}))
    family, model = read_config(tmp_path)
    whole = json.loads(CONFIG_MAPPING[family.model_type].from_dict(text).to_json_string())
    again = parse_config(family, whole, "x")
    assert again == dataclasses.replace(model, kv_channels=again.kv_channels) and again.head_dim == model.head_dim


def test_a_model_that_sees_images_and_is_no_family_is_refused(tmp_path):
    text = {"model_type": "idefics3_text", "hidden_size": 8}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llava", "text_config": text}))
    with pytest.raises(CheckpointError, match="model_type 'idefics3_text' is not supported"):
        read_config(tmp_path)
