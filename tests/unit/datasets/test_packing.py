"""Best-fit-decreasing: the same as the rule written out, how full samples get, and how long it takes."""

import time

import numpy as np
import pytest

from megatron.core.datasets.packing import best_fit_decreasing


def falling(lengths):
    return -np.sort(-np.asarray(lengths, np.int64))


def contents(bins, lengths):
    """What is in each bin, without regard to the bins' numbers."""
    return sorted(tuple(lengths[bins == number].tolist()) for number in range(bins.max() + 1))


def slow(lengths, capacity):
    """One item after the other into the bin with the least space that is enough."""
    space, bins = [], []
    for length in lengths.tolist():
        fits = [number for number, left in enumerate(space) if left >= length]
        if not fits:
            space.append(capacity)
            fits = [len(space) - 1]
        best = min(fits, key=lambda number: space[number])
        space[best] -= length
        bins.append(best)
    return np.array(bins)


@pytest.mark.parametrize("capacity", [1, 2, 7, 30, 100])
@pytest.mark.parametrize("seed", range(6))
def test_is_best_fit_decreasing(capacity, seed):
    random = np.random.RandomState(seed)
    lengths = falling(random.randint(1, capacity + 1, random.randint(1, 300)))
    if seed % 2:  # many short ones: bins take several of a length
        lengths = falling(np.minimum(lengths, max(1, capacity // 3)))
    bins = best_fit_decreasing(lengths, capacity)
    assert len(bins) == len(lengths) and set(bins.tolist()) == set(range(bins.max() + 1))
    assert np.bincount(bins, lengths).max() <= capacity
    # Which of the bins with equal space is taken cannot change how full the bins get.
    assert sorted(np.bincount(bins, lengths)) == sorted(np.bincount(slow(lengths, capacity), lengths))


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([5], [(5,)]),
        ([10, 10], [(10,), (10,)]),
        ([4, 4, 4], [(4,), (4, 4)]),
        ([6, 5, 4, 3, 2], [(5, 3, 2), (6, 4)]),
        ([7, 6, 3, 3, 1], [(6, 3, 1), (7, 3)]),
    ],
)
def test_by_hand(lengths, expected):
    bins = best_fit_decreasing(np.array(lengths, np.int64), 10)
    assert contents(bins, np.array(lengths)) == expected


def test_nothing_to_pack():
    assert len(best_fit_decreasing(np.zeros(0, np.int64), 10)) == 0


def chat_lengths(count, capacity, seed=0):
    """Log-normal, as lengths of conversations are: median 250 tokens, one in a hundred above 2,500."""
    return falling(np.random.RandomState(seed).lognormal(np.log(250), 1.0, count).astype(np.int64).clip(2, capacity))


@pytest.mark.parametrize("capacity", [1024, 2048, 4096, 8192])
def test_samples_get_at_least_98_percent_full(capacity):
    lengths = chat_lengths(5000, capacity)
    samples = int(best_fit_decreasing(lengths, capacity).max()) + 1
    assert lengths.sum() / (samples * capacity) >= 0.98


def test_long_conversations_get_the_fewest_samples_there_can_be():
    lengths = falling(np.random.RandomState(1).randint(51, 101, 400))  # no two fit together
    assert best_fit_decreasing(lengths, 100).max() + 1 == 400


@pytest.mark.alone
def test_hundreds_of_thousands_take_seconds():
    lengths = chat_lengths(300_000, 8192)
    started = time.monotonic()
    best_fit_decreasing(lengths, 8192)
    assert time.monotonic() - started < 5
