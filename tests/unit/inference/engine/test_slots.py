import random

import pytest
import torch

from megatron.core.inference.engine.caches import SlotCache, WindowCache
from megatron.core.inference.engine.slots import SlotDecoder
from megatron.core.parameter import local_parameters
from megatron.core.transformer.moe.microbatch import MicrobatchRouting
from megatron.spec import attention
from megatron.spec.lora import is_adapter
from tests import pool
from tests.unit.inference.small import DELTA, GPT2, LATENT, LLAMA, LONGROPE, small_model
from tests.unit.models.builds import spread_constants
from tests.unit.narrow_values import narrow_values

SHAPES = {
    "llama": LLAMA,
    "gpt2": GPT2,
    "longrope": LONGROPE,
    "unfused": {**LLAMA, "attention_backend": "unfused"},
    "window": {**LLAMA, "window_size": "4,0", "window_attn_skip_freq": "2"},
    "unfused window": {**LLAMA, "window_size": "4,0", "attention_backend": "unfused"},
    "sinks": {**LLAMA, "softmax_type": "learnable", "window_size": "4,0", "window_attn_skip_freq": "2"},
    "capped window": {**LLAMA, "window_size": "4,0", "attn_logit_softcapping": 0.5, "softmax_scale": 0.7},
    "latents": LATENT,
    "latents without norms": {**LATENT, "q_lora_rank": None, "qk_layernorm": False},
    "latents, capped window": {**LATENT, "window_size": "4,0", "attn_logit_softcapping": 0.5, "softmax_scale": 0.7},
    "delta": DELTA,
    "yarn": {**LLAMA, "position_embedding_type": "yarn", "rope_scaling_original_max_position_embeddings": 16},
}
WINDOWS = {
    "one layer of two": (SHAPES["window"], 2),
    "both layers": ({**LLAMA, "window_size": "4,0"}, 1),
    "one key": ({**LLAMA, "window_size": "0,0", "window_attn_skip_freq": "2"}, 1),
    "latents": (SHAPES["latents, capped window"], 3),
}
EXPERTS = {
    **LLAMA,
    "num_layers": 4,
    "num_experts": 5,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 16,
    "moe_layer_freq": "[0,1,1,1]",
}


@torch.no_grad()
def alone(model, ids):
    """Logits behind a sequence that is read at once, by itself."""
    return model(torch.tensor([ids]), torch.arange(len(ids)).unsqueeze(0))[-1, 0]


def assert_logits(found, model, sequences):
    assert len(found) == len(sequences)
    for row, ids in zip(found, sequences, strict=True):
        torch.testing.assert_close(row, alone(model, ids), rtol=0, atol=1e-5)


def watch(monkeypatch, cache, name):
    """The last arguments of all calls of a method."""
    calls, method = [], getattr(cache, name)
    monkeypatch.setattr(cache, name, lambda self, *args: (calls.append(args[-1]), method(self, *args))[1])
    return calls


def play(fields):
    """Checks every step's logits of every row, while sequences of random lengths come and go and the columns are
    moved."""
    model, build = small_model(pool.groups(), **fields)
    decoder, draw = SlotDecoder(model, build, slots=3, capacity=20), random.Random(5)
    rows, ends, started = [], [], 0
    lengths, together = [1, 17, *(draw.choice([1, 2, 5, 9, 17]) for _ in range(13))], set()
    with torch.inference_mode():
        while started < 15 or rows:
            if started < 15 and len(rows) < 3 and draw.random() < 0.6:
                count = draw.randint(1, min(3 - len(rows), 15 - started))
                prompts = [[draw.randrange(99) for _ in range(n)] for n in lengths[started : started + count]]
                rows += prompts
                ends += [draw.randint(len(prompt) + 1, 20) for prompt in prompts]
                assert_logits(decoder.read(prompts), model, prompts)
                started += count
                together.add(len({len(prompt) for prompt in prompts}))
            if rows:
                tokens = [draw.randrange(99) for _ in rows]
                rows = [[*row, token] for row, token in zip(rows, tokens, strict=True)]
                assert_logits(decoder.step(tokens), model, rows)
            for number in reversed(range(len(rows))):
                if len(rows[number]) >= ends[number]:
                    decoder.remove(number)
                    rows[number], ends[number] = rows[-1], ends[-1]
                    rows.pop()
                    ends.pop()
    assert {1, 2} <= together, "prompts of different lengths were read together"


@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_sees_what_it_would_see_alone_whoever_joins_and_leaves(shape, monkeypatch):
    moves = watch(monkeypatch, SlotCache, "move_columns")
    play(SHAPES[shape])
    assert min(moves) < 0 < max(moves), "the cache's end was reached, and a prompt was longer than the columns in use"


@pytest.mark.parametrize(("fields", "slack"), WINDOWS.values(), ids=WINDOWS)
def test_a_layer_may_keep_its_window_alone(fields, slack, monkeypatch):
    """Its memory ends after so many steps, again and again, and prompts may be longer than what it holds."""
    monkeypatch.setattr(attention, "WINDOW_SLACK", slack)
    targets = watch(monkeypatch, WindowCache, "_move")
    play(fields)
    assert len(targets) > 5


