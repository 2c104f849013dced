import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron.base.errors import CheckpointError, DataError
from megatron.core.datasets.tokenizer import NullTokenizer
from megatron.core.inference.score import TextScore, Window, score, score_texts, sliding_windows
from tests import pool
from tests.unit.inference.small import GPT2, LLAMA, LONGROPE, PROMPTS, small_model, without_cache
from tests.unit.inference.test_generate import transformers_twin


@pytest.fixture(scope="module")
def llama():
    return small_model(pool.groups(), **LLAMA)


@torch.no_grad()
def logprobs_alone(model, ids, rows=99):
    """Of each of ids[1:] after all before it, by one forward; the softmax is that of the first `rows` logits."""
    logits = model(torch.tensor([ids[:-1]]), torch.arange(len(ids) - 1).unsqueeze(0))[:, 0, :rows]
    return logits.log_softmax(-1).gather(1, torch.tensor(ids[1:]).unsqueeze(1)).squeeze(1).tolist()


class TestWindows:
    @pytest.mark.parametrize("length", [2, 5, 9, 10, 11, 30])
    @pytest.mark.parametrize("stride", [1, 3, 8])
    def test_every_token_is_scored_once_after_enough_others(self, length, stride):
        ids = list(range(length))
        windows = list(sliding_windows(ids, 8, stride))
        scored = [token for window in windows for token in window.ids[-window.scored :]]
        assert scored == ids[1:]
        assert all(len(window.ids) <= 9 for window in windows)
        assert all(len(window.ids) - window.scored > 8 - stride for window in windows[1:])
        assert all(list(window.ids) == list(range(window.ids[0], window.ids[-1] + 1)) for window in windows)

    def test_the_only_token_of_a_text_needs_nothing_scored(self):
        assert list(sliding_windows([5], 8, 4)) == []


@pytest.mark.parametrize(
    ("shape", "rows"),
    [(LLAMA, 99), (GPT2, 99), ({**GPT2, "mask_padded_vocabulary": False}, 112), (LONGROPE, 99)],
    ids=["llama", "gpt2", "with padding", "longrope"],
)
@pytest.mark.parametrize("batch_tokens", [1, 20, 1000])
def test_scores_are_those_of_each_window_alone(shape, rows, batch_tokens):
    model, build = small_model(pool.groups(), **shape)
    windows = [Window(ids, scored) for ids in PROMPTS if len(ids) > 1 for scored in (1, len(ids) - 1)]
    found = score(model, build, windows, batch_tokens)
    for window, one in zip(windows, found, strict=True):
        assert one.logprob == pytest.approx(sum(logprobs_alone(model, window.ids, rows)[-window.scored :]), abs=1e-5)


def test_greedy_continuations_are_recognised(llama):
    ids = without_cache(*llama, PROMPTS[0], 5)
    right, wrong = [*PROMPTS[0], *ids], [*PROMPTS[0], *ids[:-1], (ids[-1] + 1) % 99]
    found = score(*llama, [Window(right, 5), Window(wrong, 5), Window(right, 6)], 100)
    assert [one.greedy for one in found] == [True, False, ids[0] == PROMPTS[0][-1]]


def test_logits_that_are_not_finite_are_reported():
    model, build = small_model(pool.groups(), **LLAMA)
    with torch.no_grad():
        model.decoder.final_layernorm.weight[0] = float("nan")
    with pytest.raises(CheckpointError, match="not finite"):
        score(model, build, [Window([1, 2], 1)], 10)


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that an operation makes."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        sizes = (one.numel() for one in tree_leaves(made) if isinstance(one, torch.Tensor))
        self.elements = max(self.elements, *sizes, 0)
        return made


def test_no_tensor_of_all_positions_and_the_whole_vocabulary_is_made():
    """512 positions x 160,000 ids are 82 million logits; a block of them has at most 2^25."""
    shape = {**LLAMA, "vocab_size": 160_000, "hidden_size": 8, "ffn_hidden_size": 8, "max_position_embeddings": 512}
    model, build = small_model(pool.groups(), **shape)
    window = Window([i * 311 % 160_000 for i in range(513)], 512)
    with Largest() as largest:
        (found,) = score(model, build, [window], 512)
    with torch.inference_mode():
        some = torch.tensor([window.ids[:4]]), torch.arange(4).unsqueeze(0)
        expected = model(*some)[:, 0].log_softmax(-1).gather(1, torch.tensor(window.ids[1:5]).unsqueeze(1))
    assert score(model, build, [Window(window.ids[:5], 4)], 4)[0].logprob == pytest.approx(
        float(expected.sum()), rel=1e-5
    )
    assert math.isfinite(found.logprob) and 1 << 20 < largest.elements <= 1 << 25


class TestTexts:
    TEXTS = (" ".join(str(i * 7 % 98) for i in range(50)), "", "5 17 3", "44")

    def score(self, llama, texts=TEXTS, context=16, stride=8, batch_tokens=64):
        tokenizer = NullTokenizer(99)
        return score_texts(*llama, tokenizer, texts, context=context, stride=stride, batch_tokens=batch_tokens)

    def test_it_is_the_mean_over_tokens(self, llama):
        found = self.score(llama, context=64, stride=64)
        documents = [[98, *map(int, text.split())] for text in self.TEXTS if text]
        nats = -sum(sum(logprobs_alone(llama[0], ids)) for ids in documents)
        assert (found.documents, found.tokens, found.bytes) == (3, 54, sum(map(len, self.TEXTS)))
        assert found.nats == pytest.approx(nats, rel=1e-6)
        assert found.loss == pytest.approx(nats / 54) and found.perplexity == pytest.approx(math.exp(nats / 54))
        assert found.bits_per_byte == pytest.approx(nats / math.log(2) / found.bytes)

    @torch.no_grad()
    def test_it_is_that_of_transformers(self, llama):
        model, build = llama
        ids = [98, *map(int, self.TEXTS[0].split())]
        theirs = transformers_twin(model, build.config)
        loss = theirs(torch.tensor([ids]), labels=torch.tensor([ids])).loss
        assert self.score(llama, self.TEXTS[:1], 64, 64).loss == pytest.approx(float(loss), rel=1e-5)

    def test_windows_see_what_the_stride_leaves_them(self, llama):
        """Each window by hand: its tokens are read from position 0 on, and the last ones are counted."""
        ids = [98, *map(int, self.TEXTS[0].split())]
        nats = -sum(logprobs_alone(llama[0], ids[:17]))
        for end in (25, 33, 41, 49, 51):
            new = 8 if end < 51 else 2
            nats -= sum(logprobs_alone(llama[0], ids[end - 17 : end])[-new:])
        assert self.score(llama, self.TEXTS[:1]).nats == pytest.approx(nats, rel=1e-6)

    def test_batches_and_blocks_do_not_matter(self, llama):
        texts = [text for text in self.TEXTS for _ in range(20)]
        assert self.score(llama, texts, batch_tokens=1).nats == pytest.approx(self.score(llama, texts).nats, rel=1e-6)

    def test_there_must_be_text(self, llama):
        with pytest.raises(DataError, match="no text to score"):
            self.score(llama, ["", ""])


def test_a_perplexity_may_be_too_large_for_a_float():
    assert TextScore(1, 1, 1, 800.0).perplexity == math.inf
