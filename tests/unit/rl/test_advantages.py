"""Advantages from rewards, against Python's statistics."""

import statistics

import pytest
import torch

from megatron.rl.advantages import dr_grpo, grpo, has_signal, moments, overlong_penalty, rloo, whiten
from tests.unit.rl.batches import SEEDS, draw, lay_out


def rewards(seed, groups=5, samples=6):
    return torch.randn(groups, samples, generator=torch.Generator().manual_seed(seed)) * 2 + 1


def by_hand(group, kind):
    mean = statistics.fmean(group)
    if kind is rloo:
        return [r - statistics.fmean(group[:at] + group[at + 1 :]) for at, r in enumerate(group)]
    return [(r - mean) / (statistics.stdev(group) + 1e-6) if kind is grpo else r - mean for r in group]


@pytest.mark.parametrize("kind", [grpo, dr_grpo, rloo])
class TestGroups:
    def test_formula(self, kind):
        for seed in SEEDS:
            values = rewards(seed)
            expected = torch.tensor([by_hand(group, kind) for group in values.tolist()])
            assert (kind(values) - expected).abs().max() <= 1e-6
            assert kind(values).dtype == torch.float32

    def test_a_group_of_equal_rewards_has_advantages_of_exactly_zero(self, kind):
        """The mean of equal numbers is rounded, and GRPO would divide that by a standard deviation of the same size."""
        for value in (0.1, 0.3, -7.7, 1e6 / 3):
            for samples in (3, 7, 8):
                values = torch.full((2, samples), value)
                values[1, 0] += 1
                advantages = kind(values)
                assert advantages[0].count_nonzero() == 0 and advantages[1].count_nonzero() == samples
                assert has_signal(values).tolist() == [False, True]

    def test_a_group_of_one_sample_keeps_its_reward(self, kind):
        assert kind(torch.tensor([[0.5], [-2.0]])).tolist() == [[0.5], [-2.0]]
        assert has_signal(torch.tensor([[0.5], [-2.0]])).tolist() == [True, True]


def test_whitened_tokens_of_all_replicas():
    for seed in SEEDS:
        values, parts = [], []
        for replica in range(2):
            _, experience, _ = lay_out(draw(seed + 100 * replica), 14)
            parts.append(experience)
            values += experience.advantages[experience.mask > 0].tolist()
        totals = sum(moments(part.advantages, part.mask) for part in parts)
        mean, deviation = statistics.fmean(values), statistics.stdev(values)
        for part in parts:
            expected = [(a - mean) / deviation for a in part.advantages[part.mask > 0].tolist()]
            found = whiten(part.advantages, totals)[part.mask > 0]
            assert (found - torch.tensor(expected)).abs().max() <= 1e-6


def test_equal_advantages_are_whitened_to_zero():
    advantages, mask = torch.full((2, 5), 0.3), torch.ones(2, 5)
    assert whiten(advantages, moments(advantages, mask)).abs().max() <= 1e-6


def test_overlong_penalty():
    lengths = torch.tensor([1, 80, 81, 90, 99, 100, 120])
    expected = torch.tensor([0.0, 0.0, -0.05, -0.5, -0.95, -1.0, -1.0])
    assert (overlong_penalty(lengths, max_length=100, buffer=20) - expected).abs().max() <= 1e-6
