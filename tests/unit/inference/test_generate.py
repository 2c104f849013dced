import dataclasses

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from megatron.base.errors import CheckpointError, ConfigError
from megatron.config.model import ModelConfig
from megatron.core.inference.generate import CachedDecoder
from megatron.core.inference.sampling import Sampling
from megatron.core.parameter import local_parameters
from megatron.kernels import choose
from megatron.kernels.choose_attention import choose_attention
from megatron.kernels.ops import attention, attention_packed
from tests import pool
from tests.unit.inference.small import (
    GPT2,
    GREEDY,
    LLAMA,
    LONGROPE,
    PROMPTS,
    one_by_one,
    run,
    small_model,
    without_cache,
)

SHAPES = {
    "llama": LLAMA,
    "gpt2": GPT2,
    "unfused": {**LLAMA, "attention_backend": "unfused"},
    "qk-norm": {**LLAMA, "qk_layernorm": True},
    "window": {**LLAMA, "window_size": "4,0", "window_attn_skip_freq": "2"},
    "unfused window": {**LLAMA, "window_size": "4,0", "attention_backend": "unfused"},
    "capped window": {**LLAMA, "window_size": "4,0", "attn_logit_softcapping": 0.5, "softmax_scale": 0.7},
    "capped unfused": {**LLAMA, "attn_logit_softcapping": 0.5, "attention_backend": "unfused"},
    "longrope": LONGROPE,
    "yarn": {**LLAMA, "position_embedding_type": "yarn", "rope_scaling_original_max_position_embeddings": 16},
}


@pytest.fixture(params=SHAPES)
def built(request):
    return small_model(pool.groups(), **SHAPES[request.param])


@pytest.fixture
def llama():
    return small_model(pool.groups(), **LLAMA)


def test_the_cache_gives_the_tokens_of_a_full_forward(built):
    expected = [without_cache(*built, prompt) for prompt in PROMPTS]
    assert one_by_one(*built, PROMPTS) == expected
    assert len({token for ids in expected for token in ids}) > 10, "a model that repeats itself would prove little"


def test_a_batch_of_unequal_prompts_gives_what_each_gives_alone(built):
    assert run(*built, PROMPTS) == one_by_one(*built, PROMPTS)


@torch.no_grad()
def test_logits_with_a_cache_are_those_without(built):
    """Prompts of different lengths in one batch; each step's logits against a full forward of each sequence alone."""
    model, build = built
    lengths, longest = [3, 7, 5], 7
    ids = torch.randint(0, 99, (3, longest + 6), generator=torch.Generator().manual_seed(1))
    decoder = CachedDecoder(model, build, lengths, ids.shape[1])
    logits = [decoder(ids[:, :longest]), *(decoder(ids[:, t : t + 1]) for t in range(longest, ids.shape[1]))]
    for step, found in enumerate(logits):
        for row, length in enumerate(lengths):
            sequence = ids[row, longest - length : longest + step]
            alone = model(sequence.unsqueeze(0), torch.arange(len(sequence)).unsqueeze(0))[-1, 0]
            torch.testing.assert_close(found[row], alone, rtol=0, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("shape", ["llama", "longrope"])
def test_a_prompt_may_be_read_in_pieces(shape):
    model, build = small_model(pool.groups(), **SHAPES[shape])
    ids = torch.randint(0, 99, (2, 9), generator=torch.Generator().manual_seed(1))
    whole, pieces = (CachedDecoder(model, build, [9, 4], 9) for _ in range(2))
    pieces(ids[:, :2])
    pieces(ids[:, 2:6])
    torch.testing.assert_close(pieces(ids[:, 6:]), whole(ids), rtol=0, atol=1e-5)


@torch.no_grad()
def test_tokens_are_read_again_when_their_sequence_outgrows_the_short_factors(monkeypatch):
    """Once for each length of a prompt, and not where the prompt is already longer."""
    model, build = small_model(pool.groups(), **LONGROPE)
    read, hidden = [], model.hidden

    def watched(tokens, *rest, **more):
        read.append(tokens)
        return hidden(tokens, *rest, **more)

    monkeypatch.setattr(model, "hidden", watched)
    run(model, build, [[1, 2, 3], [4, 5, 6, 7], [8] * 9], new=5)
    assert [tokens.shape[1] for tokens in read] == [9, 1, 1, 12, 13]
    assert read[3][:, :9].equal(read[0]) and read[4][:, :12].equal(read[3]), (
        "the same tokens again, in the same columns"
    )


@torch.no_grad()
def test_prompts_of_different_lengths_need_no_mask_on_a_gpu(monkeypatch):
    """Padding is a document while prompts are read; each later step has one query, and a mask of one row."""
    asked = []

    def whole(q, k, v, *, segments, **options):
        asked.append((len(q), segments is not None))
        return attention.fused(q, k, v, segments=segments, **options)

    kernel = attention_packed.packed(whole, by_flash=False)
    expected = run(*small_model(pool.groups(), **LLAMA), PROMPTS[:3])
    chosen = choose_attention(ModelConfig(**LLAMA), torch.device("cpu"), blocks=False, documents=True)
    monkeypatch.setattr(choose, "choose_attention", lambda *_, **__: dataclasses.replace(chosen, attention=kernel))
    assert run(*small_model(pool.groups(), **LLAMA), PROMPTS[:3]) == expected
    assert (1, True) in asked and all(queries == 1 for queries, masked in asked if masked)
    assert any(queries > 1 for queries, _ in asked)


def test_sampling_is_the_same_alone_and_in_a_batch(llama):
    sampling, seeds = Sampling(temperature=1.3, top_k=40, top_p=0.9), [7, 8, 7, 9]
    together = run(*llama, PROMPTS, sampling=sampling, seeds=seeds)
    assert together == one_by_one(*llama, PROMPTS, sampling=sampling, seeds=seeds)
    assert together == run(*llama, PROMPTS, sampling=sampling, seeds=seeds)
    assert together != run(*llama, PROMPTS, sampling=sampling, seeds=[1, 2, 3, 4])


def test_equal_prompts_with_other_seeds_differ_and_with_one_seed_agree(llama):
    first, second, again = run(*llama, [[5, 6]] * 3, sampling=Sampling(), seeds=[1, 2, 1])
    assert first == again != second


def test_padded_rows_of_the_vocabulary_are_never_chosen(llama):
    """Their logits are made the largest of all."""
    model, build = llama
    with torch.no_grad():
        model.output_layer.weight[99:] = 0.0
        model.output_layer.weight[99:] += 100.0 * model.output_layer.weight[:99].sum(dim=0)
    for sampling in (GREEDY, Sampling(temperature=2.0)):
        assert max(max(ids) for ids in run(model, build, PROMPTS, sampling=sampling)) < 99


def test_a_stopped_sequence_ends_with_its_last_id_and_leaves_the_others_alone(llama):
    free = run(*llama, PROMPTS)
    asked = []

    def stop(index, token):
        asked.append((index, token))
        return index == 1 and token == free[1][3]

    stopped = run(*llama, PROMPTS, stop=stop)
    end = free[1].index(free[1][3]) + 1
    assert stopped == [free[0], free[1][:end], free[2], free[3]]
    assert [token for index, token in asked if index == 1] == free[1][:end], "an ended sequence is not asked about"


def test_generation_ends_when_every_sequence_has(llama):
    assert [len(ids) for ids in run(*llama, PROMPTS, stop=lambda index, token: True)] == [1, 1, 1, 1]


def test_greedy_tokens_are_those_of_transformers(llama):
    model, build = llama
    theirs = transformers_twin(model, build.config)
    ours = run(model, build, PROMPTS, new=20)
    for prompt, ids in zip(PROMPTS, ours, strict=True):
        found = theirs.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=20,
            do_sample=False,
        )
        assert found[0, len(prompt) :].tolist() == ids


