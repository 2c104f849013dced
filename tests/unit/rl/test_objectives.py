"""Objectives, their aggregation and their gradients, against loops over tokens in Python's floats."""

import itertools
import math
from dataclasses import replace

import pytest
import torch

from megatron.rl.aggregation import aggregation_weights, local_counts
from megatron.rl.divergence import KL_ESTIMATORS
from megatron.rl.objectives import POLICY_LOSSES, ClipRange, as_token_weights, policy_objective
from tests.unit.rl.batches import SEEDS, by_sequence, draw, floats, largest_error, lay_out

CLIP = ClipRange(0.2, 0.28)
DUAL = ClipRange(0.2, 0.28, dual=1.5)
BETA, MAX_LENGTH = 0.3, 12
CASES = list(itertools.product(POLICY_LOSSES, ("token", "sequence", "constant"), (CLIP, DUAL)))


def surrogate(ratio, advantage, clip):
    """PPO's loss of a token and its derivative by the logarithm of the ratio, case by case."""
    if advantage >= 0:
        return (-advantage * ratio, -advantage * ratio) if ratio <= 1 + clip.high else (-advantage * (1 + clip.high), 0)
    if clip.dual is not None and ratio > clip.dual:
        return -advantage * clip.dual, 0
    return (-advantage * ratio, -advantage * ratio) if ratio >= 1 - clip.low else (-advantage * (1 - clip.low), 0)


def loss_of_token(name, sequence, token, clip):
    """The policy loss of a token, and the derivative that the objective shall have by its log-probability."""
    log_prob, old, _, _, advantage, _ = token
    ratio = math.exp(log_prob - old)
    if name == "ppo":
        return surrogate(ratio, advantage, clip)
    if name == "gspo":
        differences = [lp - o for lp, o, _, _, _, m in sequence if m]
        return surrogate(math.exp(sum(differences) / len(differences)), advantage, clip)
    factor = min(max(ratio, 1 - clip.low), 1 + clip.high) if name == "cispo" else 1.0
    return -factor * advantage * log_prob, -factor * advantage


def divergence_of_token(name, log_prob, reference):
    """The value and the derivative of an estimator."""
    d = log_prob - reference
    values = {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d, "k3+": math.exp(-d) - 1 + d}
    slopes = {"k1": 1.0, "k2": d, "k3": 1 - math.exp(-d), "k3+": d}
    return values[name], slopes[name]


def by_hand(sequences, name, aggregation, clip, estimator, correction=lambda n, t: 1.0):
    """The objective of the sequences and its derivative by each log-probability."""
    lengths = [sum(token[5] for token in floats(sequence)) for sequence in sequences]
    count = sum(1 for length in lengths if length)
    value, slopes = 0.0, []
    for number, sequence in enumerate(map(floats, sequences)):
        slopes.append([])
        for at, token in enumerate(sequence):
            if not token[5]:
                slopes[-1].append(0.0)
                continue
            denominator = {
                "token": sum(lengths),
                "sequence": lengths[number] * count,
                "constant": MAX_LENGTH * count,
            }[aggregation]
            loss, slope = loss_of_token(name, sequence, token, clip)
            kl, kl_slope = divergence_of_token(estimator, token[0], token[3])
            value += (correction(number, at) * loss + BETA * kl) / denominator
            slopes[-1].append((correction(number, at) * slope + BETA * kl_slope) / denominator)
    return value, slopes


def ours(log_probs, experience, name, aggregation, clip, estimator, totals=None, correction=None):
    totals = local_counts(experience) if totals is None else totals
    weights = aggregation_weights(experience, aggregation, totals, MAX_LENGTH)
    return as_token_weights(
        lambda leaf: policy_objective(
            leaf,
            experience,
            POLICY_LOSSES[name],
            clip,
            weights,
            correction=correction,
            divergence=KL_ESTIMATORS[estimator],
            divergence_coefficient=BETA,
        ),
        log_probs,
    )


@pytest.mark.parametrize(("name", "aggregation", "clip"), CASES)
def test_value_and_gradient_are_those_of_the_formula(name, aggregation, clip):
    estimators = itertools.cycle(KL_ESTIMATORS)
    for seed in SEEDS:
        sequences, estimator = draw(seed), next(estimators)
        log_probs, experience, places = lay_out(sequences, 14, seed)
        value, weights = ours(log_probs, experience, name, aggregation, clip, estimator)
        expected, slopes = by_hand(sequences, name, aggregation, clip, estimator)
        assert value.item() == pytest.approx(expected, abs=1e-6)
        slopes = [[-slope for slope in row] for row in slopes]
        assert largest_error(by_sequence(weights, sequences, places), slopes) <= 1e-6
        assert weights[experience.mask == 0].count_nonzero() == 0


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_each_estimator_of_the_divergence(estimator):
    for seed in SEEDS:
        sequences = draw(seed)
        log_probs, experience, places = lay_out(sequences, 14, seed)
        value, weights = ours(log_probs, experience, "ppo", "token", CLIP, estimator)
        expected, slopes = by_hand(sequences, "ppo", "token", CLIP, estimator)
        assert value.item() == pytest.approx(expected, abs=1e-6)
        slopes = [[-slope for slope in row] for row in slopes]
        assert largest_error(by_sequence(weights, sequences, places), slopes) <= 1e-6


