"""Figures for the log, against loops over tokens."""

import math
from dataclasses import replace

import pytest
import torch

from megatron.rl.metrics import largest_difference, policy_sums
from megatron.rl.objectives import POLICY_LOSSES, ClipRange
from tests.unit.rl.batches import SEEDS, draw, floats, lay_out

CLIP = ClipRange(0.1, 0.15)


def k3_by_hand(difference):
    return math.exp(-difference) - 1 + difference


@pytest.mark.parametrize("name", ["ppo", "gspo"])
def test_sums_over_tokens(name):
    clipped = 0
    for seed in SEEDS:
        sequences = draw(seed)
        log_probs, experience, _ = lay_out(sequences, 14, seed)
        sums = {
            key: value.item() for key, value in policy_sums(log_probs, experience, POLICY_LOSSES[name], CLIP).items()
        }
        expected = dict.fromkeys(sums, 0.0)
        for sequence in sequences:
            tokens = [token for token in floats(sequence) if token[5]]
            mean = sum(token[0] - token[1] for token in tokens) / max(len(tokens), 1)
            for lp, old, sampler, reference, advantage, _ in tokens:
                ratio = math.exp(mean if name == "gspo" else lp - old)
                expected["tokens"] += 1
                expected["ratio"] += ratio
                expected["clip-low"] += ratio < 0.9 and advantage < 0
                expected["clip-high"] += ratio > 1.15 and advantage > 0
                expected["entropy"] -= lp
                expected["sampler-k3"] += k3_by_hand(sampler - old)
                expected["reference-k1"] += lp - reference
                expected["reference-k3"] += k3_by_hand(lp - reference)
        assert sums == pytest.approx(expected, abs=1e-5)
        assert next(iter(sums)) == "tokens"
        clipped += min(expected["clip-low"], expected["clip-high"])
    assert clipped


def test_without_a_reference_model_nothing_is_said_about_it():
    log_probs, experience, _ = lay_out(draw(1), 14)
    sums = policy_sums(log_probs, replace(experience, reference=None), POLICY_LOSSES["ppo"], CLIP)
    assert not [name for name in sums if name.startswith("reference")]


def test_equal_sampler_and_trainer_give_exactly_zero():
    log_probs, experience, _ = lay_out(draw(1), 14)
    experience = replace(experience, sampler=torch.where(experience.mask > 0, experience.old, experience.sampler))
    assert policy_sums(log_probs, experience, POLICY_LOSSES["ppo"], CLIP)["sampler-k3"].item() == 0.0
    assert largest_difference(experience).item() == 0.0


def test_largest_difference():
    for seed in SEEDS:
        sequences = draw(seed)
        _, experience, _ = lay_out(sequences, 14, seed)
        expected = max(abs(t[1] - t[2]) for sequence in sequences for t in floats(sequence) if t[5])
        assert largest_difference(experience).item() == pytest.approx(expected, abs=1e-6)
