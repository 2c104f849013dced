"""The engine and the scores under tensor and pipeline parallelism are those of one process."""

import pytest
import torch

from megatron.base.errors import CheckpointError
from megatron.core.datasets.tokenizer import NullTokenizer
from megatron.core.inference.engine.continuous_batching import InferenceEngine, Request
from megatron.core.inference.engine.sampling import Sampling
from megatron.core.inference.engine.slots import SlotDecoder
from megatron.core.inference.score import Window, score
from tests.parallel.test_generation import LAYERS, MIXED, ONE, PP2, PP4, TP2, TP4, on, restore, restore_damaged, save
from tests.unit.inference.small import GREEDY, PROMPTS, run

SAMPLING = Sampling(temperature=1.2, top_k=50, top_p=0.95)
WINDOWS = [Window(ids, len(ids) - 1) for ids in PROMPTS if len(ids) > 1]


def serve(rank, size, layout, folder, slots):
    """On the first rank the texts of eight requests, with fewer rows some wait; on others what `follow` returns."""
    model, build = restore(layout, folder)
    decoder = SlotDecoder(model, build, slots=slots, capacity=40)
    if rank > 0:
        return decoder.follow()
    engine = InferenceEngine(decoder, NullTokenizer(99), max_waiting=10)
    outputs = [[] for _ in range(8)]
    engine.submit(
        [
            Request(
                prompt=PROMPTS[i % 4],
                max_new_tokens=5 + 3 * i,
                sampling=GREEDY if i < 4 else SAMPLING,
                seed=i,
                on_output=outputs[i].append,
            )
            for i in range(8)
        ]
    )
    while engine.step():
        pass
    decoder.idle()
    engine.stop()
    engine.run()
    return ["".join(output.text for output in own) for own in outputs]


def offline(rank, size, layout, folder):
    """The same texts from `generate`, up to the tokenizer's eod."""
    built, eod = restore(layout, folder), NullTokenizer(99).eod
    ids = [*run(*built, PROMPTS, 14), *run(*built, PROMPTS, 26, SAMPLING, [4, 5, 6, 7])]
    ids = [own[: [*own, eod].index(eod)] for own in ids]
    return [" ".join(map(str, own[: 5 + 3 * i])) for i, own in enumerate(ids)]


@pytest.mark.parametrize(
    ("tied", "slots", "layouts"),
    [pytest.param(False, 2, (TP2, PP2, PP4, MIXED), marks=pytest.mark.slow), (True, 8, (TP2, PP2, TP4))],
    ids=["untied, most wait", "tied, none waits"],
)
def test_answers_do_not_depend_on_the_layout(tmp_path, tied, slots, layouts):
    (folder,) = on(ONE, save, str(tmp_path), {"untie_embeddings_and_output_weights": not tied})
    (expected,) = on(ONE, offline, folder)
    for layout in layouts:
        texts, *followed = on(layout, serve, folder, slots)
        assert [text.strip() for text in texts] == expected, layout
        assert followed == [None] * (layout[0] * layout[1] - 1)


def calls(rank, size, layout, folder):
    """Collectives of a read of a prompt of 3 and one of 1, a step, a removal, a sign of life and the end."""
    model, build = restore(layout, folder)
    decoder = SlotDecoder(model, build, slots=2, capacity=40)
    with build.groups.heartbeat.record() as made, torch.inference_mode():
        if rank > 0:
            decoder.follow()
        else:
            decoder.read([[1, 2, 3], [4]])
            decoder.step([4, 5])
            decoder.remove(0)
            decoder.idle()
            decoder.close()
    return [(call.op, call.group, call.shape) for call in made]


