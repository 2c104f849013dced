"""Learning from rewards under every layout: the answers, rewards and losses of one process."""

import functools
from dataclasses import replace
from types import SimpleNamespace

import pytest

from megatron.core.datasets.sample import Splits
from megatron.rl import learner
from megatron.rl.episodes import TurnEncoder
from megatron.rl.function_workers import CallResult
from megatron.rl.learner import RolloutReader
from megatron.rl.policy import Policy
from megatron.rl.prompts import Prompt
from megatron.rl.reference import ReferenceWeights
from megatron.rl.rewards import Reward, RewardBatch
from megatron.rl.rollout import Rollouts
from megatron.rl.teacher import open_teacher
from tests import pool
from tests.parallel.rl_runs import EXPERTS, HOST, PROMPTS, ZERO_3, make_sampler, make_trainer

LIMIT = 1e-5
STEPS = 4


class EvenTokens:
    """Rewards an answer by its share of even ids: no function of a user, but one that has a different value for most
    answers."""

    def score(self, answers):
        return RewardBatch(tuple(Reward(self._value(answer.completion)) for answer in answers))

    def close(self):
        pass

    def _value(self, text):
        ids = [int(word) for word in text.split()]
        return sum(number % 2 == 0 for number in ids) / max(1, len(ids))


class RepeatedTokens:
    """An environment that repeats the last id of an answer, and ends the conversation behind a multiple of 4."""

    def call(self, answers):
        return [CallResult(self._turn(answer.last_answer)) for answer in answers]

    def close(self):
        pass

    def _turn(self, text):
        last = int(text.split()[-1]) if text else 1
        return f" {last} 2 {last}" if last % 4 else None


def prompt_at(number):
    ids = PROMPTS[number % len(PROMPTS)]
    return Prompt(number, tuple(ids), " ".join(map(str, ids)), None, {})


def make_learner(size, words):
    """A trainer whose batches are answers, in training mode."""
    trainer, tokenizer = make_trainer(size, words)
    groups = trainer.groups
    config = trainer.run.rl
    rewards = EvenTokens() if groups.model.rank == 0 else None
    environment, encoder = None, None
    if config.custom_environment_path is not None:
        environment, encoder = RepeatedTokens() if groups.model.rank == 0 else None, TurnEncoder(tokenizer)
    sampler = make_sampler(trainer, tokenizer)
    rollouts = Rollouts(config, groups, sampler, prompt_at, rewards, 1, environment, encoder)
    reference = ReferenceWeights(trainer, is_anew=True) if config.grpo_kl_beta else None
    teacher = None if config.opd_teacher_load is None else open_teacher(config.opd_teacher_load, trainer, tokenizer)
    reader = RolloutReader(trainer, rollouts, Policy(config, groups.dp), reference, None, teacher)
    trainer.readers = Splits(reader, None, None)
    trainer.model.train()
    return trainer


def learned(rank, size, words, steps=STEPS):
    """(losses, gradient norms, figures of rollouts, answers of the first rollout, weights) of a few steps."""
    trainer = make_learner(size, words)
    reader = trainer.readers.train
    reports = [trainer.train_step() for _ in range(steps)]
    trainer.data_parallel.synchronize()
    pieces = {name: (p.info, p.detach().clone()) for name, p in trainer.parameters.items()}
    return (
        [report.loss for report in reports],
        [report.grad_norm for report in reports],
        [report.numbers for report in reader.reports],
        [[(answer.ids, answer.mask, answer.reward) for answer in group] for group in reader.reports[0].rollout.groups],
        trainer.state.consumed_prompts,
        pieces,
    )


@functools.cache
def expected(words):
    return pool.run(1, learned, words)[0]


def assert_same(words, ranks):
    losses, norms, numbers, answers, prompts, _ = expected(words)
    for found in ranks:
        assert found[3] == answers and found[4] == prompts
        assert found[0] == pytest.approx(losses, rel=LIMIT)
        assert found[1] == pytest.approx(norms, rel=1e-4)
        for mine, theirs in zip(found[2], numbers, strict=True):
            for name in ("reward", "objective", "ratio", "answer length", "without signal"):
                assert mine[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-6), name
            assert mine.get("routing flips", 0.0) == 0.0, "scores in fp32 are hardly ever so close"


