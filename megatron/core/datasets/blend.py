"""Blends several datasets into one order, of which every prefix holds each dataset's share to within one sample.

The order is the earliest-deadline-first schedule of a proportional ("Pfair") task set, S. Baruah et al., "Proportionate
progress", Algorithmica 1996. Let w be the weight of a dataset, with all weights summing to 1. Its count differs by less
than one from w x n at every prefix length n exactly if its k-th sample (k from 0) is read at a position in [floor(k /
w), ceil((k + 1) / w) - 1]. At each position the schedule reads the sample whose window ends first, among those whose
window has begun. Megatron-LM reads the dataset that is furthest behind; with many datasets that rule falls more than
one sample behind.

Weights are exact fractions p / P with a common denominator P, so after P samples all counts are exact and the order
repeats. Therefore only one period is computed and stored, and the position of a sample depends on the weights alone.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from megatron.base.errors import ConfigError
from megatron.core.datasets.sample import SampleDataset, Tokens, check_number

# Weights whose common denominator is larger are rounded to this one. Weights of up to six decimals that sum to 1 keep
# their exact values; the period takes about 1.5 s to compute.
MAX_PERIOD = 1 << 20


def parse_blend(words: Sequence[str], flag: str) -> tuple[list[str], list[Fraction] | None]:
    """Parses a data-path flag into prefixes and their weights; the weights are None if only prefixes are given.

    Accepts `prefix`, `prefix prefix ...` and `weight prefix weight prefix ...`. Raises ConfigError for anything else.
    """
    if not words:
        raise ConfigError(f"{flag} has no value; give a dataset's path without its extension")
    numbers = [_weight(word) for word in words]
    if len(words) == 1 or not any(number is not None for number in numbers):
        return list(words), None
    weights = [number for number in numbers[0::2] if number is not None]
    if len(words) % 2 or len(weights) != len(words) // 2:
        raise ConfigError(
            f"{flag} {' '.join(words)} mixes weights and prefixes; give 'weight prefix weight prefix ...' for all of "
            "them, or prefixes only to weigh each by its size"
        )
    for weight, prefix in zip(weights, words[1::2], strict=True):
        if weight <= 0:
            raise ConfigError(
                f"{flag} gives {prefix} weight {weight}; weights must be positive, remove unread datasets"
            )
    return list(words[1::2]), weights


@dataclass(frozen=True)
class Blend:
    """One period of the order of a blend, or its first part if fewer samples are read.

    `shares` holds the number of samples of each dataset in a period of sum(shares). `datasets` and `samples` hold, for
    each position, which dataset is read and which of its samples of this period.
    """

    shares: tuple[int, ...]
    datasets: npt.NDArray[np.int32]
    samples: npt.NDArray[np.int32]

    @classmethod
    def create(cls, weights: Sequence[Fraction], num_samples: int) -> Blend:
        """Computes the order of the first `num_samples` samples. Weights are positive and need not sum to 1."""
        shares = _integer_shares(weights)
        datasets = _schedule(shares, min(sum(shares), num_samples))
        samples = np.empty(len(datasets), np.int32)
        for number in range(len(shares)):
            places = np.flatnonzero(datasets == number)
            samples[places] = np.arange(len(places), dtype=np.int32)
        return cls(shares, datasets, samples)

    def locate(self, number: int) -> tuple[int, int]:
        """Returns (dataset, sample of that dataset) of sample `number` of the blend."""
        period, place = divmod(number, sum(self.shares))
        dataset = int(self.datasets[place])
        return dataset, period * self.shares[dataset] + int(self.samples[place])

    def counts(self, num_samples: int) -> list[int]:
        """Returns the number of samples of each dataset among the first `num_samples`."""
        periods, remainder = divmod(num_samples, sum(self.shares))
        assert remainder <= len(self.datasets), f"{num_samples} samples of a blend made for {len(self.datasets)}"
        begun = np.bincount(self.datasets[:remainder], minlength=len(self.shares))
        return [periods * share + int(extra) for share, extra in zip(self.shares, begun, strict=True)]


class BlendOrder(Protocol):
    """Maps each sample of a blend to its dataset: `Blend`, or Megatron-LM's order (megatron_blend.py)."""

    def locate(self, number: int) -> tuple[int, int]:
        """Returns (dataset, sample of that dataset) of sample `number` of the blend."""
        ...

    def counts(self, num_samples: int) -> list[int]:
        """Returns the number of samples of each dataset among the first `num_samples`."""
        ...


class BlendedDataset:
    """The samples of several datasets in the order of a blend; dataset i must have blend.counts(num_samples)[i]
    samples.
    """

    def __init__(self, datasets: Sequence[SampleDataset], blend: BlendOrder, num_samples: int) -> None:
        for dataset, count in zip(datasets, blend.counts(num_samples), strict=True):
            assert len(dataset) >= count, f"{len(dataset)} samples where the blend reads {count}"
        self.datasets, self.blend, self.num_samples = list(datasets), blend, num_samples

    def __len__(self) -> int:
        """Number of samples."""
        return self.num_samples

    def __getitem__(self, number: int) -> Tokens:
        """Token ids [seq_length + 1] of one sample."""
        check_number(self, number)
        dataset, sample = self.blend.locate(number)
        return self.datasets[dataset][sample]


def _weight(word: str) -> Fraction | None:
    try:
        return Fraction(word)
    except (ValueError, ZeroDivisionError):
        return None


def _integer_shares(weights: Sequence[Fraction]) -> tuple[int, ...]:
    """Returns integers proportional to `weights`: exact if their sum is at most MAX_PERIOD, otherwise rounded to that
    sum.
    """
    total = sum(weights)
    exact = [weight / total for weight in weights]
    period = math.lcm(*(weight.denominator for weight in exact))
    if period <= MAX_PERIOD:
        return tuple(int(weight * period) for weight in exact)
    # Each dataset gets at least one sample, because the user asked for it. The sum is then the period, near MAX_PERIOD.
    shares = [max(1, round(weight * MAX_PERIOD)) for weight in exact]
    divisor = math.gcd(*shares)
    return tuple(share // divisor for share in shares)


def _schedule(shares: Sequence[int], length: int) -> npt.NDArray[np.int32]:
    """Returns the dataset at each of the first `length` positions. Integer arithmetic gives the same on every
    machine."""
    period = sum(shares)
    order = np.empty(length, np.int32)
    taken = [0] * len(shares)
    ready = [(_deadline(0, share, period), number) for number, share in enumerate(shares)]
    heapq.heapify(ready)
    waiting: list[tuple[int, Any]] = []  # (position where the window begins, entry of `ready`)
    for place in range(length):
        while waiting and waiting[0][0] <= place:
            heapq.heappush(ready, heapq.heappop(waiting)[1])
        number = ready[0][1]
        order[place] = number
        taken[number] += 1
        entry = (_deadline(taken[number], shares[number], period), number)
        begin = taken[number] * period // shares[number]
        if begin <= place + 1:
            heapq.heapreplace(ready, entry)
        else:
            heapq.heappop(ready)
            heapq.heappush(waiting, (begin, entry))
    return order


def _deadline(sample: int, share: int, period: int) -> int:
    """Returns the last position in the window of a dataset's `sample`-th sample: ceil((sample + 1) * period / share) -
    1.
    """
    return -(-(sample + 1) * period // share) - 1
