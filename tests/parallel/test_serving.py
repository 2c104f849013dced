"""The engine and the scores under tensor parallelism are those of one process."""

import pytest
import torch

from megatron.core.datasets.tokenizer import NullTokenizer
from megatron.core.inference.engine import Engine, Request
from megatron.core.inference.sampling import Sampling
from megatron.core.inference.score import Window, score
from megatron.core.inference.slots import SlotDecoder
from tests import pool
from tests.parallel.test_generation import restore, save
from tests.unit.inference.small import GREEDY, PROMPTS, run

SAMPLING = Sampling(temperature=1.2, top_k=50, top_p=0.95)


def serve(rank, size, folder, slots):
    """On the first rank the texts of eight requests, six of which wait at first; on others what `follow` returns."""
    model, build = restore(size, folder)
    decoder = SlotDecoder(model, build, slots=slots, capacity=40)
    if rank > 0:
        return decoder.follow()
    engine = Engine(decoder, NullTokenizer(99), max_waiting=10)
    pieces = [[] for _ in range(8)]
    engine.submit(
        [
            Request(
                prompt=PROMPTS[i % 4],
                max_new_tokens=5 + 3 * i,
                sampling=GREEDY if i < 4 else SAMPLING,
                seed=i,
                on_piece=pieces[i].append,
            )
            for i in range(8)
        ]
    )
    while engine.step():
        pass
    decoder.idle()
    engine.stop()
    engine.run()
    return ["".join(piece.text for piece in own) for own in pieces]


def offline(rank, size, folder):
    built = restore(size, folder)
    ids = [*run(*built, PROMPTS, 14), *run(*built, PROMPTS, 26, SAMPLING, [4, 5, 6, 7])]
    return [" ".join(map(str, own[: 5 + 3 * i])) for i, own in enumerate(ids)]


@pytest.mark.parametrize("slots", [2, 8])
def test_answers_do_not_depend_on_tp(tmp_path, slots):
    (folder,) = pool.run(1, save, str(tmp_path), {})
    (expected,) = pool.run(1, offline, folder)
    texts, followed = pool.run(2, serve, folder, slots)
    assert [text.strip() for text in texts] == expected and followed is None


def calls(rank, size, folder):
    """Collectives of a prompt of 3, a step, a removal, a sign of life and the end."""
    model, build = restore(size, folder)
    decoder = SlotDecoder(model, build, slots=2, capacity=40)
    with build.groups.heartbeat.record() as made, torch.inference_mode():
        if rank > 0:
            decoder.follow()
        else:
            decoder.read([1, 2, 3])
            decoder.step([4])
            decoder.remove(0)
            decoder.idle()
            decoder.close()
    return [(call.op, call.group, call.shape) for call in made]


def test_a_step_communicates_what_it_says(tmp_path):
    (folder,) = pool.run(1, save, str(tmp_path), {})
    h, padded = 32, 112

    def told(count):
        return [("broadcast", "tp", (2,)), *([("broadcast", "tp", (count,))] if count else [])]

    def forward(s):
        return [("all_reduce", "tp", (s, 1, h))] * (1 + 2 * 2) + [("all_gather", "tp", (padded // 2, 1))]

    expected = told(3) + forward(3) + told(1) + forward(1) + told(1) + told(0) + told(0)
    assert pool.run(2, calls, folder) == [expected] * 2


def scores(rank, size, folder):
    return score(*restore(size, folder), [Window(ids, len(ids) - 1) for ids in PROMPTS if len(ids) > 1], 12)


def test_scores_do_not_depend_on_tp(tmp_path):
    (folder,) = pool.run(1, save, str(tmp_path), {})
    (expected,) = pool.run(1, scores, folder)
    first, second = pool.run(2, scores, folder)
    assert first == second, "gathered: the same bits on both ranks"
    assert [one.logprob for one in first] == pytest.approx([one.logprob for one in expected], abs=1e-5)
    assert [one.greedy for one in first] == [one.greedy for one in expected]
