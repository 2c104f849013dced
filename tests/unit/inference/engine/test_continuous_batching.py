import threading

import pytest
import torch

from megatron.core.datasets.tokenizer import NullTokenizer
from megatron.core.inference.engine import continuous_batching
from megatron.core.inference.engine.continuous_batching import (
    EngineStopped,
    InferenceEngine,
    QueueFull,
    Request,
    ScoredToken,
)
from megatron.core.inference.engine.sampling import Sampling
from megatron.core.inference.engine.slots import SlotDecoder
from tests import pool
from tests.unit.inference.small import GREEDY, LLAMA, LONGROPE, PROMPTS, one_by_one, small_model, without_cache

SAMPLING = Sampling(temperature=1.3, top_k=40, top_p=0.9)


@pytest.fixture(scope="module")
def built():
    return small_model(pool.groups(), **LLAMA)


def make_engine(built, slots=3, max_waiting=100, **options):
    return InferenceEngine(
        SlotDecoder(*built, slots=slots, capacity=64), NullTokenizer(99), max_waiting=max_waiting, **options
    )


class Asked:
    """A request and what came of it."""

    def __init__(self, prompt, new=12, sampling=GREEDY, seed=0, **options):
        self.outputs = []
        self.request = Request(
            prompt=prompt,
            max_new_tokens=new,
            sampling=sampling,
            seed=seed,
            on_output=self.outputs.append,
            **options,
        )

    @property
    def text(self):
        return "".join(output.text for output in self.outputs)

    @property
    def ids(self):
        return [int(word) for word in self.text.split()]

    @property
    def reason(self):
        return self.outputs[-1].reason if self.outputs else None


def serve(engine, *asked):
    engine.submit([one.request for one in asked])
    while engine.step():
        pass
    assert engine.load() == (0, 0)
    return asked


def many_prompts(count):
    draw = torch.Generator().manual_seed(3)
    lengths = torch.randint(1, 40, (count,), generator=draw).tolist()
    return [torch.randint(0, 98, (length,), generator=draw).tolist() for length in lengths]


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLING])
@pytest.mark.parametrize("slots", [1, 5])
def test_answers_are_those_of_a_full_forward_whatever_else_runs(built, sampling, slots):
    """They wait, join and leave at different times: every prompt asks for another number of tokens."""
    prompts = many_prompts(11)
    asked = [Asked(p, 1 + 2 * (n % 6), sampling, seed=n) for n, p in enumerate(prompts)]
    serve(make_engine(built, slots), *asked)
    expected = [without_cache(*built, p, 1 + 2 * (n % 6), sampling, n) for n, p in enumerate(prompts)]
    assert [one.ids for one in asked] == expected
    assert {one.reason for one in asked} == {"length"}


