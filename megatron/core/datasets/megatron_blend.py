"""Megatron-LM's order of the samples of several datasets: each position reads the dataset that is furthest behind.

Dataset i with share w[i] has given c[i] samples before position n. The next sample comes from the dataset with the
largest w[i] * max(n, 1) - c[i], the first of them if several are equal. Ties depend on rounding, so the computation is
done in float64, with multiplication and subtraction each rounded, as in Megatron-LM's helper on x86-64 processors. (On
other processors its compiler may fuse the two operations, so that its order may differ where shares are equal.)
Described from the behaviour of BlendedDataset, BlendedMegatronDatasetBuilder and the helper build_blending_indices of
megatron/core/datasets, core 0.12 to 0.20, which agree.

[Note: positions in parallel] Each position depends on the one before, which is slow to compute one by one in Python. So
the order is split into segments that are computed in parallel, from a guess of the counts at the start of each. A wrong
guess for a dataset is soon compensated, so most segments end with the right counts although they began with wrong ones.
If a segment began with counts other than those with which its predecessor ended, it is computed again from these, until
all segments agree; then every position follows from the one before, independently of the guess. Two rounds are usual.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

SURPLUS = 0.005  # each dataset is built larger than its share by this fraction
MOST_SEGMENTS, SHORTEST_SEGMENT = 1024, 1024
Counts = npt.NDArray[np.float64]


def normalize(weights: Sequence[float]) -> list[float]:
    """Returns `weights` divided by their sum, in float64."""
    array = np.array(weights, np.float64)
    return [float(share) for share in array / np.sum(array)]


def blend_sizes(shares: Sequence[float], num_samples: int) -> tuple[int, list[int]]:
    """Returns (samples of the blend, samples for which each dataset is built) for `num_samples` requested samples.

    Every dataset's part is rounded up, so the blend is a few samples longer than requested.
    """
    parts = [math.ceil(num_samples * share) for share in shares]
    return sum(parts), [math.ceil(part * (1 + SURPLUS)) for part in parts]


@dataclass(frozen=True)
class FurthestBehind:
    """An order of `members` datasets: the dataset (int16) and its sample (int32 or int64) at each position, both
    [N]."""

    members: int
    datasets: npt.NDArray[np.int16]
    samples: npt.NDArray[np.signedinteger]

    def locate(self, number: int) -> tuple[int, int]:
        """Returns (dataset, sample of that dataset) of sample `number` of the blend."""
        return int(self.datasets[number]), int(self.samples[number])

    def counts(self, num_samples: int) -> list[int]:
        """Returns the number of samples of each dataset among the first `num_samples`."""
        return [int(count) for count in np.bincount(self.datasets[:num_samples], minlength=self.members)]


def furthest_behind(shares: Sequence[float], num_samples: int) -> dict[str, npt.NDArray[Any]]:
    """Returns the arrays of FurthestBehind for `num_samples` samples.

    This takes about 0.3 s per million samples, and more with over 100 datasets.
    """
    datasets = _choose(np.array(shares, np.float64), num_samples)
    samples = np.empty(num_samples, np.int32 if num_samples < 2**31 else np.int64)
    for number in range(len(shares)):
        places = np.flatnonzero(datasets == number)
        samples[places] = np.arange(len(places))
    return {"datasets": datasets, "samples": samples}


def _choose(shares: Counts, num_samples: int) -> npt.NDArray[np.int16]:
    """Returns the dataset at each position; see [Note: positions in parallel]."""
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
    """Returns counts [datasets, positions] before each position: proportional shares, rounded to sum to the
    position."""
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
    """Fills the rows `rows` of `chosen`, starting at positions `firsts` with counts `begins`; returns the counts after
    them.
    """
    counts, columns = begins.copy(), np.arange(len(rows))
    for step in range(chosen.shape[1]):
        behind = shares[:, None] * np.maximum(firsts + step, 1)
        behind -= counts
        datasets = behind.argmax(axis=0)
        counts[datasets, columns] += 1
        chosen[rows, step] = datasets
    return counts
