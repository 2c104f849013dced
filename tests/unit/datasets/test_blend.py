"""Blends: parsing, shares at every prefix, places and counts."""

from fractions import Fraction

import numpy as np
import pytest

from megatron.base.errors import ConfigError
from megatron.core.datasets.blend import MAX_PERIOD, Blend, BlendedDataset, parse_blend


def test_parse():
    assert parse_blend(["data/a"], "--data-path") == (["data/a"], None)
    assert parse_blend(["2024"], "--data-path") == (["2024"], None)
    assert parse_blend(["a", "b", "c"], "--data-path") == (["a", "b", "c"], None)
    assert parse_blend(["0.3", "a", "1e-1", "b"], "--data-path") == (["a", "b"], [Fraction(3, 10), Fraction(1, 10)])


@pytest.mark.parametrize(
    "words, message",
    [
        ([], "--data-path has no value"),
        (["0.3", "a", "b"], "--data-path 0.3 a b mixes weights and prefixes"),
        (["a", "0.3"], "mixes weights and prefixes"),
        (["0.3", "a", "b", "0.7"], "mixes weights and prefixes"),
        (["1", "a", "0", "b"], "gives b weight 0; weights must be positive"),
        (["1", "a", "-2", "b"], "gives b weight -2; weights must be positive"),
    ],
)
def test_parse_errors(words, message):
    with pytest.raises(ConfigError, match=message):
        parse_blend(words, "--data-path")


def worst_error(blend, weights, length):
    """Largest distance of a dataset's count from weight x n over all prefixes n."""
    worst, total = 0.0, sum(weights)
    places = np.array([blend.locate(n)[0] for n in range(length)])
    for number, weight in enumerate(weights):
        expected = np.arange(1, length + 1) * float(weight / total)
        worst = max(worst, float(np.abs(np.cumsum(places == number) - expected).max()))
    return worst


CASES = [
    [Fraction(1)],
    [Fraction(1), Fraction(1)],
    [Fraction("0.3"), Fraction("0.7")],
    [Fraction(1, 3), Fraction(1, 7), Fraction(2)],
    # One large and many small: sorting samples by due time would read the small ones all at once.
    [Fraction(1, 2), *[Fraction(1, 80)] * 40],
    [Fraction(w) for w in (1, 2, 4, 8, 16, 32, 64, 128)],
    [Fraction(w) for w in (31, 29, 23, 19, 17, 13, 11, 7, 5, 3, 2, 1, 1, 1)],
]


@pytest.mark.parametrize("weights", CASES)
def test_every_prefix_is_within_one_sample_of_the_weights(weights):
    assert worst_error(Blend.create(weights, 1500), weights, 1500) < 1


def test_random_blends_stay_within_one_sample():
    random = np.random.RandomState(0)
    for _ in range(40):
        weights = [Fraction(int(w)) for w in random.randint(1, 60, random.randint(2, 12)) ** random.randint(1, 4)]
        assert worst_error(Blend.create(weights, 400), weights, 400) < 1, weights


def test_each_dataset_is_read_in_its_own_order_without_gaps():
    weights = [Fraction("0.15"), Fraction("0.5"), Fraction("0.35")]
    blend = Blend.create(weights, 1000)
    read = [[], [], []]
    for number in range(1000):  # 50 periods of 20
        dataset, sample = blend.locate(number)
        assert sample == len(read[dataset])
        read[dataset].append(sample)
        if number % 83 == 0:
            assert blend.counts(number + 1) == [len(samples) for samples in read]
    assert blend.shares == (3, 10, 7) and len(blend.datasets) == 20
    assert blend.counts(1000) == [150, 500, 350]


def test_order_does_not_depend_on_the_length_of_the_run():
    weights = [Fraction(1, 7), Fraction(1, 11), Fraction(1, 13)]
    long, short = Blend.create(weights, 5000), Blend.create(weights, 100)
    assert [long.locate(n) for n in range(100)] == [short.locate(n) for n in range(100)]


def test_odd_weights_are_rounded_to_a_period_that_can_be_computed():
    weights = [Fraction(10**9 + 7), Fraction(998244353), Fraction(1)]
    blend = Blend.create(weights, 20000)
    assert abs(sum(blend.shares) - MAX_PERIOD) <= len(weights) and min(blend.shares) >= 1
    assert worst_error(blend, weights, 20000) < 1.1
    assert len(blend.datasets) == 20000


def test_blended_dataset_reads_the_right_samples():
    class Numbers:
        def __init__(self, base, size):
            self.base, self.size = base, size

        def __len__(self):
            return self.size

        def __getitem__(self, number):
            assert number < self.size
            return np.array([self.base, number])

    blend = Blend.create([Fraction(1), Fraction(3)], 10)
    counts = blend.counts(10)
    dataset = BlendedDataset([Numbers(0, counts[0]), Numbers(1, counts[1])], blend, 10)
    assert len(dataset) == 10
    assert [tuple(dataset[n].tolist()) for n in range(10)] == [blend.locate(n) for n in range(10)]
    with pytest.raises(IndexError, match="sample 10 of a dataset of 10"):
        dataset[10]