TWICE = "--grpo-iterations 2 --global-batch-size 4"
SEQUENCES = f"{TWICE} --rl-objective gspo --rl-loss-aggregation sequence --grpo-kl-beta 0.1"
# With a small vocabulary most answers end of themselves, so that the environment is asked.
TURNS = """
    --custom-environment-path environment.py --rl-max-turns 4 --vocab-size 12 --rollout-max-response-len 24
    --num-layers 2
"""
TP, PP, CP = (
    "--tensor-model-parallel-size 2 --sequence-parallel",
    "--pipeline-model-parallel-size 2",
    "--context-parallel-size 2",
)
SHARDED = f"{TP} --data-parallel-sharding-strategy optim_grads --overlap-param-gather"


@pytest.mark.parametrize(
    ("words", "size", "layout"),
    [
        ("", 2, TP),
        pytest.param("", 2, PP, marks=pytest.mark.slow),
        ("", 2, CP),
        pytest.param("", 2, "--use-distributed-optimizer --micro-batch-size 2", marks=pytest.mark.slow),
        ("", 1, "--seq-length 32 --cross-entropy-chunk-size 8"),
        (TWICE, 1, "--micro-batch-size 2"),
        pytest.param(TWICE, 4, SHARDED, marks=pytest.mark.slow),
        pytest.param(SEQUENCES, 2, CP, marks=pytest.mark.slow),
        (SEQUENCES, 2, PP),
        (TURNS, 2, TP),
        pytest.param(TURNS, 2, PP, marks=pytest.mark.slow),
        pytest.param(TURNS, 2, CP, marks=pytest.mark.slow),
        pytest.param(f"{TURNS} {EXPERTS}", 2, "--expert-model-parallel-size 2", marks=pytest.mark.slow),
        (SEQUENCES, 2, f"{ZERO_3} {HOST}"),
        pytest.param(SEQUENCES, 1, HOST, marks=pytest.mark.slow),
        pytest.param(EXPERTS, 4, f"{ZERO_3} --expert-model-parallel-size 2", marks=pytest.mark.slow),
        (EXPERTS, 2, "--expert-model-parallel-size 2"),
        pytest.param(EXPERTS, 4, f"{PP} {CP}", marks=pytest.mark.slow),
        pytest.param(
            EXPERTS, 2, f"{TP} --expert-model-parallel-size 2 --expert-tensor-parallel-size 1", marks=pytest.mark.slow
        ),
    ],
)
def test_the_layout_changes_nothing(words, size, layout):
    assert_same(words, pool.run(size, learned, f"{words} {layout}"))


def test_only_sampled_tokens_of_several_turns_are_trained_on():
    """The turns of the environment stand in the sequence, where it has put them, and have no log-probabilities."""
    _, _, numbers, groups, *_ = expected(TURNS)
    answers = [answer for group in groups for answer in group if answer[1]]
    assert len(answers) > 2 and 1 < numbers[0]["turns"] <= 4
    for ids, mask, _ in answers:
        assert len(ids) == len(mask) <= 24 and mask[-1] == 1
        places = [place for place, is_sampled in enumerate(mask) if not is_sampled]
        for start in places[::3]:
            last = ids[start - 2] if start > 1 and mask[start - 2] else 1  # the answer may have no text
            assert ids[start - 1 : start + 3] == (11, last, 2, last), (ids, mask)
    sampled = sum(sum(mask) if mask else len(ids) for group in groups for ids, mask, _ in group)
    assert numbers[0]["sampled tokens"] == sampled


def test_groups_without_a_signal_are_replaced():
    """Answers of one token, of which many are alike: the step has whole groups, and further prompts are read."""
    words = "--rollout-max-response-len 1 --grpo-filter-groups-with-same-reward --rl-max-sampling-rounds 8"
    _, _, numbers, answers, prompts, _ = expected(words)
    assert numbers[0]["without signal"] > 0 and prompts > STEPS * len(PROMPTS)
    assert all(len({reward for *_, reward in group}) > 1 for group in answers)
    assert_same(words, pool.run(2, learned, words))