@pytest.mark.parametrize("shape", ["llama", "unfused window", "capped window"])
def test_values_of_fewer_channels_than_keys(shape, monkeypatch):
    with narrow_values():
        test_a_row_sees_what_it_would_see_alone_whoever_joins_and_leaves(shape, monkeypatch)


def test_the_experts_of_a_sequence_are_those_of_its_own_forward():
    """Of all its tokens in all layers with experts, whoever joins and leaves, and whatever columns it has had."""
    model, build = small_model(pool.groups(), **EXPERTS)
    decoder, draw = SlotDecoder(model, build, slots=3, capacity=12, records_experts=True), random.Random(3)
    plain = SlotDecoder(model, build, slots=3, capacity=12)
    assert decoder.nbytes - plain.nbytes == 12 * 3 * 3 * 2 * 2, "capacity x slots x layers x k x 2 bytes"
    lengths, rows, read = [[3, 9], [1], [2, 4], [8], [1, 1]], [], []
    with torch.inference_mode():
        while lengths or rows:
            if lengths and len(rows) + len(lengths[0]) <= 3:
                prompts = [[draw.randrange(99) for _ in range(n)] for n in lengths.pop(0)]
                decoder.read(prompts)
                rows += prompts
                read += prompts
            tokens = [draw.randrange(99) for _ in rows]
            decoder.step(tokens)
            for row, token in zip(rows, tokens, strict=True):
                row.append(token)
            for number in reversed(range(len(rows))):
                if len(rows[number]) == 12 or draw.random() < 0.3:
                    decoder.remove(number)
                    rows[number] = rows[-1]
                    rows.pop()
        assert list(decoder.experts) != sorted(decoder.experts) == list(range(len(read)))
        for number, ids in enumerate(read):
            routing = MicrobatchRouting(torch.arange(len(ids)), None, None, choices={})
            model(torch.tensor([ids]), torch.arange(len(ids)).unsqueeze(0), routing=routing)
            assert list(routing.choices) == [1, 2, 3]
            assert torch.equal(decoder.experts[number], torch.stack(list(routing.choices.values()), dim=1))


@pytest.mark.parametrize("fields", [LLAMA, WINDOWS["both layers"][0], DELTA], ids=["llama", "windows", "delta"])
@pytest.mark.parametrize("place", [0, 1])
def test_numbers_of_a_broken_sequence_do_not_reach_others(place, fields, monkeypatch):
    """Neither its neighbour, which may have to move into its row, nor whoever gets a row after it."""
    monkeypatch.setattr(attention, "WINDOW_SLACK", 1)
    model, build = small_model(pool.groups(), **fields)
    bad, good, later = [3, 7, 3], [1, 2, 3, 4, 5, 6], [8, 9]
    with torch.no_grad():
        model.embedding.word_embeddings.weight[7] = float("nan")
    decoder = SlotDecoder(model, build, slots=2, capacity=24)
    with torch.inference_mode():
        for prompt in (bad, good) if place == 0 else (good, bad):
            assert decoder.read([prompt]).isnan().any() == (prompt is bad)
        neighbour = 1 - place
        assert_logits(decoder.step([5, 5])[neighbour : neighbour + 1], model, [[*good, 5]])
        decoder.remove(place)
        decoder.read([later])
        assert_logits(decoder.step([5, 6]), model, [[*good, 5, 5], [*later, 6]])


@pytest.mark.parametrize("fields", [LLAMA, DELTA], ids=["llama", "delta"])
def test_broken_padding_reaches_nobody(fields):
    """Neither prompts that are read with it, nor whoever gets its row, beside a longer row, when all have left."""
    model, build = small_model(pool.groups(), **fields)
    with torch.no_grad():
        model.embedding.word_embeddings.weight[0] = float("nan")  # of the token that padding consists of
    decoder = SlotDecoder(model, build, slots=2, capacity=24)
    short, long = [9, 8], [1, 2, 3, 4, 5, 6]
    with torch.inference_mode():
        assert_logits(decoder.read([short, long]), model, [short, long])
        assert_logits(decoder.step([5, 6]), model, [[*short, 5], [*long, 6]])
        decoder.remove(1)
        decoder.remove(0)
        decoder.read([[3]])
        decoder.read([long])
        assert_logits(decoder.step([5, 6]), model, [[3, 5], [*long, 6]])


def test_scores_of_prompts_that_are_read_together_are_those_of_a_full_forward():
    model, build = small_model(pool.groups(), **LLAMA)
    prompts = [[1, 2, 3, 4, 5], [9], [6, 7, 8]]
    with torch.inference_mode():
        logits, scores = SlotDecoder(model, build, slots=3, capacity=8).read_scored(prompts, 2, 50)
        assert_logits(logits, model, prompts)
        for prompt, found in zip(prompts, scores, strict=True):
            full = model(torch.tensor([prompt]), torch.arange(len(prompt)).unsqueeze(0))[:-1, 0, :99].log_softmax(-1)
            expected = full.gather(1, torch.tensor(prompt[1:], dtype=torch.int64)[:, None])[:, 0]
            torch.testing.assert_close(found.chosen, expected, rtol=0, atol=1e-5)
            best = full[:, :50].topk(2)
            torch.testing.assert_close(found.values.t(), best.values, rtol=0, atol=1e-5)
            assert found.ids.t().tolist() == best.indices.tolist()


