"""Objectives of preference pairs, against loops in Python's floats."""

import itertools
import math

import pytest
import torch

from megatron.rl.metrics import preference_sums
from megatron.rl.objectives import as_token_weights
from megatron.rl.preferences import PREFERENCE_LOSSES, PreferencePairs, preference_objective
from tests.unit.rl.batches import SEEDS, by_sequence, draw, floats, largest_error, lay_out

PAIRS = [(0, 3), (5, 1), (4, 2)]  # number 6 is in no pair
CASES = list(itertools.product(PREFERENCE_LOSSES, (0.0, 0.1), (0.0, 0.7)))
BETA = 0.4


def sequences_of(seed):
    """Sequences of which each has a token of a response, as responses of a preference data set have."""
    sequences = draw(seed)
    for sequence in sequences:
        sequence["mask"][0] = 1.0
    return sequences


def pairs_of(sequences, width, seed, pairs=PAIRS):
    log_probs, experience, places = lay_out(sequences, width, seed)
    chosen, rejected = torch.tensor(pairs).T
    fields = (experience.reference, experience.mask, experience.sequences, experience.count, chosen, rejected)
    return log_probs, PreferencePairs(*fields), places


def softplus(x):
    return math.log1p(math.exp(x))


def loss_and_slope(name, margin):
    """The loss of a pair, and its derivative by the margin."""
    if name == "ipo":
        return (margin - 0.5 / BETA) ** 2, 2 * (margin - 0.5 / BETA)
    return softplus(-BETA * margin), -BETA / (1 + math.exp(BETA * margin))


def by_hand(sequences, name, smoothing, sft, pairs=PAIRS):
    """The objective and its derivative by each log-probability."""
    tokens = [floats(sequence) for sequence in sequences]
    slopes = [[0.0] * len(row) for row in tokens]
    lengths = [sum(token[5] for token in row) for row in tokens]
    value = 0.0
    for chosen, rejected in pairs:
        margin = 0.0
        for number, sign in ((chosen, 1), (rejected, -1)):
            total_ratio = sum(lp - reference for lp, _, _, reference, _, mask in tokens[number] if mask)
            margin += sign * total_ratio / (1 if name == "sigmoid" else lengths[number])
        (loss, slope), (swapped, swapped_slope) = loss_and_slope(name, margin), loss_and_slope(name, -margin)
        likelihood = sum(token[0] for token in tokens[chosen] if token[5]) / lengths[chosen]
        value += ((1 - smoothing) * loss + smoothing * swapped - sft * likelihood) / len(pairs)
        slope = (1 - smoothing) * slope - smoothing * swapped_slope
        for number, sign in ((chosen, 1), (rejected, -1)):
            for at, token in enumerate(tokens[number]):
                if token[5]:
                    slopes[number][at] += sign * slope / (1 if name == "sigmoid" else lengths[number]) / len(pairs)
                    slopes[number][at] -= (sign > 0) * sft / lengths[number] / len(pairs)
    return value, slopes


def ours(log_probs, pairs, name, smoothing, sft):
    loss = PREFERENCE_LOSSES[name]
    return as_token_weights(
        lambda leaf: preference_objective(
            leaf, pairs, loss, len(PAIRS), beta=BETA, label_smoothing=smoothing, sft_coefficient=sft
        ),
        log_probs,
    )


@pytest.mark.parametrize(("name", "smoothing", "sft"), CASES)
class TestObjective:
    def test_value_and_gradient_are_those_of_the_formula(self, name, smoothing, sft):
        for seed in SEEDS:
            sequences = sequences_of(seed)
            expected, slopes = by_hand(sequences, name, smoothing, sft)
            weights_by_hand = [[-slope for slope in row] for row in slopes]
            for width in (9, 14, 60):
                log_probs, pairs, places = pairs_of(sequences, width, seed)
                value, weights = ours(log_probs, pairs, name, smoothing, sft)
                assert value.item() == pytest.approx(expected, abs=1e-6)
                assert largest_error(by_sequence(weights, sequences, places), weights_by_hand) <= 1e-6
                assert weights[pairs.mask == 0].count_nonzero() == 0

    def test_replicas_with_the_summed_number_of_pairs(self, name, smoothing, sft):
        for seed in SEEDS:
            sequences = sequences_of(seed)
            expected, slopes = by_hand(sequences, name, smoothing, sft)
            value, rows = 0.0, [[0.0] * len(row) for row in slopes]
            for members in (PAIRS[:1], PAIRS[1:]):
                numbers = [number for pair in members for number in pair]
                local = [(numbers.index(chosen), numbers.index(rejected)) for chosen, rejected in members]
                part = [sequences[number] for number in numbers]
                log_probs, pairs, places = pairs_of(part, 14, seed, local)
                part_value, weights = ours(log_probs, pairs, name, smoothing, sft)
                value += part_value.item()
                for number, row in zip(numbers, by_sequence(weights, part, places), strict=True):
                    rows[number] = [-weight for weight in row]
            assert value == pytest.approx(expected, abs=1e-6)
            assert largest_error(rows, slopes) <= 1e-6


def test_sums_of_long_responses_are_exact():
    """A running sum in fp32 over 40,000 tokens has an error of 1e-4 and more."""
    length, generator = 40_000, torch.Generator().manual_seed(1)
    reference = -torch.rand(2, length, generator=generator) * 4
    log_probs = reference + torch.randn(2, length, generator=generator) * 0.3
    chosen, rejected = (log_probs - reference).tolist()
    margin = math.fsum(chosen) - math.fsum(rejected)
    numbers, mask = torch.arange(2)[:, None].expand(2, length), torch.ones(2, length)
    pairs = PreferencePairs(reference, mask, numbers, 2, torch.tensor([0]), torch.tensor([1]))
    sums = preference_sums(log_probs, pairs, beta=1.0)
    assert sums["margin"].item() == pytest.approx(margin, abs=1e-6)
    value = preference_objective(log_probs, pairs, PREFERENCE_LOSSES["sigmoid"], 1, beta=0.1)
    assert value.item() == pytest.approx(softplus(-0.1 * margin), abs=1e-6)


def test_sums_for_the_log():
    for seed in SEEDS:
        sequences = sequences_of(seed)
        log_probs, pairs, _ = pairs_of(sequences, 14, seed)
        sums = {name: value.item() for name, value in preference_sums(log_probs, pairs, BETA).items()}
        rewards = [BETA * sum(t[0] - t[3] for t in floats(sequence) if t[5]) for sequence in sequences]
        assert next(iter(sums)) == "pairs" and sums["pairs"] == 3
        assert sums["chosen"] == pytest.approx(sum(rewards[c] for c, _ in PAIRS), abs=1e-6)
        assert sums["rejected"] == pytest.approx(sum(rewards[r] for _, r in PAIRS), abs=1e-6)
        assert sums["margin"] == pytest.approx(sum(rewards[c] - rewards[r] for c, r in PAIRS), abs=1e-6)
        assert sums["accuracy"] == sum(rewards[c] > rewards[r] for c, r in PAIRS)