# Few and short answers of a shallow model: its products are slow in this mode.
INVARIANT = "--batch-invariant-mode --num-layers 2 --rollout-max-response-len 5"
INVARIANT_EXPERTS = f"{INVARIANT} {EXPERTS}"
INVARIANT_TURNS = f"{INVARIANT} {TURNS} --rollout-max-response-len 12 --hidden-size 32 --ffn-hidden-size 64"


@pytest.mark.parametrize(
    ("words", "size", "layout"),
    [
        (INVARIANT, 1, "--micro-batch-size 2"),
        (f"{INVARIANT} --bf16", 1, ""),
        (INVARIANT, 2, TP),
        pytest.param(INVARIANT, 2, PP, marks=pytest.mark.slow),
        pytest.param(INVARIANT, 2, "--use-distributed-optimizer", marks=pytest.mark.slow),
        (INVARIANT_EXPERTS, 2, "--expert-model-parallel-size 2"),
        (INVARIANT_TURNS, 1, ""),
    ],
)
def test_in_batch_invariant_mode_sampler_and_trainer_agree_bit_for_bit(words, size, layout):
    """In every rollout, also behind updates."""
    for _, _, numbers, *_ in pool.run(size, learned, f"{words} {layout}", 2):
        assert len(numbers) == 2
        for figures in numbers:
            assert figures["largest difference"] == figures["sampler-k3"] == figures.get("routing flips", 0.0) == 0.0
            assert ("turns" in figures) == (words == INVARIANT_TURNS)


SAMPLERS = "--use-rollout-logprobs --rollout-logprobs-interval 3"


@pytest.mark.parametrize("words", [f"{INVARIANT} --bf16", f"{INVARIANT_EXPERTS} --grpo-iterations 2"])
def test_log_probabilities_of_the_sampler_train_the_same_bits(words):
    """One forward in three is made, and the log does not claim a comparison that was not made."""
    steps = 8 if "iterations" in words else 4
    losses, norms, numbers, *_, weights = pool.run(1, learned, words, steps)[0]
    found = pool.run(1, learned, f"{words} {SAMPLERS}", steps)[0]
    assert (found[0], found[1]) == (losses, norms)
    assert all(tensor.equal(found[-1][name][1]) for name, (_, tensor) in weights.items())
    compared = {"largest difference", "sampler-k3", *(["routing flips"] if EXPERTS in words else [])}
    assert [set(figures) & compared for figures in found[2]] == [compared, set(), set(), compared]
    assert all(figures.keys() >= compared for figures in numbers)


def differing(rank, size, words):
    """(figures of each rollout, warnings) of a run whose sampler reports other log-probabilities from the second
    rollout on."""
    trainer = make_learner(size, words)
    reader, warnings = trainer.readers.train, []
    sampler = reader.rollouts._sampler
    sample = sampler.sample

    def shifted(*args, **kwargs):
        completions = sample(*args, **kwargs)
        shift = 0.25 * bool(reader.reports)
        return [replace(c, logprobs=tuple(value - shift for value in c.logprobs)) for c in completions]

    sampler.sample = shifted
    learner_log, learner.log = learner.log, SimpleNamespace(warning=lambda text, *rest: warnings.append(text % rest))
    try:
        for _ in range(5):
            trainer.train_step()
    finally:
        learner.log = learner_log
    return [report.numbers for report in reader.reports], warnings


def test_a_difference_brings_the_forward_back():
    numbers, warnings = pool.run(1, differing, f"{INVARIANT} {SAMPLERS}")[0]
    assert ["largest difference" in figures for figures in numbers] == [True, False, False, True, True]
    assert [figures.get("largest difference") for figures in numbers[3:]] == pytest.approx([0.25, 0.25])
    assert len(warnings) == 1 and "differ by 0.25" in warnings[0]