def test_a_cache_of_the_longest_sequence_can_be_filled():
    model, build = small_model(pool.groups(), **LLAMA)
    decoder = SlotDecoder(model, build, slots=2, capacity=8)
    with torch.inference_mode():
        decoder.read([[1, 2]])
        decoder.read([[5] * 6])
        decoder.step([3, 5])
        assert_logits(decoder.step([4, 6]), model, [[1, 2, 3, 4], [5] * 7 + [6]])
        decoder.remove(1)
        assert_logits(decoder.step([7]), model, [[1, 2, 3, 4, 7]])


def test_its_size_is_that_of_two_tensors_a_layer():
    decoder = SlotDecoder(*small_model(pool.groups(), **LLAMA), slots=3, capacity=24)
    layers, groups, head, four_bytes = 2, 2, 8, 4
    assert decoder.nbytes == 2 * layers * 24 * 3 * groups * head * four_bytes
    with narrow_values():
        narrow = SlotDecoder(*small_model(pool.groups(), **LLAMA), slots=3, capacity=24)
    assert narrow.nbytes == decoder.nbytes * 3 // 4


def test_of_a_window_it_keeps_no_more_than_64_further_columns():
    """As in Gemma 3, five of six layers have a window."""
    fields = {**LLAMA, "num_layers": 6, "window_size": "15,0", "window_attn_skip_freq": "6"}
    model, build = small_model(pool.groups(), **{**fields, "max_position_embeddings": 1000})
    decoder = SlotDecoder(model, build, slots=3, capacity=1000)
    column = 3 * 2 * 2 * 8 * 4  # slots, groups, keys and values, channels, bytes
    assert decoder.nbytes == (5 * (16 + 64) + 1000) * column
    short = SlotDecoder(model, build, slots=3, capacity=70)
    assert short.nbytes == 6 * 70 * column, "never more than the longest sequence"


def test_a_hundred_tokens_with_a_window_are_those_of_whole_forwards():
    """The memory of the window ends once, after 69 columns."""
    fields = {**SHAPES["window"], "max_position_embeddings": 128}
    model, build = small_model(pool.groups(), **fields)
    decoder, ids = SlotDecoder(model, build, slots=1, capacity=110), [5, 17, 3]
    with torch.inference_mode():
        logits = decoder.read([ids])
        for _ in range(100):
            ids.append(int(logits[0, :99].argmax()))
            logits = decoder.step(ids[-1:])
            if len(ids) % 10 == 0:
                assert_logits(logits, model, [ids])
    assert len(set(ids)) > 5


def test_of_a_delta_net_it_keeps_a_state_and_three_inputs():
    for capacity in (24, 48):
        decoder = SlotDecoder(*small_model(pool.groups(), **DELTA), slots=3, capacity=capacity)
        attention_layer = capacity * 2 * 2 * 8 * 4  # groups, keys and values, channels, bytes
        state = (4 * 6 * 10 + 3 * 2 * (6 + 6 + 2 * 10)) * 4  # heads; inputs, key heads, channels; bytes
        assert decoder.nbytes == 3 * (attention_layer + state)


def test_of_latents_it_keeps_no_heads():
    """DeepSeek-V3's 128 heads of 192 + 128 channels would take 71 times as much."""
    decoder = SlotDecoder(*small_model(pool.groups(), **LATENT), slots=3, capacity=24)
    layers, latent, rotated, four_bytes = 2, 12, 4, 4
    assert decoder.nbytes == layers * 24 * 3 * (latent + rotated) * four_bytes


def test_sixty_four_tokens_of_latents_are_those_of_whole_forwards():
    model, build = small_model(pool.groups(), **{**LATENT, "max_position_embeddings": 128})
    decoder, ids = SlotDecoder(model, build, slots=1, capacity=70), [5, 17, 3]
    with torch.inference_mode():
        logits = decoder.read([ids])
        for _ in range(64):
            ids.append(int(logits[0, :99].argmax()))
            assert ids[-1] == int(alone(model, ids[:-1])[:99].argmax())
            logits = decoder.step(ids[-1:])
    assert len(set(ids)) > 5


def test_adapters_of_latents_are_not_absorbed():
    model, build = small_model(pool.groups(), **{**LATENT, "lora_rank": 3})
    adapters = {name: p for name, p in local_parameters(model).items() if is_adapter(name)}
    spread_constants(adapters, 0.3)
    decoder = SlotDecoder(model, build, slots=1, capacity=8)
    with torch.inference_mode():
        decoder.read([[5, 17, 3]])
        assert_logits(decoder.step([9]), model, [[5, 17, 3, 9]])
        assert_logits(decoder.step([2]), model, [[5, 17, 3, 9, 2]])
