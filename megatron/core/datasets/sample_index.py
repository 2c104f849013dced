"""The three index arrays that split shuffled documents into samples, built without a loop over samples.

An epoch is one pass over the documents. Its documents are shuffled and concatenated; sample j of the epoch is the
tokens [j * seq_length, j * seq_length + seq_length] of that stream, so neighbours share one token: the last label of
one is the first input of the next. Up to seq_length - 1 tokens at an epoch's end are not read in that epoch (another
shuffle leaves out others). The samples of an epoch are then read in shuffled order.

Every epoch is drawn from (seed, epoch) alone. So sample n does not depend on how many samples a run asks for: a longer
run reads the same samples first, and a last, incomplete epoch reads the first part of its own shuffle. Megatron-LM
shuffles all complete epochs together and the last one separately if less than 80 % of it is read; there a change of
--train-iters changes all samples.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron.base.errors import DataError

Index = npt.NDArray[np.int32] | npt.NDArray[np.int64]


@dataclass(frozen=True)
class SampleIndex:
    """The arrays of E epochs of D documents and n samples.

    `documents` [E, D] holds sequence numbers in reading order. `bounds` [E, n + 1, 2] holds the start of sample j
    (which ends with one more token) as (position in `documents`, token offset in it). `shuffle` [E, n] holds the j that
    is read i-th.
    """

    documents: Index
    bounds: Index
    shuffle: Index


@dataclass(frozen=True)
class Epoch:
    """The sizes of an epoch. `passes` is 1 unless the documents together are shorter than one sample."""

    passes: int
    samples: int

    @classmethod
    def measure(cls, tokens: int, seq_length: int) -> Epoch:
        """Returns the epoch of `tokens` tokens, which are repeated until they fill one sample. Raises DataError for
        none.
        """
        if tokens < 1:
            raise DataError("the documents hold no tokens; make the dataset again from text that is not empty")
        passes = -(-(seq_length + 1) // tokens)
        return cls(passes, (passes * tokens - 1) // seq_length)


def build_sample_index(
    lengths: npt.NDArray[np.int32], first: int, last: int, seq_length: int, epochs: int, seed: int
) -> SampleIndex:
    """Builds the index of `epochs` epochs over the sequences [first, last), with token counts lengths[first:last]."""
    sizes = np.asarray(lengths[first:last], dtype=np.int64)
    epoch = Epoch.measure(int(sizes.sum()), seq_length)
    # The file stores lengths in int32, so offsets are below 2**31 and only the number of documents can need int64.
    wide = np.int64 if max(last, epoch.passes * len(sizes), epoch.samples) >= 2**31 else np.int32
    documents = np.empty((epochs, epoch.passes * len(sizes)), wide)
    bounds = np.empty((epochs, epoch.samples + 1, 2), wide)
    shuffle = np.empty((epochs, epoch.samples), wide)
    starts = np.arange(epoch.samples + 1, dtype=np.int64) * seq_length
    for number in range(epochs):
        # numpy guarantees that RandomState's streams never change, so an upgrade during a run keeps the order.
        random = np.random.RandomState(np.random.MT19937(np.random.SeedSequence([seed, number])))
        order = np.concatenate([random.permutation(len(sizes)) for _ in range(epoch.passes)])
        ends = np.cumsum(sizes[order])
        # The first document that ends after a start contains it; empty documents end where they start and contain none.
        position = np.searchsorted(ends, starts, side="right")
        documents[number] = order + first
        bounds[number, :, 0] = position
        bounds[number, :, 1] = starts - (ends[position] - sizes[order[position]])
        shuffle[number] = random.permutation(epoch.samples)
    return SampleIndex(documents, bounds, shuffle)
