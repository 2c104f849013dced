"""The flags of an objective, and the weights that follow from them."""

import dataclasses
import math
import typing

import pytest
import torch

from megatron.config.flag import flag_of
from megatron.config.rl import RLConfig
from megatron.rl.advantages import ADVANTAGES
from megatron.rl.aggregation import Aggregation
from megatron.rl.answers import Response
from megatron.rl.divergence import KL_ESTIMATORS
from megatron.rl.experience import Experience
from megatron.rl.objectives import POLICY_LOSSES
from megatron.rl.policy import Policy
from megatron.rl.rollout import with_penalties
from tests import pool

FIELDS = {field.name: flag_of(field) for field in dataclasses.fields(RLConfig)}


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("advantage_estimator", ADVANTAGES),
        ("rl_objective", POLICY_LOSSES),
        ("kl_loss_type", KL_ESTIMATORS),
        ("rl_loss_aggregation", typing.get_args(Aggregation)),
    ],
)
def test_a_flag_offers_all_that_there_is(name, known):
    assert set(FIELDS[name].choices) == set(known)


def experience(**fields):
    """Two answers of three and one tokens in a row of five, whose first token is a prompt."""
    values = {
        "old": torch.tensor([[0.0, -1.0, -2.0, -0.5, -1.5]]),
        "sampler": torch.tensor([[0.0, -1.0, -2.0, -0.5, -1.5]]),
        "reference": None,
        "advantages": torch.tensor([[0.0, 1.0, 1.0, 1.0, -1.0]]),
        "mask": torch.tensor([[0.0, 1.0, 1.0, 1.0, 1.0]]),
        "sequences": torch.tensor([[0, 0, 0, 0, 1]]),
    }
    return Experience(**{**values, **fields}, count=2)


def weighed(config, log_probs, **fields):
    policy = Policy(RLConfig(rollout_max_response_len=4, **config), pool.groups().dp)
    return policy.weigh(experience(**fields), log_probs)


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("token", [0, 1 / 4, 1 / 4, 1 / 4, -1 / 4]),
        ("sequence", [0, 1 / 6, 1 / 6, 1 / 6, -1 / 2]),
        ("constant", [0, 1 / 8, 1 / 8, 1 / 8, -1 / 8]),
    ],
)
def test_on_policy_a_weight_is_the_advantage_times_the_share_of_the_token(aggregation, expected):
    weights = weighed({"rl_loss_aggregation": aggregation}, experience().old).weights
    assert weights.flatten().tolist() == pytest.approx(expected)


def test_a_token_beyond_the_clip_has_no_weight():
    moved = experience().old + torch.tensor([[0.0, 0.3, 0.1, 0.0, -0.3]])
    result = weighed({"grpo_clamp_eps_lower": 0.2, "grpo_clamp_eps_upper": 0.28}, moved)
    first, second, third, last = result.weights.flatten().tolist()[1:]
    assert first == 0.0 and last == 0.0 and third == pytest.approx(1 / 4)
    assert second == pytest.approx(math.exp(0.1) / 4)
    assert result.numbers["clip-high"] == 1 / 4 and result.numbers["clip-low"] == 1 / 4


def test_truncated_importance_sampling_weighs_by_the_ratio_to_the_sampler():
    sampler = experience().old - torch.tensor([[0.0, math.log(4.0), math.log(1.5), 0.0, 0.0]])
    weights = weighed({"tis_clip": 2.0}, experience().old, sampler=sampler).weights
    assert weights.flatten().tolist() == pytest.approx([0, 2 / 4, 1.5 / 4, 1 / 4, -1 / 4])


