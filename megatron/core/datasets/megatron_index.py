"""Megatron-LM's order of the samples of one dataset: shuffled documents, split into samples that are shuffled, too.

One generator, numpy's RandomState(seed), draws everything in the following order. The sequences [first, last) are
listed once per epoch and shuffled, all epochs together; they are split into consecutive samples that share one token
with their neighbour; the sample numbers are shuffled. If less than 80 % of the last epoch's samples are requested, that
epoch is separate: its documents follow the others and are shuffled among themselves, and so are the samples that begin
after the last one that fits into the other epochs. So the order depends on the number of samples requested.

The seed is the same for every dataset and every split. Described from the behaviour of GPTDataset and the helper
build_sample_idx of megatron/core/datasets, core 0.12 to 0.20, which agree.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron.base.errors import DataError
from megatron.core.datasets.sample_index import Index, SampleIndex

APART_BELOW = 0.80  # share of an epoch's samples
CUT_AT_ONCE = 1 << 22  # documents, so that working memory stays below that of the index


@dataclass(frozen=True)
class MegatronEpochs:
    """The sizes of the index of a dataset of `tokens` tokens.

    `epochs` is the number of passes over its documents. `samples` is the number of samples they hold, at least as many
    as requested. `joint` is the number of samples that are shuffled together: all, unless the last epoch is separate.
    """

    epochs: int
    samples: int
    joint: int

    @classmethod
    def measure(cls, tokens: int, seq_length: int, num_samples: int | None) -> MegatronEpochs:
        """Returns the fewest epochs that hold `num_samples` samples of seq_length + 1 tokens; one epoch if it is None.

        Raises DataError if these hold no sample at all.
        """
        epochs = 1 if num_samples is None or not tokens else max(1, -(-(num_samples * seq_length + 1) // tokens))
        samples = max(0, epochs * tokens - 1) // seq_length
        if not samples:
            raise DataError(
                f"{tokens} tokens hold no sample of --seq-length {seq_length} + 1; use a larger dataset, or give "
                "weights so that it is read several times"
            )
        if num_samples is None or epochs == 1:
            return cls(epochs, samples, samples)
        before_last, per_epoch = ((count * tokens - 1) // seq_length for count in (epochs - 1, 1))
        apart = num_samples - before_last < int(APART_BELOW * per_epoch)
        return cls(epochs, samples, before_last if apart else samples)

    @property
    def last_is_apart(self) -> bool:
        """Whether the last epoch is shuffled separately."""
        return self.joint < self.samples


def build_megatron_index(
    lengths: npt.NDArray[np.int32], first: int, last: int, seq_length: int, plan: MegatronEpochs, seed: int
) -> SampleIndex:
    """Builds the index of the sequences [first, last), of lengths[first:last] tokens, as one long epoch of
    plan.samples.

    Its rows are called document_index, sample_index and shuffle_index in Megatron-LM. This takes about 0.3 s per
    million documents and samples.
    """
    random = np.random.RandomState(seed)
    together = plan.epochs - plan.last_is_apart
    sequences = np.arange(first, last, dtype=np.int32)
    documents = np.tile(sequences, plan.epochs)
    random.shuffle(documents[: together * len(sequences)])
    if plan.last_is_apart:
        random.shuffle(documents[together * len(sequences) :])
    bounds = _cut(lengths, documents, seq_length, plan.samples)
    shuffle: Index = np.arange(plan.samples, dtype=np.int64)
    if plan.samples < 2**31:
        shuffle = shuffle.astype(np.int32)
    random.shuffle(shuffle[: plan.joint])
    random.shuffle(shuffle[plan.joint :])
    return SampleIndex(documents[None], bounds[None], shuffle[None])


def _cut(lengths: npt.NDArray[np.int32], documents: npt.NDArray[np.int32], seq_length: int, samples: int) -> Index:
    """Returns [samples + 1, 2]: (position in `documents`, offset in that document) of every seq_length-th token.

    A token belongs to the first document that ends after it, so never to one without tokens; the very first bound is
    nevertheless at position 0.
    """
    bounds = np.zeros((samples + 1, 2), np.int32 if len(documents) < 2**31 else np.int64)
    tokens, done = 0, 1  # tokens of the documents processed so far, and the number of bounds found
    for place in range(0, len(documents), CUT_AT_ONCE):
        sizes = lengths[documents[place : place + CUT_AT_ONCE]].astype(np.int64)
        ends = tokens + np.cumsum(sizes)
        tokens = int(ends[-1])
        begun = min(samples, (tokens - 1) // seq_length)
        starts = np.arange(done, begun + 1, dtype=np.int64) * seq_length
        position = np.searchsorted(ends, starts, side="right")
        bounds[done : begun + 1, 0] = place + position
        bounds[done : begun + 1, 1] = starts - (ends[position] - sizes[position])
        done = max(done, begun + 1)
    return bounds
