"""What is on the device while answers are sampled: whole weights, gathered once, and optimizer states or not."""

import pytest

from megatron.rl import sampler as sampler_file
from tests import pool
from tests.parallel.rl_runs import EXPERTS, HOST, LONGEST, PROMPTS, ZERO_3, make_sampler, make_trainer
from tests.parallel.test_rollouts import SEQUENCES, expected, learned

IDLE = "--rl-offload-optimizer-during-inference"


def sampled(rank, size, words):
    """(calls while two batches of answers were sampled one after the other, gathered buckets as (bytes of a slice),
    elements of the sharded parameters before, during and after, (bytes of the optimizer on the device before, during
    and after))"""
    trainer, tokenizer = make_trainer(size, words)
    data_parallel, optimizer = trainer.data_parallel, trainer.optimizer
    sharded = [trainer.parameters[name] for name in sorted(data_parallel.sharded_names)]
    seen, generate = [], sampler_file.generate

    def look():
        seen.append((sum(parameter.numel() for parameter in sharded), optimizer.device_bytes))

    def looks(*args, **kwargs):
        look()
        return generate(*args, **kwargs)

    sampler = make_sampler(trainer, tokenizer)
    look()
    sampler_file.generate = looks
    try:
        with trainer.groups.heartbeat.record() as calls:
            answers = [sampler.sample([PROMPTS[rank]] * 2, [n, n + 1], [LONGEST] * 2) for n in range(2)]
    finally:
        sampler_file.generate = generate
    look()
    assert all(len(answer.ids) > 1 for batch in answers for answer in batch)
    gathers = [
        bucket.param_shard.nbytes
        for bucket in data_parallel.buckets
        if bucket.shards > 1 and set(bucket.parameters) <= data_parallel.sharded_names
    ]
    whole = sum(parameter.info.numel for parameter in sharded)
    return [(call.op, call.nbytes) for call in calls], gathers, whole, seen


def test_sharded_weights_are_gathered_once_for_all_answers():
    """Bytes: each rank sends its slice of every bucket, however many tokens are sampled."""
    for calls, gathers, whole, seen in pool.run(2, sampled, f"{ZERO_3} --bf16"):
        assert len(gathers) > 1 and whole > 0
        assert sorted(calls) == sorted([("all_gather", nbytes) for nbytes in gathers] * 2)
        assert [elements for elements, _ in seen] == [0, whole, whole, 0]


@pytest.mark.parametrize(("size", "words"), [(1, HOST), (2, "--data-parallel-sharding-strategy optim_grads")])
def test_weights_of_a_rank_cost_no_communication(size, words):
    for calls, gathers, whole, seen in pool.run(size, sampled, words):
        assert not calls and not gathers
        assert [elements for elements, _ in seen] == [0, whole, whole, 0] and (whole > 0) == (words == HOST)


@pytest.mark.parametrize("words", ["", "--bf16 --use-distributed-optimizer", f"{EXPERTS} {ZERO_3}"])
def test_optimizer_states_leave_the_device(words):
    """In fp32 two moments of 4 bytes for each element of the slices, in bf16 a master more."""
    size = 2 if words else 1
    for *_, seen in pool.run(size, sampled, f"{words} {IDLE}"):
        before, *during, after = [nbytes for _, nbytes in seen]
        assert before == after > 0 and during == [0, 0]
    for *_, seen in pool.run(size, sampled, words):
        assert len({nbytes for _, nbytes in seen}) == 1


def test_training_does_not_notice():
    """Neither losses nor weights change by a bit."""
    losses, norms, *_, weights = expected(SEQUENCES)
    found = pool.run(1, learned, f"{SEQUENCES} {IDLE}")[0]
    assert (found[0], found[1]) == (losses, norms)
    assert all(tensor.equal(found[-1][name][1]) for name, (_, tensor) in weights.items())