def test_the_correction_weighs_the_loss_and_not_the_divergence():
    sequences = draw(1)
    log_probs, experience, places = lay_out(sequences, 14)
    correction = torch.rand(log_probs.shape, generator=torch.Generator().manual_seed(1)) + 0.5
    factors = by_sequence(correction, sequences, places)
    value, weights = ours(log_probs, experience, "ppo", "token", CLIP, "k3", correction=correction)
    expected, slopes = by_hand(sequences, "ppo", "token", CLIP, "k3", lambda n, t: factors[n][t])
    assert value.item() == pytest.approx(expected, abs=1e-6)
    slopes = [[-slope for slope in row] for row in slopes]
    assert largest_error(by_sequence(weights, sequences, places), slopes) <= 1e-6


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_ratios_are_limited(name):
    """Far from the old parameters a ratio is neither infinite nor zero, and the objective stays finite."""
    for distance in (-200.0, 200.0):
        log_probs, experience, _ = lay_out(draw(1), 14)
        inside = experience.mask > 0
        log_probs = torch.where(inside, experience.old + distance, log_probs)
        ratio = POLICY_LOSSES[name].ratio(log_probs, experience)[inside]
        assert torch.allclose(ratio.log(), torch.tensor(math.copysign(20.0, distance)))


@pytest.mark.parametrize(("name", "aggregation", "clip"), CASES)
class TestLayouts:
    def test_one_sequence_per_row_or_packed(self, name, aggregation, clip):
        for seed in SEEDS:
            sequences, found = draw(seed), []
            for width in (9, 14, 60):
                log_probs, experience, places = lay_out(sequences, width, seed + width)
                value, weights = ours(log_probs, experience, name, aggregation, clip, "k3")
                found.append((value.item(), by_sequence(weights, sequences, places)))
            assert len(log_probs) < len(sequences), "nothing was packed"
            for value, weights in found[1:]:
                assert value == pytest.approx(found[0][0], abs=1e-6)
                assert largest_error(weights, found[0][1]) <= 1e-6

    def test_replicas_with_summed_denominators(self, name, aggregation, clip):
        for seed in SEEDS:
            sequences = draw(seed)
            log_probs, experience, places = lay_out(sequences, 14, seed)
            whole, weights = ours(log_probs, experience, name, aggregation, clip, "k3")
            expected = by_sequence(weights, sequences, places)
            for cut in (1, 3, 6):
                parts = [(part, *lay_out(part, 14, seed)) for part in (sequences[:cut], sequences[cut:])]
                totals = sum(local_counts(part[2]) for part in parts)
                found = [ours(part[1], part[2], name, aggregation, clip, "k3", totals) for part in parts]
                assert sum(value.item() for value, _ in found) == pytest.approx(whole.item(), abs=1e-6)
                rows = [by_sequence(w, part[0], part[3]) for (_, w), part in zip(found, parts, strict=True)]
                assert largest_error(rows[0] + rows[1], expected) <= 1e-6

    def test_microbatches_of_rows(self, name, aggregation, clip):
        """Rows may be computed in parts if no sequence lies in two of them; numbers of sequences stay as they are."""
        for seed in SEEDS:
            log_probs, experience, _ = lay_out(draw(seed), 14, seed)
            totals = local_counts(experience)
            whole, weights = ours(log_probs, experience, name, aggregation, clip, "k3", totals)
            total, rows = 0.0, []
            for first in range(0, len(log_probs), 2):
                cut = slice(first, first + 2)
                fields = ("old", "sampler", "reference", "advantages", "mask", "sequences")
                part = replace(experience, **{field: getattr(experience, field)[cut] for field in fields})
                value, part_weights = ours(log_probs[cut], part, name, aggregation, clip, "k3", totals)
                total += value.item()
                rows.append(part_weights)
            assert total == pytest.approx(whole.item(), abs=1e-6)
            assert (torch.cat(rows) - weights).abs().max() <= 1e-6


def test_a_batch_without_a_token_has_the_objective_zero():
    log_probs, experience, _ = lay_out(draw(1), 14)
    experience = replace(experience, mask=torch.zeros_like(experience.mask))
    for aggregation in ("token", "sequence", "constant"):
        value, weights = ours(log_probs, experience, "gspo", aggregation, CLIP, "k3")
        assert value.item() == 0.0 and weights.count_nonzero() == 0


def test_token_weights_give_the_gradient_of_the_parameters():
    """Autograd through a model and the objective at once, and the training pass with constant weights, agree."""
    generator = torch.Generator().manual_seed(5)
    for name in POLICY_LOSSES:
        _, experience, _ = lay_out(draw(3), 14)
        b, s = experience.mask.shape
        inputs = torch.randn(b, s, 6, generator=generator)
        tokens = torch.randint(0, 11, (b, s, 1), generator=generator)
        weight = (torch.randn(11, 6, generator=generator) * 0.5).requires_grad_()

        def log_probs(weight=weight, inputs=inputs, tokens=tokens):
            return (inputs @ weight.T).log_softmax(-1).gather(-1, tokens).squeeze(-1)

        experience = replace(experience, old=log_probs().detach() + 0.2 * experience.advantages.sign())
        aggregation = aggregation_weights(experience, "sequence", local_counts(experience))

        def objective(leaf, experience=experience, name=name, aggregation=aggregation):
            return policy_objective(leaf, experience, POLICY_LOSSES[name], CLIP, aggregation)

        (expected,) = torch.autograd.grad(objective(log_probs()), weight)
        with torch.no_grad():
            _, weights = as_token_weights(objective, log_probs())
        (gradient,) = torch.autograd.grad((-log_probs() * weights).sum(), weight)
        assert expected.abs().max() > 1e-3
        assert (gradient - expected).abs().max() <= 1e-6