def test_a_step_communicates_what_it_says(tmp_path):
    (folder,) = on(ONE, save, str(tmp_path), {})
    b, h, padded = 2, 32, 112

    def told(count):
        return [("broadcast", "model", (2,)), *([("broadcast", "model", (count,))] if count else [])]

    def under_tp(s):
        return [("all_reduce", "tp", (s, b, h))] * (1 + 2 * LAYERS) + [("all_gather", "tp", (padded // 2, b))]

    def under_pp(message, s):
        return [(message, "pp 0>1", (s, b, h)), ("broadcast", "pp", (b, padded))]

    rest = told(1) + told(0) + told(0)
    numbers = 1 + 2 + 4  # how many prompts, their lengths and their tokens
    assert on(TP2, calls, folder) == [told(numbers) + under_tp(3) + told(2) + under_tp(1) + rest] * 2
    assert on(PP2, calls, folder) == [
        told(numbers) + under_pp(message, 3) + told(2) + under_pp(message, 1) + rest for message in ("send", "receive")
    ]


def scored_prompts(rank, size, layout, folder):
    """On the first rank, of each prompt: its log-probabilities, the three likeliest ids below 57, and the next
    logits."""
    model, build = restore(layout, folder)
    decoder = SlotDecoder(model, build, slots=4, capacity=40)
    with torch.inference_mode():
        if rank > 0:
            return decoder.follow()
        logits, scores = decoder.read_scored(PROMPTS, 3, 57)
        decoder.close()
    return [(own, some.packed()) for own, some in zip(logits, scores, strict=True)]


def test_scores_of_prompts_do_not_depend_on_the_layout(tmp_path):
    """Of the second half of the vocabulary one id may be among the likeliest. One prompt has a single token."""
    (folder,) = on(ONE, save, str(tmp_path), {})
    (expected,) = on(ONE, scored_prompts, folder)
    assert [scores.shape for _, scores in expected] == [(7, len(prompt) - 1) for prompt in PROMPTS]
    for layout in (TP2, PP2, MIXED):
        first, *_ = on(layout, scored_prompts, folder)
        for (logits, scores), (other_logits, other) in zip(first, expected, strict=True):
            torch.testing.assert_close(logits, other_logits, rtol=0, atol=1e-4)
            torch.testing.assert_close(scores, other, rtol=0, atol=1e-4)


def cache_bytes(rank, size, layout, folder):
    return SlotDecoder(*restore(layout, folder), slots=2, capacity=40).nbytes


def test_a_rank_has_the_cache_of_its_own_layers_and_heads(tmp_path):
    (folder,) = on(ONE, save, str(tmp_path), {})
    (whole,) = on(ONE, cache_bytes, folder)
    for layout in (TP2, PP2, PP4, MIXED):
        ranks = layout[0] * layout[1]
        assert on(layout, cache_bytes, folder) == [whole // ranks] * ranks
    assert on(TP4, cache_bytes, folder) == [whole // 2] * 4, "copies of two heads"


def scores(rank, size, layout, folder, batch_tokens):
    return score(*restore(layout, folder), WINDOWS, batch_tokens)


@pytest.mark.parametrize("batch_tokens", [12, 1])
def test_scores_do_not_depend_on_the_layout(tmp_path, batch_tokens):
    (folder,) = on(ONE, save, str(tmp_path), {})
    (expected,) = on(ONE, scores, folder, batch_tokens)
    for layout in (TP2, PP2, PP4, MIXED):
        first, *others = on(layout, scores, folder, batch_tokens)
        assert all(found == first for found in others), "gathered and shared: the same bits on all ranks"
        assert [one.logprob for one in first] == pytest.approx([one.logprob for one in expected], abs=1e-5)
        assert [one.greedy for one in first] == [one.greedy for one in expected]


def score_calls(rank, size, layout, folder):
    """Collectives of one batch of three scored positions, without those of the layers."""
    model, build = restore(layout, folder)
    with build.groups.heartbeat.record() as made:
        score(model, build, [Window([1, 2, 3, 4], 3)], 10)
    return [(call.op, call.group, call.shape) for call in made if call.op in ("all_gather", "broadcast")]


def test_the_vocabulary_is_not_gathered(tmp_path):
    (folder,) = on(ONE, save, str(tmp_path), {})
    five_numbers = [("all_gather", "tp", (5, 3))]
    assert on(TP2, score_calls, folder) == [five_numbers] * 2
    shared = [("broadcast", "pp", (2, 3))]
    assert on(MIXED, score_calls, folder) == [shared] * 2 + [five_numbers + shared] * 2


def messages(rank, size, layout, folder):
    """Messages while ten windows are scored, each of which is a batch."""
    model, build = restore(layout, folder)
    with build.groups.heartbeat.record() as made:
        score(model, build, [Window([1, 2, 3, 4], 2)] * 10, 1)
    return [(call.op, call.group, call.shape) for call in made]


def test_batches_follow_one_another_through_the_stages(tmp_path):
    """A stage that has read a batch does not wait for the others, except for the results of eight."""
    (folder,) = on(ONE, save, str(tmp_path), {})
    for found, message in zip(on(PP2, messages, folder), ("send", "receive"), strict=True):
        hidden = (message, "pp 0>1", (3, 1, 32))
        assert found == [*[hidden] * 8, ("broadcast", "pp", (2, 16)), *[hidden] * 2, ("broadcast", "pp", (2, 4))]


def damaged(rank, size, layout, folder):
    """The error of every rank."""
    with pytest.raises(CheckpointError) as error:
        score(*restore_damaged(layout, folder), WINDOWS, 12)
    return str(error.value)


def test_damaged_weights_end_it_on_all_stages(tmp_path):
    (folder,) = on(ONE, save, str(tmp_path), {})
    first, second = on(PP2, damaged, folder)
    assert first == second and "the model's logits are not finite" in first