# Ratios of the trainer to the sampler: 4, 1.5, 1 in the first answer, and 1 in the second one.
SAMPLER = experience().old - torch.tensor([[0.0, math.log(4.0), math.log(1.5), 0.0, 0.0]])


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"tis_clip": 2.0, "tis_clip_low": 1.2}, [2 / 4, 1.5 / 4, 1.2 / 4, -1.2 / 4]),
        ({"tis_clip": 7.0, "tis_level": "sequence"}, [6 / 4, 6 / 4, 6 / 4, -1 / 4]),
        # A masked token has no part in the denominator either.
        ({"tis_clip": 2.0, "tis_clip_low": 0.5, "tis_mode": "mask"}, [0, 1.5 / 3, 1 / 3, -1 / 3]),
        ({"rollout_rs": "token", "rollout_rs_threshold": 2.0}, [0, 1 / 3, 1 / 3, -1 / 3]),
        ({"rollout_rs": "sequence", "rollout_rs_threshold": 2.0}, [0, 0, 0, -1]),
        (
            {"rollout_rs": "geometric", "rollout_rs_threshold": 2.0, "rollout_rs_threshold_lower": 0.9},
            [1 / 4, 1 / 4, 1 / 4, -1 / 4],
        ),
        ({"tis_clip": 2.0, "rollout_rs": "token", "rollout_rs_threshold": 2.0}, [0, 1.5 / 3, 1 / 3, -1 / 3]),
    ],
)
def test_a_sampler_with_other_probabilities(flags, expected):
    weighted = weighed(flags, experience().old, sampler=SAMPLER)
    assert weighted.weights.flatten().tolist() == pytest.approx([0, *expected])
    assert weighted.numbers["rejected"] == expected.count(0) / 4


def test_rejection_has_the_reciprocal_as_lower_bound():
    """The sampler was more certain than the trainer: ratios 1 / 4 and 2 / 3."""
    rejects = {"rollout_rs": "token", "rollout_rs_threshold": 3.0}
    weighted = weighed(rejects, experience().old, sampler=2 * experience().old - SAMPLER)
    assert weighted.weights.flatten().tolist() == pytest.approx([0, 0, 1 / 3, 1 / 3, -1 / 3])
    assert "rejected" not in weighed({}, experience().old).numbers


def test_long_answers_lose_a_part_of_their_reward():
    def response(length):
        return Response(
            prompt=0,
            number=0,
            prompt_ids=(1,),
            ids=(2,) * length,
            logprobs=(0.0,) * length,
            sampler_rank=0,
            text="",
            is_cut=False,
            reward=1.0,
            numbers={"correct": 1.0},
        )

    answers = [response(length) for length in (2, 4, 7, 8)]
    config = RLConfig(rollout_max_response_len=8, overlong_buffer_len=4, overlong_penalty_factor=0.5)
    shaped = with_penalties(answers, config)
    assert [answer.reward for answer in shaped] == [1.0, 1.0, 0.625, 0.5]
    assert shaped[2].numbers == {"correct": 1.0, "overlong penalty": -0.375}
    assert with_penalties(answers, RLConfig(rollout_max_response_len=8)) == answers


def test_the_divergence_pulls_to_the_reference():
    reference = experience().old + torch.tensor([[0.0, 0.5, 0.0, 0.0, 0.0]])
    config = {"grpo_kl_beta": 0.1, "kl_loss_type": "k2"}
    with_, without = weighed(config, experience().old, reference=reference), weighed({}, experience().old)
    pull = (with_.weights - without.weights).flatten().tolist()
    assert pull == pytest.approx([0, 0.1 * 0.5 / 4, 0, 0, 0], abs=1e-7)


def test_advantages_follow_the_groups():
    def response(reward):
        return Response(
            prompt=0,
            number=0,
            prompt_ids=(1,),
            ids=(2,),
            logprobs=(0.0,),
            sampler_rank=0,
            text="",
            is_cut=False,
            reward=reward,
        )

    groups = [[response(reward) for reward in rewards] for rewards in ([0.0, 1.0], [3.0, 3.0])]
    policy = Policy(RLConfig(advantage_estimator="dr_grpo"), pool.groups().dp)
    assert policy.advantages(groups) == [-0.5, 0.5, 0.0, 0.0] and policy.advantages([]) == []


def test_the_largest_difference_is_that_of_a_trained_token():
    sampler = experience().old + torch.tensor([[9.0, 0.0, -0.25, 0.0, 0.0]])
    policy = Policy(RLConfig(), pool.groups().dp)
    assert policy.largest_difference([experience(), experience(sampler=sampler)]) == 0.25
