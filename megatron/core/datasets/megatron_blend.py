"""Megatron-LM's order of the samples of several datasets: at each place the dataset that is furthest behind.

Dataset i with share w[i] has given c[i] samples before place n. The next one comes from the dataset with the largest
w[i] * max(n, 1) - c[i], the first of them where several are equal. Which are equal depends on rounding, so this is done
in float64, product and difference each rounded, as Megatron-LM's helper is on x86-64 processors. (Elsewhere its compiler
may fuse the two, and where shares are equal its order may then be another one.) Described from the behaviour of
BlendedDataset, BlendedMegatronDatasetBuilder and the helper build_blending_indices of megatron/core/datasets, core 0.12
to 0.20, which agree.

[Note: places side by side] Each place depends on the one before, which is slow to compute one by one in Python. So the
order is cut into segments that are computed side by side, from a guess of the counts at the start of each. A dataset that
was guessed too far behind or ahead is soon made up for, so most segments end with the right counts although they began
with wrong ones. Where a segment began with other counts than the one before it ended with, it is computed again with
those, until all fit together; then every place follows from the one before, whatever was guessed. Two rounds are usual.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

SURPLUS = 0.005  # by which each dataset is built larger than its share
MOST_SEGMENTS, SHORTEST_SEGMENT = 1024, 1024
Counts = npt.NDArray[np.float64]


def normalize(weights: Sequence[float]) -> list[float]:
    """`weights` over their sum, in float64."""
    array = np.array(weights, np.float64)
    return [float(share) for share in array / np.sum(array)]


def blend_sizes(shares: Sequence[float], num_samples: int) -> tuple[int, list[int]]:
    """(samples of the blend, samples that each dataset is built for), when `num_samples` are asked for.

    Every dataset's part is rounded up, so the blend is a few samples longer than what was asked for.
    """
    parts = [math.ceil(num_samples * share) for share in shares]
    return sum(parts), [math.ceil(part * (1 + SURPLUS)) for part in parts]


@dataclass(frozen=True)
class FurthestBehind:
    """Of `members` datasets, which is read at each place, int16, and which of its samples, int32 or int64; both [N]."""

    members: int
    datasets: npt.NDArray[np.int16]
    samples: npt.NDArray[np.signedinteger]

    def locate(self, number: int) -> tuple[int, int]:
        """(dataset, sample of that dataset) of sample `number` of the blend."""
        return int(self.datasets[number]), int(self.samples[number])

    def counts(self, num_samples: int) -> list[int]:
        """How many samples of each dataset are among the first `num_samples`."""
        return [int(count) for count in np.bincount(self.datasets[:num_samples], minlength=self.members)]


def furthest_behind(shares: Sequence[float], num_samples: int) -> dict[str, npt.NDArray[Any]]:
    """The arrays of FurthestBehind for `num_samples` samples. Takes about 0.3 s per million, more above 100 datasets."""
    datasets = _choose(np.array(shares, np.float64), num_samples)
    samples = np.empty(num_samples, np.int32 if num_samples < 2**31 else np.int64)
    for number in range(len(shares)):
        places = np.flatnonzero(datasets == number)
        samples[places] = np.arange(len(places))
    return {"datasets": datasets, "samples": samples}


def _choose(shares: Counts, num_samples: int) -> npt.NDArray[np.int16]:
    """The dataset at each place; see [Note: places side by side]."""
    length = max(SHORTEST_SEGMENT, 16 * len(shares), -(-num_samples // MOST_SEGMENTS))
    firsts = np.arange(0, num_samples, length)
    chosen = np.empty((len(firsts), length), np.int16)
    begins = _guess(shares, firsts)
    wrong = np.arange(len(firsts))
    while wrong.size:
        ends = _walk(shares, firsts[wrong], begins[:, wrong], chosen, wrong)
        if wrong[-1] == len(firsts) - 1:
            wrong, ends = wrong[:-1], ends[:, :-1]
        differs = (begins[:, wrong + 1] != ends).any(axis=0)
        begins[:, wrong[differs] + 1] = ends[:, differs]
        wrong = wrong[differs] + 1
    return chosen.reshape(-1)[:num_samples]


def _guess(shares: Counts, places: npt.NDArray[np.integer]) -> Counts:
    """Counts [datasets, places] before each place: shares of it, rounded so that they sum to it."""
    exact = shares[:, None] * places
    counts = np.floor(exact)
    by_remainder = (counts - exact).argsort(axis=0).argsort(axis=0)
    return counts + (by_remainder < places - counts.sum(axis=0))


def _walk(
    shares: Counts,
    firsts: npt.NDArray[np.integer],
    begins: Counts,
    chosen: npt.NDArray[np.int16],
    rows: npt.NDArray[Any],
) -> Counts:
    """Fill the rows `rows` of `chosen`, from place `firsts` and counts `begins` on; returns the counts behind them."""
    counts, columns = begins.copy(), np.arange(len(rows))
    for step in range(chosen.shape[1]):
        behind = shares[:, None] * np.maximum(firsts + step, 1)
        behind -= counts
        found = behind.argmax(axis=0)
        counts[found, columns] += 1
        chosen[rows, step] = found
    return counts
