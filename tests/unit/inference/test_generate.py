import dataclasses

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from megatron.base.errors import CheckpointError, ConfigError
from megatron.config.model import ModelConfig
from megatron.core.datasets.tokenizer import NullTokenizer
from megatron.core.inference.engine.sampling import Sampling
from megatron.core.inference.engine.slots import SlotDecoder
from megatron.core.inference.generate import generate
from megatron.core.parameter import local_parameters
from megatron.kernels import choose
from megatron.kernels.choose_attention import choose_attention
from megatron.kernels.ops import attention, attention_packed
from megatron.spec.decoder import attention_core
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
    "qk-norm behind the rotation": {**LLAMA, "qk_layernorm": True, "qk_layernorm_after_rope": True},
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
def test_tokens_are_read_again_when_their_sequence_outgrows_the_short_factors(monkeypatch):
    """Each sequence alone and once, and not where the prompt is already longer."""
    model, build = small_model(pool.groups(), **LONGROPE)
    read, hidden = [], model.hidden

    def watched(tokens, *rest, **more):
        read.append(tokens)
        return hidden(tokens, *rest, **more)

    monkeypatch.setattr(model, "hidden", watched)
    run(model, build, [[1, 2, 3], [4, 5, 6, 7], [8] * 9], new=5)
    assert [tuple(tokens.shape) for tokens in read] == [(3, 9), (3, 1), (3, 1), (1, 6), (3, 1), (1, 6), (3, 1)]
    again, steps = (read[5], read[3]), torch.cat([read[1], read[2], read[4]], dim=1)
    assert again[0].tolist() == [[1, 2, 3, *steps[0].tolist()]]
    assert again[1].tolist() == [[4, 5, 6, 7, *steps[1, :2].tolist()]]


@torch.no_grad()
def test_prompts_of_different_lengths_need_no_mask_on_a_gpu(monkeypatch):
    """Padding is a document while prompts are read; each later step has one query, and a mask of one row."""
    asked = []

    def whole(q, k, v, *, segments, **options):
        asked.append((len(q), segments is not None))
        return attention.fused(q, k, v, segments=segments, **options)

    kernel = attention_packed.packed(whole, by_flash=False)
    expected = run(*small_model(pool.groups(), **LLAMA), PROMPTS[:3])
    core = attention_core(ModelConfig(**LLAMA), window=None)
    chosen = choose_attention([core], "auto", torch.float32, torch.device("cpu"), blocks=False, documents=True)
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
    last = next(token for token in free[1][2:] if not any(token in free[i] for i in (0, 2, 3)))
    stopped = run(*llama, PROMPTS, stop_ids=[last])
    assert stopped == [free[0], free[1][: free[1].index(last) + 1], free[2], free[3]]


def test_generation_ends_when_every_sequence_has(llama):
    assert [len(ids) for ids in run(*llama, PROMPTS, stop_ids=range(99))] == [1, 1, 1, 1]


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=1.3)], ids=["greedy", "drawn"])
@pytest.mark.parametrize("batch_size", [1, 2, 3])
def test_prompts_that_wait_for_a_row_continue_as_they_do_alone(llama, sampling, batch_size):
    """The first prompts of a batch end at different steps, so others join in the middle."""
    prompts = [*PROMPTS, *PROMPTS[::-1]]
    ends = [token for ids in one_by_one(*llama, PROMPTS[:2]) for token in ids[4:6]]
    options = {"sampling": sampling, "stop_ids": ends, "seeds": list(range(8))}
    expected = []
    for number, prompt in enumerate(prompts):
        free = without_cache(*llama, prompt, 12, sampling, number)
        expected.append(free[: next((at + 1 for at, token in enumerate(free) if token in ends), 12)])
    assert len({len(ids) for ids in expected}) > 1
    assert run(*llama, prompts, batch_size=batch_size, **options) == expected


def test_a_batch_has_no_larger_cache_than_its_longest_sequence_needs(llama, monkeypatch):
    sizes, init = [], SlotDecoder.__init__

    def watched(self, *args, **options):
        init(self, *args, **options)
        sizes.append(self.nbytes)

    monkeypatch.setattr(SlotDecoder, "__init__", watched)
    run(*llama, PROMPTS, new=5)
    run(*llama, PROMPTS, new=5, batch_size=2)
    layers, groups, head, four_bytes = 2, 2, 8, 4
    one = 2 * layers * (max(map(len, PROMPTS)) + 5) * groups * head * four_bytes
    assert sizes == [4 * one, 2 * one]


class TestCompletions:
    def complete(self, llama, **options):
        options = {"max_new_tokens": 12, "sampling": GREEDY, "seeds": [0] * len(PROMPTS), **options}
        return generate(*llama, NullTokenizer(99), PROMPTS, **options)

    def test_the_pieces_are_those_of_the_text_and_it_follows_the_prompt(self, llama):
        texts = [""] * len(PROMPTS)

        def on_text(index, piece):
            texts[index] += piece

        found = self.complete(llama, on_text=on_text)
        assert [completion.ids for completion in found] == run(*llama, PROMPTS)
        assert texts == [completion.text for completion in found]
        assert texts == ["".join(f" {i}" for i in completion.ids) for completion in found]
        assert {completion.reason for completion in found} == {"length"}

    def test_stop_ids_and_stop_strings_end_their_own_sequence(self, llama):
        free = run(*llama, PROMPTS)
        found = self.complete(llama, stop_ids=[free[0][4]], stop_strings=[f" {free[2][2]} {free[2][3]}"])
        assert found[0].ids == free[0][: free[0].index(free[0][4]) + 1] and found[0].reason == "stop"
        assert found[2].text == "".join(f" {i}" for i in free[2][:2]) and found[2].reason == "stop"
        assert found[2].ids == free[2][:4]

    def test_the_end_of_document_always_ends(self, llama):
        free = run(*llama, PROMPTS)
        tokenizer = NullTokenizer(99)
        tokenizer.eod = free[3][0]
        options = {"max_new_tokens": 12, "sampling": GREEDY, "seeds": [0]}
        (found,) = generate(*llama, tokenizer, PROMPTS[3:], **options)
        assert (found.ids, found.text, found.reason) == ([tokenizer.eod], "", "stop")

    def test_each_completion_is_handed_out_when_it_ends(self, llama):
        order = []
        found = self.complete(llama, on_end=lambda index, one: order.append((index, one)), batch_size=3)
        assert [index for index, _ in order] == [0, 1, 2, 3]
        assert [one for _, one in order] == found

    def test_special_tokens_may_have_no_text(self, llama):
        free = run(*llama, PROMPTS)
        tokenizer = NullTokenizer(99)
        tokenizer.special_ids = frozenset({free[0][1]})
        options = {"max_new_tokens": 3, "sampling": GREEDY, "seeds": [0], "shows_special": False}
        (found,) = generate(*llama, tokenizer, PROMPTS[:1], **options)
        assert found.ids == free[0][:3] and found.text == "".join(f" {i}" for i in free[0][:3] if i != free[0][1])


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