def test_each_request_of_an_engine_for_long_sequences_has_the_factors_of_its_own_length():
    """The engine holds 64 tokens and the original length is 6: short requests are those of a short engine, others
    grow."""
    built = small_model(pool.groups(), **LONGROPE)
    asked = serve(make_engine(built), *(Asked(prompt, new) for prompt in PROMPTS for new in (1, 2, 20)))
    for number, one in enumerate(asked):
        assert one.ids == without_cache(*built, PROMPTS[number // 3], (1, 2, 20)[number % 3])
    other, _ = small_model(pool.groups(), **{**LONGROPE, "long_factor": "1.1,1.2,1.3,1.4"})
    free = [without_cache(*built, prompt, 20) for prompt in PROMPTS]
    assert [without_cache(other, built[1], prompt, 20) for prompt in PROMPTS] != free, "the factors decide"


def test_greedy_and_drawn_requests_run_together(built):
    kinds = [GREEDY, SAMPLING, Sampling(), GREEDY]
    asked = [Asked(p, 12, kind, seed=5) for p, kind in zip(PROMPTS, kinds, strict=True)]
    serve(make_engine(built, 4), *asked)
    for one, prompt, kind in zip(asked, PROMPTS, kinds, strict=True):
        assert one.ids == without_cache(*built, prompt, 12, kind, 5)


class TestPromptsThatAreReadTogether:
    """The lengths of the prompts of each read."""

    @pytest.fixture
    def reads(self, monkeypatch):
        reads = []
        read, read_scored = SlotDecoder.read, SlotDecoder.read_scored

        def watched(self, prompts):
            reads.append([len(prompt) for prompt in prompts])
            return read(self, prompts)

        def watched_scored(self, prompts, *options):
            reads.append(([len(prompt) for prompt in prompts], options[0]))
            return read_scored(self, prompts, *options)

        monkeypatch.setattr(SlotDecoder, "read", watched)
        monkeypatch.setattr(SlotDecoder, "read_scored", watched_scored)
        return reads

    def test_as_many_as_there_are_rows(self, built, reads):
        serve(make_engine(built, 3), *(Asked([5] * n, 2) for n in (4, 1, 9, 2, 3)))
        assert reads == [[4, 1, 9], [2, 3]]

    def test_up_to_a_number_of_tokens_with_their_padding(self, built, reads, monkeypatch):
        monkeypatch.setattr(continuous_batching, "PROMPT_TOKENS", 16)
        engine = make_engine(built, 9)
        asked = [Asked([5] * n, 3) for n in (4, 8, 2, 20, 1)]
        engine.submit([one.request for one in asked])
        engine.step()
        assert reads == [[4, 8]], "a third prompt would make it 24 tokens"
        engine.step()
        assert reads == [[4, 8], [2], [20]], "with the long one it would be 40; that one is read, and alone"
        serve(engine)
        assert reads == [[4, 8], [2], [20], [1]]
        assert [one.ids for one in asked] == [without_cache(*built, one.request.prompt, 3) for one in asked]

    def test_those_whose_tokens_are_scored_alike(self, built, reads):
        scored = {"top_logprobs": 1, "score_prompt": True}
        more = {**scored, "top_logprobs": 2}
        asked = serve(
            make_engine(built, 9),
            *(Asked(PROMPTS[n % 4], 1, **options) for n, options in enumerate([scored, scored, more, {}, {}])),
        )
        assert reads == [([3, 1], 1), ([9], 2), [5, 3]]
        for one in asked[:3]:
            model, prompt = built[0], one.request.prompt
            with torch.no_grad():
                logits = model(torch.tensor([prompt]), torch.arange(len(prompt)).unsqueeze(0))[:, 0, :99]
            expected = [float(logprobs[token]) for logprobs, token in zip(logits.log_softmax(-1), prompt[1:])]
            assert [token.logprob for token in one.outputs[0].prompt[1:]] == pytest.approx(expected, abs=1e-5)

    def test_a_cancelled_request_is_not_among_them(self, built, reads):
        engine, asked = make_engine(built, 3), [Asked([5] * n, 1) for n in (4, 1, 9, 2)]
        engine.submit([one.request for one in asked])
        asked[1].request.cancel()
        engine.step()
        assert reads == [[4, 9, 2]] and not asked[1].outputs

    def test_a_broken_one_ends_alone(self, reads):
        """It is shorter than the others, and ends before the first step; the others are as without it."""
        model, build = small_model(pool.groups(), **LLAMA)
        with torch.no_grad():
            model.embedding.word_embeddings.weight[7] = float("nan")
        good, bad, other = serve(make_engine((model, build)), *(Asked(p) for p in ([1, 2, 3, 4], [7], [5, 6])))
        assert reads == [[4, 1, 2]] and bad.reason == "error"
        for one in (good, other):
            assert one.ids == without_cache(model, build, one.request.prompt)


def test_requests_that_arrive_while_others_run_join_them(built):
    engine, first, second = make_engine(built), Asked(PROMPTS[0], 30), Asked(PROMPTS[2], 3)
    engine.submit([first.request])
    for _ in range(4):
        engine.step()
    assert engine.load() == (1, 0) and first.reason is None
    engine.submit([second.request])
    engine.step()
    assert engine.load() == (2, 0)
    while second.reason is None:
        engine.step()
    assert first.reason is None, "the shorter one leaves first"
    while engine.step():
        pass
    assert [first.ids, second.ids] == [
        one_by_one(*built, PROMPTS[:1], 30)[0],
        one_by_one(*built, PROMPTS[2:3], 3)[0],
    ]


def test_what_ends_an_answer_is_told(built):
    free = one_by_one(*built, PROMPTS)
    tokenizer_end = free[1][2]
    engine = make_engine(built, stop_ids=[tokenizer_end])
    stop = f" {free[0][3]} {free[0][4]}"
    by_text, by_id = serve(engine, Asked(PROMPTS[0], stop_strings=[stop]), Asked(PROMPTS[1]))
    assert (by_text.ids, by_text.reason, by_text.outputs[-1].count) == (free[0][:3], "stop", 5)
    end = free[1].index(tokenizer_end)
    assert (by_id.ids, by_id.reason, by_id.outputs[-1].count) == (free[1][:end], "stop", end + 1)


def test_text_comes_as_it_is_made(built):
    (asked,) = serve(make_engine(built), Asked(PROMPTS[0]))
    assert len(asked.outputs) == 12 and [output.count for output in asked.outputs] == list(range(1, 13))


def test_log_probabilities_are_those_of_a_full_forward(built):
    model, _ = built
    asked, other = serve(make_engine(built), Asked(PROMPTS[0], 6, SAMPLING, 1, top_logprobs=3), Asked(PROMPTS[2]))
    tokens = [token for output in asked.outputs for token in output.tokens]
    assert [token.id for token in tokens] == asked.ids and not any(output.tokens for output in other.outputs)
    for place, token in enumerate(tokens):
        ids = PROMPTS[0] + asked.ids[:place]
        with torch.no_grad():
            logits = model(torch.tensor([ids]), torch.arange(len(ids)).unsqueeze(0))[-1, 0, :99]
        logprobs = logits.log_softmax(-1)
        assert token.logprob == pytest.approx(float(logprobs[token.id]), abs=1e-5)
        best = logprobs.topk(3)
        assert [i for i, _ in token.top] == best.indices.tolist()
        assert [value for _, value in token.top] == pytest.approx(best.values.tolist(), abs=1e-5)


def test_log_probabilities_are_over_all_ids_of_the_model(built):
    """A tokenizer that knows 40 of the model's 99 ids: the others are never chosen, and have their probabilities."""
    model, _ = built
    decoder = SlotDecoder(*built, slots=1, capacity=64)
    prompt = [id % 40 for id in PROMPTS[2]]
    (asked,) = serve(
        InferenceEngine(decoder, NullTokenizer(40), max_waiting=1), Asked(prompt, 8, top_logprobs=3, score_prompt=True)
    )
    prompt_tokens, new = asked.outputs[0].prompt, [token for output in asked.outputs for token in output.tokens]
    ids = [token.id for token in [*prompt_tokens, *new]]
    with torch.no_grad():
        logprobs = model(torch.tensor([ids]), torch.arange(len(ids)).unsqueeze(0))[:, 0, :99].log_softmax(-1)
    assert prompt_tokens[0] == ScoredToken(prompt[0]) and ids[: len(prompt)] == prompt and max(ids) < 40
    assert logprobs[:, :40].logsumexp(-1).max() < -0.1, "the others are likely enough to make a difference"
    for place, token in enumerate([*prompt_tokens, *new][1:]):
        assert token.logprob == pytest.approx(float(logprobs[place, token.id]), abs=1e-5)
        best = logprobs[place, :40].topk(3)
        assert [i for i, _ in token.top] == best.indices.tolist()
        assert [value for _, value in token.top] == pytest.approx(best.values.tolist(), abs=1e-5)


def test_a_request_for_nothing_new_only_reads_its_prompt(built):
    engine = make_engine(built)
    scored, bare, one, usual = serve(
        engine,
        Asked(PROMPTS[0], 0, top_logprobs=1, score_prompt=True),
        Asked(PROMPTS[1], 0),
        Asked(PROMPTS[1], 1, top_logprobs=0, score_prompt=True),
        Asked(PROMPTS[2], 3),
    )
    (output,) = scored.outputs
    assert (output.text, output.count, output.reason, len(output.prompt)) == ("", 0, "length", len(PROMPTS[0]))
    assert [(output.count, output.reason, output.prompt) for output in bare.outputs] == [(0, "length", ())]
    assert one.outputs[0].prompt == (ScoredToken(PROMPTS[1][0]),) and one.outputs[-1].tokens[0].top == ()
    assert usual.ids == one_by_one(*built, PROMPTS[2:3], 3)[0]


def test_a_prompt_whose_scores_are_not_finite_ends_its_own_request_only():
    model, build = small_model(pool.groups(), **LLAMA)
    with torch.no_grad():
        model.embedding.word_embeddings.weight[7] = float("nan")
    bad, good = serve(
        make_engine((model, build)),
        Asked([3, 7, 5], 0, top_logprobs=0, score_prompt=True),
        Asked([3, 5], 0, top_logprobs=0, score_prompt=True),
    )
    assert bad.reason == "error" and "not finite" in bad.outputs[-1].error
    assert good.reason == "length" and good.outputs[0].prompt[1].logprob < 0


class TestLeaving:
    def test_a_cancelled_request_frees_its_row(self, built):
        engine, gone, waits = make_engine(built, slots=1), Asked(PROMPTS[0], 40), Asked(PROMPTS[1], 4)
        engine.submit([gone.request, waits.request])
        engine.step()
        assert engine.load() == (1, 1)
        gone.request.cancel()
        while engine.step():
            pass
        assert gone.reason is None and len(gone.ids) < 5
        assert waits.ids == one_by_one(*built, PROMPTS[1:2], 4)[0]

    def test_one_that_waits_is_never_read(self, built):
        engine, runs, gone = make_engine(built, slots=1), Asked(PROMPTS[0], 4), Asked(PROMPTS[1], 4)
        engine.submit([runs.request, gone.request])
        gone.request.cancel()
        while engine.step():
            pass
        assert runs.reason == "length" and gone.outputs == []

    def test_the_queue_takes_all_of_a_call_or_nothing(self, built):
        engine = make_engine(built, slots=1, max_waiting=3)
        engine.submit([Asked(p).request for p in PROMPTS[:2]])
        with pytest.raises(QueueFull, match="2 requests are waiting"):
            engine.submit([Asked(p).request for p in PROMPTS[:2]])
        assert engine.load() == (0, 2)
        engine.submit([Asked(PROMPTS[0]).request])


class TestThread:
    """`run` on a thread of its own."""

    def run(self, engine):
        thread = threading.Thread(target=engine.run)
        thread.start()
        return thread

    def test_requests_are_served_until_it_stops(self, built):
        engine, done = make_engine(built), threading.Event()
        asked = Asked(PROMPTS[0])
        keep = asked.request.on_output
        asked.request.on_output = lambda output: (keep(output), done.set() if output.reason else None)
        thread = self.run(engine)
        engine.submit([asked.request])
        assert done.wait(20)
        engine.stop()
        thread.join(20)
        assert not thread.is_alive() and engine.failure is None
        assert asked.ids == one_by_one(*built, PROMPTS[:1])[0]
        with pytest.raises(EngineStopped):
            engine.submit([asked.request])

    def test_what_has_not_ended_then_is_told(self, built):
        engine = make_engine(built, slots=1)
        runs, waits = Asked(PROMPTS[0], 40), Asked(PROMPTS[1])
        engine.submit([runs.request, waits.request])
        engine.step()
        engine.stop()
        engine.run()
        for asked in (runs, waits):
            assert asked.reason == "error" and asked.outputs[-1].error == "the server is shutting down"

    def test_a_failure_reaches_every_request(self, built, monkeypatch):
        engine = make_engine(built, slots=1)
        asked = [Asked(p) for p in PROMPTS]
        engine.submit([one.request for one in asked])
        engine.step()
        error = RuntimeError("the device is gone")
        monkeypatch.setattr(SlotDecoder, "step", lambda self, tokens: (_ for _ in ()).throw(error))
        engine.run()
        assert engine.failure is error
        assert [one.outputs[-1].error for one in asked] == ["the engine failed: the device is gone"] * 4
        with pytest.raises(EngineStopped):
            engine.submit([asked[0].request])


def test_logits_that_are_not_finite_end_their_own_request_only():
    model, build = small_model(pool.groups(), **LLAMA)
    with torch.no_grad():
        model.embedding.word_embeddings.weight[7] = float("nan")
    bad, good = serve(make_engine((model, build)), Asked([3, 7]), Asked(PROMPTS[0]))
    assert bad.reason == "error" and "not finite" in bad.outputs[-1].error
    assert good.ids == one_by_one(model, build, PROMPTS[:1])[0]
