"""Corrections for the sampler, against loops over tokens, and the denominators after a rejection."""

import math
from dataclasses import replace

import pytest
import torch

from megatron.rl.aggregation import aggregation_weights, local_counts
from megatron.rl.correction import icepop, reject, truncate
from megatron.rl.objectives import POLICY_LOSSES, ClipRange, as_token_weights, policy_objective
from tests.unit.rl.batches import SEEDS, by_sequence, draw, floats, largest_error, lay_out

LEVELS = ("token", "sequence", "geometric")


def ratios_by_hand(sequence, level):
    """rho at each token of a sequence."""
    differences = [old - sampler if mask else 0.0 for _, old, sampler, _, _, mask in floats(sequence)]
    trained = sum(mask for *_, mask in floats(sequence))
    if level == "token":
        return [math.exp(d) for d in differences]
    total = sum(differences) / (max(trained, 1) if level == "geometric" else 1)
    return [math.exp(total) if mask else 1.0 for *_, mask in floats(sequence)]


def expected(sequences, level, factor, low, high):
    """(weights, mask) with factor(rho) where low <= rho <= high."""
    weights, masks = [], []
    for sequence in sequences:
        ratios = ratios_by_hand(sequence, level)
        masks.append([m if low <= r <= high else 0.0 for r, (*_, m) in zip(ratios, floats(sequence), strict=True)])
        weights.append([factor(r, m) for r, m in zip(ratios, masks[-1], strict=True)])
    return weights, masks


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("method", ["truncate", "icepop", "reject"])
def test_weights_and_mask(method, level):
    rejected = 0
    for seed in SEEDS:
        sequences = draw(seed)
        _, experience, places = lay_out(sequences, 14, seed)
        if method == "truncate":
            correction = truncate(experience, level, 1.3)
            weights, mask = expected(sequences, level, lambda r, m: min(r, 1.3), 0.0, math.inf)
        elif method == "icepop":
            correction = icepop(experience, level, 0.7, 1.4)
            weights, mask = expected(sequences, level, lambda r, m: r * m, 0.7, 1.4)
        else:
            correction = reject(experience, level, 0.7, 1.4)
            weights, mask = expected(sequences, level, lambda r, m: 1.0, 0.7, 1.4)
        assert largest_error(by_sequence(correction.weights, sequences, places), weights) <= 1e-6
        assert largest_error(by_sequence(correction.mask, sequences, places), mask) == 0
        rejected += int((experience.mask - correction.mask).sum())
    assert (rejected > 0) is (method != "truncate")


def test_equal_log_probabilities_change_nothing():
    _, experience, _ = lay_out(draw(1), 14)
    experience = replace(experience, sampler=experience.old)
    for level in LEVELS:
        for correction in (truncate(experience, level), icepop(experience, level), reject(experience, level, 1.0, 1.0)):
            assert torch.equal(correction.weights[experience.mask > 0], torch.ones(int(experience.mask.sum())))
            assert torch.equal(correction.mask, experience.mask)


def objective(log_probs, experience, aggregation):
    weights = aggregation_weights(experience, aggregation, local_counts(experience), 12)
    loss = POLICY_LOSSES["ppo"]
    return as_token_weights(lambda leaf: policy_objective(leaf, experience, loss, ClipRange(), weights), log_probs)


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
def test_rejected_sequences_leave_the_denominators(aggregation):
    """The objective is that of a batch in which the rejected sequences were never sampled."""
    rejected = 0
    for seed in SEEDS:
        sequences = draw(seed)
        kept = [s for s in sequences if 0.7 <= ratios_by_hand(s, "geometric")[-1] <= 1.4]
        rejected += len(sequences) - len(kept)
        log_probs, experience, places = lay_out(sequences, 14, seed)
        correction = reject(experience, "geometric", 0.7, 1.4)
        value, weights = objective(log_probs, replace(experience, mask=correction.mask), aggregation)
        log_probs, experience, kept_places = lay_out(kept, 14, seed)
        other, other_weights = objective(log_probs, experience, aggregation)
        assert value.item() == pytest.approx(other.item(), abs=1e-6)
        rows = by_sequence(weights, sequences, places)
        of_kept = [row for row, s in zip(rows, sequences, strict=True) if any(s is k for k in kept)]
        assert largest_error(of_kept, by_sequence(other_weights, kept, kept_places)) <= 1e-6
    assert rejected
