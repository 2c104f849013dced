"""With --batch-invariant-mode generation reports the log-probabilities of training, bit for bit."""

import pytest
import torch

from benchmarks.logprob_parity import SampledSequence, difference, pack, sample, trained_logprobs
from megatron.core.inference.engine.sampling import Sampling
from megatron.core.inference.engine.slots import SlotDecoder
from tests import pool
from tests.unit.inference.small import GPT2, LATENT, LLAMA, endless_tokenizer, small_model

SAMPLING = Sampling(temperature=1.0)
NEW = 24
EXACT = {"batch_invariant_mode": True, "attention_dropout": 0.0, "hidden_dropout": 0.0, "max_position_embeddings": 256}
EXPERTS = {"num_experts": 6, "moe_router_topk": 2, "moe_ffn_hidden_size": 24}
SIGMOID = {
    **EXPERTS,
    "num_experts": 8,
    "moe_router_topk": 3,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_shared_expert_intermediate_size": 40,
    "moe_shared_expert_gate": True,
}
SINKS = {
    "softmax_type": "learnable",
    "swiglu": False,
    "quick_geglu": True,
    "glu_linear_offset": 1.0,
    "activation_func_clamp_value": 0.5,
}
MODELS = {
    "dense": LLAMA,
    "softmax experts": {**LLAMA, **EXPERTS},
    "sigmoid experts": {**LLAMA, **SIGMOID},
    "latents": {**LATENT, **EXPERTS},
    "gpt2": GPT2,
    "window": {**LLAMA, "window_size": "20,0", "qk_layernorm": True},
    "caps": {**LLAMA, "attn_logit_softcapping": 20.0, "final_logit_softcapping": 10.0, "geglu": True, "swiglu": False},
    "sinks": {
        **LLAMA,
        **EXPERTS,
        **SINKS,
        "add_bias_linear": True,
        "window_size": "20,0",
        "window_attn_skip_freq": "2",
    },
    "xielu": {**LLAMA, "swiglu": False, "xielu": True, "qk_layernorm": True},
    "adapters": {**LLAMA, "lora_rank": 4},
}
QUICK = ("dense", "softmax experts", "sigmoid experts", "latents")
LENGTHS = (1, 70, 3, 17, 64, 9, 30, 5)  # of prompts: at the border of a block of keys, below and above it


def prompts(lengths=LENGTHS):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 99, (length,), generator=generator).tolist() for length in lengths]


def sampled(model, build, lengths=LENGTHS, first=0, **options):
    """Prompts of these lengths with NEW sampled tokens each; a prompt's seed is its number from `first` on."""
    seeds = list(range(first, first + len(lengths)))
    options = {"max_new_tokens": NEW, "sampling": SAMPLING, "seeds": seeds, **options}
    return sample(model, build, endless_tokenizer(99), prompts(lengths), **options)


def assert_exact(sequences, trained):
    gap = difference(sequences, trained)
    assert gap.tokens == NEW * len(sequences)
    assert (gap.equal, gap.largest, gap.k3) == (1.0, 0.0, 0.0), gap


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in MODELS]
)
def test_generation_reports_the_numbers_of_training(name, bf16):
    """Prompts of several lengths that join and leave the batch; in training padded, packed, in microbatches of any
    size, in evaluation and with gradients."""
    model, build = small_model(pool.groups(), **{**MODELS[name], **EXACT, "bf16": bf16})
    sequences = sampled(model, build, batch_size=5)
    with torch.no_grad():
        for options in ({}, {"rows": 1}, {"per_row": 3}, {"per_row": 8}):
            assert_exact(sequences, trained_logprobs(model, build, sequences, **options))
    model.train()
    assert_exact(sequences, trained_logprobs(model, build, sequences, per_row=2, rows=3))


@pytest.mark.parametrize("name", ["dense", "sigmoid experts"])
def test_a_prompt_has_the_same_answer_alone_and_in_a_large_batch(name):
    model, build = small_model(pool.groups(), **{**MODELS[name], **EXACT, "bf16": True})
    together = sampled(model, build, LENGTHS * 4)  # 32 rows
    for number in (1, 31):
        alone = sample(
            model,
            build,
            endless_tokenizer(99),
            [together[number].prompt],
            max_new_tokens=NEW,
            sampling=SAMPLING,
            seeds=[number],
        )
        assert alone[0].ids == together[number].ids
        assert alone[0].logprobs == together[number].logprobs


def test_a_prompt_is_scored_as_in_training():
    model, build = small_model(pool.groups(), **{**LLAMA, **EXACT, "bf16": True})
    words = prompts((40, 70, 5))
    decoder = SlotDecoder(model, build, slots=3, capacity=80)
    with torch.no_grad():
        _, scores = decoder.read_scored(words, 1, 99)
        packed = pack([SampledSequence(prompt) for prompt in words], 1)
        losses = model(packed.tokens, packed.positions, packed.labels)
    for row, (prompt, score) in enumerate(zip(words, scores, strict=True)):
        assert torch.equal(score.chosen, -losses[row, : len(prompt) - 1])


def test_without_the_mode_the_numbers_differ():
    """The comparison sees differences: they are there, and as large as rounding is."""
    model, build = small_model(pool.groups(), **{**LLAMA, **EXACT, "batch_invariant_mode": False})
    sequences = sampled(model, build)
    with torch.no_grad():
        gap = difference(sequences, trained_logprobs(model, build, sequences))
    assert gap.equal < 1.0 and 0.0 < gap.largest < 1e-4 and 0.0 < gap.k3 < 1e-8


@pytest.mark.parametrize("name", ["dense", "sigmoid experts", "latents"])
def test_losses_and_gradients_are_those_of_the_plain_kernels(name):
    results = []
    for mode in (True, False):
        fields = {**MODELS[name], **EXACT, "batch_invariant_mode": mode}
        model, _ = small_model(pool.groups(), **fields)
        packed = pack([SampledSequence(prompt) for prompt in prompts((40, 70, 9, 5))], 2)
        losses = model.train()(packed.tokens, packed.positions, packed.labels)
        losses.sum().backward()
        results.append([losses, *(parameter.grad for parameter in model.parameters())])
    for exact, plain in zip(*results, strict=True):
        assert (exact - plain).abs().max() <= 1e-5 * plain.abs().max().clamp(min=1.0)


def test_places_are_those_of_the_sampled_tokens():
    """Sequences of several lengths in rows of two."""
    model, build = small_model(pool.groups(), **{**LLAMA, **EXACT})
    sequences = sampled(model, build, (3, 9, 5))
    packed = pack(sequences, 2)
    for sequence, (row, start, count) in zip(sequences, packed.places, strict=True):
        assert packed.labels[row, start : start + count].tolist() == sequence.sampled
