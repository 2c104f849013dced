"""The requests that lm-evaluation-harness's `local-completions` client sends, and what it reads from the answers.

Written after lm_eval 0.4.13, models/openai_completions.py and api_models.py, which need not be installed. A
log-likelihood is asked for as an echoed prompt with one new token; the client reads the places from the context's end
to the last but one, and takes a token for the greedy one when its log-probability equals the largest of `top_logprobs`.
"""

import random

import pytest

from megatron.core.datasets.tokenizer_bpe import HuggingFaceTokenizer
from megatron.core.inference.score import Window, score
from tests.unit.inference.serving import BYTES, Live, write_tokenizer
from tests.unit.inference.small import without_cache


@pytest.fixture(scope="module")
def live(tmp_path_factory):
    """A model with more ids than its tokenizer has, as published ones have."""
    tokenizer = HuggingFaceTokenizer(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))
    with Live(tokenizer, fields={**BYTES, "vocab_size": 300}) as server:
        yield server


def loglikelihoods(live, inputs, context_lengths):
    """[(log-likelihood, greedy)] as the client's `_loglikelihood_tokens` gets them."""
    body = {
        "model": "tiny",
        "prompt": inputs,
        "temperature": 0,
        "max_tokens": 1,
        "logprobs": 1,
        "seed": 1234,
        "echo": True,
    }
    status, answer = live.call("POST", "/v1/completions", body)
    assert status == 200, answer
    found = []
    choices = sorted(answer["choices"], key=lambda choice: choice["index"])
    for choice, length in zip(choices, context_lengths, strict=True):
        own = choice["logprobs"]["token_logprobs"][length:-1]
        top = choice["logprobs"]["top_logprobs"][length:-1]
        found.append((sum(own), all(one == max(some.values()) for one, some in zip(own, top, strict=True))))
    return found


def test_log_likelihoods_are_those_of_the_harness_class(live):
    """Batches of token ids. Bytes from 128 on have no text of their own, so several of the likeliest share one."""
    draw = random.Random(1)
    pairs = [([draw.randrange(260) for _ in range(n)], [draw.randrange(260) for _ in range(m)])
             for n, m in [(1, 1), (5, 3), (30, 12), (3, 1), (60, 60)]]  # fmt: skip
    pairs += [(ids, without_cache(*live.built, ids, 1)) for ids in ([draw.randrange(260)] * n for n in range(1, 21))]
    pairs = [(context, more) for context, more in pairs if max(more) < 260]
    inputs = [[*context, *more] for context, more in pairs]
    found = loglikelihoods(live, inputs, [len(context) for context, _ in pairs])
    expected = score(*live.built, [Window(ids, len(more)) for ids, (_, more) in zip(inputs, pairs, strict=True)], 200)
    assert [value for value, _ in found] == pytest.approx([one.logprob for one in expected], abs=1e-4)
    assert [greedy for _, greedy in found] == [one.greedy for one in expected]
    assert sum(one.greedy for one in expected) >= 10 and not expected[1].greedy


def test_requests_as_text(live):
    """tokenized_requests=False: one prompt of text, whose tokens the client counts with its own tokenizer."""
    context, more = "Question: 1\nAnswer:", " yes"
    ids = live.tokenizer.encode(context + more)
    ((value, _),) = loglikelihoods(live, context + more, [len(live.tokenizer.encode(context))])
    assert value == pytest.approx(score(*live.built, [Window(ids, 4)], 100)[0].logprob, abs=1e-4)


def test_continuations(live):
    """`generate_until`: the client reads the texts by their index."""
    prompts = [live.tokenizer.encode(text) for text in ("def f(", "a")]
    body = {
        "prompt": prompts,
        "model": "tiny",
        "max_tokens": 9,
        "temperature": 0,
        "stop": ["</s>", "Q", "?"],
        "seed": 1234,
    }
    status, answer = live.call("POST", "/v1/completions", body)
    assert status == 200 and sorted(choice["index"] for choice in answer["choices"]) == [0, 1]
    assert all(isinstance(choice["text"], str) for choice in answer["choices"])


def test_without_a_remote_tokenizer_it_takes_its_own(live):
    assert live.call("GET", "/tokenizer_info")[0] == 404