def transformers_twin(model, config):
    """LlamaForCausalLM with the weights of `model`."""
    twin = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.ffn_dim,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_kv_heads,
            max_position_embeddings=config.max_position_embeddings,
            rms_norm_eps=config.norm_epsilon,
            rope_theta=config.rotary_base,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=None,
        )
    ).eval()
    ours = {name: parameter.detach() for name, parameter in local_parameters(model).items()}
    names = {
        "model.embed_tokens.weight": ours["embedding.word_embeddings.weight"][: config.vocab_size],
        "model.norm.weight": ours["decoder.final_layernorm.weight"],
        "lm_head.weight": ours["output_layer.weight"][: config.vocab_size],
    }
    d = config.head_dim
    for layer in range(config.num_layers):
        mine, its = f"decoder.layers.{layer}", f"model.layers.{layer}"
        qkv, gate_up = ours[f"{mine}.self_attention.linear_qkv.weight"], ours[f"{mine}.mlp.linear_fc1.weight"]
        names |= {
            f"{its}.input_layernorm.weight": ours[f"{mine}.input_layernorm.weight"],
            f"{its}.self_attn.q_proj.weight": qkv[:, : -2 * d].flatten(0, 1),
            f"{its}.self_attn.k_proj.weight": qkv[:, -2 * d : -d].flatten(0, 1),
            f"{its}.self_attn.v_proj.weight": qkv[:, -d:].flatten(0, 1),
            f"{its}.self_attn.o_proj.weight": ours[f"{mine}.self_attention.linear_proj.weight"],
            f"{its}.post_attention_layernorm.weight": ours[f"{mine}.pre_mlp_layernorm.weight"],
            f"{its}.mlp.gate_proj.weight": gate_up[0],
            f"{its}.mlp.up_proj.weight": gate_up[1],
            f"{its}.mlp.down_proj.weight": ours[f"{mine}.mlp.linear_fc2.weight"],
        }
    twin.load_state_dict(names)
    return twin


@pytest.mark.parametrize(
    ("prompts", "new", "message"),
    [
        ([[1, 2], []], 5, "prompt 2 has no tokens"),
        ([[1] * 60], 5, "prompt 1 has 60 tokens, with --max-new-tokens 5 that is 65, above .* 64; give .* 4 or less"),
        ([[1] * 64], 1, "64; shorten it"),
        ([[1]], 0, "--max-new-tokens 0 must be at least 1"),
    ],
)
def test_prompts_that_cannot_be_continued_are_refused_at_once(llama, prompts, new, message):
    with pytest.raises(ConfigError, match=message):
        run(*llama, prompts, new=new)


def test_the_last_position_can_be_reached(llama):
    assert [len(ids) for ids in run(*llama, [[1] * 60, [2]], new=4)] == [4, 4]


def test_logits_that_are_not_finite_are_reported(llama):
    model, build = llama
    with torch.no_grad():
        model.decoder.final_layernorm.weight[0] = float("nan")
    with pytest.raises(CheckpointError, match=r"not finite.*float32"):
        run(model, build, PROMPTS)
