import math

import pytest
import torch

from megatron.base.errors import ConfigError
from megatron.core.inference.engine.sampling import Draws, Sampling, choose, probabilities

VOCAB = 40


@pytest.fixture
def logits():
    return torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(5)) * 2


def reference(row, temperature=1.0, top_k=0, top_p=1.0):
    """The definition, token by token in plain Python."""
    weights = {i: math.exp(x / temperature) for i, x in enumerate(row.double().tolist())}
    order = sorted(weights, key=weights.get, reverse=True)
    if top_k:
        order = order[:top_k]
    total, kept, reached = sum(weights[i] for i in order), [], 0.0
    for i in order:
        if reached >= top_p:
            break
        kept.append(i)
        reached += weights[i] / total
    total = sum(weights[i] for i in kept)
    return torch.tensor([weights[i] / total if i in kept else 0.0 for i in range(len(weights))], dtype=torch.float64)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.7},
        {"temperature": 3.0},
        {"top_k": 1},
        {"top_k": 7},
        {"top_k": VOCAB + 5},
        {"top_p": 0.5},
        {"top_p": 1e-9},
        {"temperature": 1.7, "top_k": 12, "top_p": 0.8},
    ],
)
def test_the_distribution_is_the_defined_one(logits, options):
    expected = torch.stack([reference(row, **options) for row in logits])
    found = probabilities(logits, Sampling(**options))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    assert torch.equal(found > 0, expected > 0)


def test_top_p_keeps_the_token_that_reaches_it():
    logits = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log()
    for top_p, kept in ((0.5, 1), (0.51, 2), (0.75, 2), (0.76, 3)):
        assert int((probabilities(logits, Sampling(top_p=top_p)) > 0).sum()) == kept, top_p


def test_draws_follow_the_distribution(logits):
    """Chi-squared of 40,000 draws: the mean is the degrees of freedom, and 6 standard deviations above it is never
    seen."""
    sampling, count = Sampling(temperature=1.4, top_k=20, top_p=0.95), 40_000
    expected = probabilities(logits[:1], sampling)[0] * count
    draws = torch.rand(count, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    chosen = choose(logits[:1].expand(count, -1), sampling, draws)
    seen = torch.bincount(chosen, minlength=VOCAB)
    assert int(seen[expected == 0].sum()) == 0
    freedom = int((expected > 0).sum()) - 1
    statistic = float(((seen - expected) ** 2 / expected)[expected > 0].sum())
    assert freedom - 6 * math.sqrt(2 * freedom) < statistic < freedom + 6 * math.sqrt(2 * freedom)


def test_every_draw_falls_on_a_token_that_is_kept():
    logits = torch.full((1, 50), -30.0)
    logits[0, [3, 20]] = 1.0
    sampling = Sampling(top_k=2)
    for draw, token in ((0.0, 3), (0.5 - 1e-12, 3), (0.5, 20), (1.0 - 2**-53, 20)):
        assert choose(logits, sampling, torch.tensor([draw], dtype=torch.float64)).tolist() == [token]


def test_the_smallest_temperature_is_greedy(logits):
    draws = torch.full((3,), 0.999, dtype=torch.float64)
    for temperature in (1e-3, 1e-30, 1e-300):
        cold = choose(logits, Sampling(temperature=temperature), draws)
        assert torch.equal(cold, choose(logits, Sampling(temperature=0.0), None))


def test_half_precision_logits_are_taken_as_they_are(logits):
    low = logits.bfloat16()
    assert torch.equal(probabilities(low, Sampling(top_p=0.9)), probabilities(low.double(), Sampling(top_p=0.9)))


def test_a_sequence_draws_from_its_seed_alone():
    together, alone = Draws([5, 9, 5]), Draws([9])
    for _ in range(4):
        first, second, third = together.next().tolist()
        assert first == third != second == alone.next().item()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.1}, "--temperature -0.1"),
        ({"temperature": math.inf}, "--temperature inf"),
        ({"temperature": math.nan}, "--temperature nan"),
        ({"top_k": -1}, "--top-k -1"),
        ({"top_p": 0.0}, "--top-p 0 "),
        ({"top_p": 1.01}, "--top-p 1.01"),
        ({"temperature": 0.0, "top_k": 3}, "no effect at --temperature 0"),
        ({"temperature": 0.0, "top_p": 0.9}, "no effect at --temperature 0"),
    ],
)
def test_values_out_of_range_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        Sampling(**options)
