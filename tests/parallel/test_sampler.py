"""The sampler is the trainer: the same parameters in memory, and under every layout the same answers, whose
log-probabilities the trainer computes, too."""

import functools

import pytest
import torch

from megatron.base.errors import ConfigError
from megatron.core.inference.engine import slots
from megatron.planner.memory.sampling import cache_bytes, forward_sizes, sampling_shape
from megatron.rl.answers import pack
from megatron.spec import attention
from megatron.spec.decoder import decoder_spec
from megatron.training.step import log_probabilities
from tests import pool
from tests.parallel.rl_runs import CPU, DELTA, EXPERTS, make_sampler, make_trainer, sampled

LIMIT = 3e-6  # products of other shapes, of log-probabilities of about -4


def answered(rank, size, words):
    """(answers, largest difference from the trainer's log-probabilities, sampled tokens of this replica, whether the
    parameters are the trainer's, their number)"""
    trainer, tokenizer = make_trainer(size, words)
    sampler = make_sampler(trainer, tokenizer)
    answers, dp = sampled(sampler, trainer.groups), trainer.groups.dp
    replicas = [answers[n * len(answers) // dp.size : (n + 1) * len(answers) // dp.size] for n in range(dp.size)]
    packed = pack(replicas, dp.rank, seq_length=64, micro_batch_size=1, device=CPU)
    computed = log_probabilities(trainer.model, packed.batches, trainer.groups, trainer.settings.pipeline)
    reported = packed.of_tokens([answer.logprobs for answer in replicas[dp.rank]])
    far = float(((torch.cat(computed) - reported) * packed.mask).abs().max())
    tokens = int(packed.mask.sum())
    shared = zip(sampler.model.parameters(), trainer.model.parameters(), strict=True)
    return (
        [(a.prompt, a.number, a.ids) for a in answers],
        far,
        tokens,
        [a.data_ptr() == b.data_ptr() for a, b in shared],
    )


@functools.cache
def expected(words):
    return pool.run(1, answered, words)[0][0]


LAYOUTS = [
    (1, ""),
    (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    (2, "--pipeline-model-parallel-size 2"),
    (2, "--use-distributed-optimizer"),
    (2, "--context-parallel-size 2"),
]


@pytest.mark.parametrize(
    ("size", "layout", "model"),
    [
        *((size, layout, "") for size, layout in LAYOUTS),
        (1, "", "--rl-default-temperature 0.7"),
        (2, "--pipeline-model-parallel-size 2", "--rl-default-temperature 0.7"),
        (1, "", EXPERTS),
        (2, "--expert-model-parallel-size 2", EXPERTS),
        (4, "--expert-model-parallel-size 2 --pipeline-model-parallel-size 2", EXPERTS),
        (4, "--expert-model-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel", EXPERTS),
    ],
)
def test_answers_are_those_of_one_process_and_the_trainers(size, layout, model):
    everywhere = expected(model)
    longest = {len(ids) for _, _, ids in everywhere}
    assert len(everywhere) == 8 and max(longest) == 16, "the answers have ends of their own, and cut ones"
    ranks = pool.run(size, answered, f"{model} {layout}")
    for answers, far, tokens, same in ranks:
        assert answers == everywhere
        assert tokens > 0 and far <= LIMIT
        assert same and all(same)


def test_temperature_is_part_of_the_distribution():
    assert expected("--rl-default-temperature 0.7") != expected("")


def test_a_cache_that_does_not_fit_is_refused(monkeypatch):
    """The message names the largest number of answers that has room."""
    trainer, tokenizer = make_trainer(1, "")
    sampler = make_sampler(trainer, tokenizer)
    row = 4 * 2 * 2 * 16 * 4  # layers, keys and values, heads, channels, bytes
    monkeypatch.setattr(slots, "headroom", lambda device: 10 * 100 * row)
    sampler.check_room(10, 100)
    with pytest.raises(
        ConfigError, match=r"cache of 11 requests .* give --rl-generation-batch-size 10 or less, or lower"
    ):
        sampler.check_room(11, 100)
    with pytest.raises(ConfigError, match=r"GB; lower --rollout-max-response-len"):
        sampler.check_room(1, 2000)


@pytest.mark.parametrize("model", ["", EXPERTS, "--window-size 3,0 --window-attn-skip-freq 2", DELTA])
def test_the_cache_has_the_planned_bytes(model, monkeypatch):
    monkeypatch.setattr(attention, "WINDOW_SLACK", 8)
    trainer, tokenizer = make_trainer(1, f"{model} --rl-generation-batch-size 5 --bf16")
    run, settings, sampler = trainer.run, trainer.settings, make_sampler(trainer, tokenizer)
    shape, sizes = sampling_shape(run, settings), forward_sizes(run, settings, trainer.target, s=1, b=1)
    spec, (stage,) = decoder_spec(run.model), settings.pipeline.stages
    decoder = slots.SlotDecoder(
        sampler.model, sampler._build, slots=shape.slots, capacity=shape.capacity, records_experts=True
    )
    assert (shape.slots, shape.capacity) == (5, 64)
    assert cache_bytes(spec, stage, sizes, shape) == decoder.nbytes > 0


def test_each_token_stands_where_it_is_the_label():
    """The rows hold every answer once, with its values, and padding has no weight."""
    answers = pool.run(1, lone_answers)[0]
    for size in (1, 2, 3):
        shares = [answers[n * len(answers) // size : (n + 1) * len(answers) // size] for n in range(size)]
        rows = set()
        for replica, share in enumerate(shares):
            packed = pack(shares, replica, seq_length=32, micro_batch_size=2, device=CPU)
            reported = packed.of_tokens([answer.logprobs for answer in share])
            numbers = packed.of_answers([float(number + 1) for number in range(len(share))])
            rows.add(len(packed.mask))
            assert packed.count == len(share) and {len(batch.tokens) for batch in packed.batches} == {2}
            labels = torch.cat([batch.labels for batch in packed.batches])
            for number, answer in enumerate(share):
                place = (packed.sequences == number) & (packed.mask > 0)
                assert labels[place].tolist() == list(answer.ids)
                assert reported[place].tolist() == pytest.approx(answer.logprobs, rel=1e-6)
                assert numbers[place].unique().tolist() == [number + 1]
            assert int(packed.mask.sum()) == sum(len(answer.ids) for answer in share)
        assert len(rows) == 1, "all replicas run equally many microbatches"


def lone_answers(rank, size):
    trainer, tokenizer = make_trainer(size, "")
    return sampled(make_sampler(trainer, tokenizer), trainer.groups)
