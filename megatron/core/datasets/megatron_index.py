"""Megatron-LM's order of the samples of one dataset: which documents, in which order, cut where, read when.

One generator, numpy's RandomState(seed), draws everything in this sequence. The sequences [first, last) are written
down once per epoch and shuffled, all epochs together; they are cut into samples that neighbour each other and share one
token; the numbers of the samples are shuffled. When less than 80 % of the last epoch's samples are asked for, that epoch
is kept apart: its documents come behind the others and are shuffled by themselves, and so are the samples that begin
behind the last one that fits into the other epochs. So the order depends on how many samples are asked for.

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
    """How much is read of a dataset of `tokens` tokens.

    epochs: passes over its documents. samples: all that they hold, at least as many as were asked for. joint: those
    that are shuffled together, all of them unless the last epoch is kept apart.
    """

    epochs: int
    samples: int
    joint: int

    @classmethod
    def measure(cls, tokens: int, seq_length: int, num_samples: int | None) -> MegatronEpochs:
        """The fewest epochs that hold `num_samples` samples of seq_length + 1 tokens; one epoch when it is None.

        Raises DataError when that is no sample at all.
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
        """Whether the last epoch is shuffled by itself."""
        return self.joint < self.samples


def build_megatron_index(
    lengths: npt.NDArray[np.int32], first: int, last: int, seq_length: int, plan: MegatronEpochs, seed: int
) -> SampleIndex:
    """The index of the sequences [first, last), of lengths[first:last] tokens, as one long epoch of plan.samples.

    Its rows are what Megatron-LM calls document_index, sample_index and shuffle_index. Takes about 0.3 s per million
    documents and samples.
    """
    random = np.random.RandomState(seed)
    together = plan.epochs - plan.last_is_apart
    own = np.arange(first, last, dtype=np.int32)
    documents = np.tile(own, plan.epochs)
    random.shuffle(documents[: together * len(own)])
    if plan.last_is_apart:
        random.shuffle(documents[together * len(own) :])
    bounds = _cut(lengths, documents, seq_length, plan.samples)
    shuffle: Index = np.arange(plan.samples, dtype=np.int64)
    if plan.samples < 2**31:
        shuffle = shuffle.astype(np.int32)
    random.shuffle(shuffle[: plan.joint])
    random.shuffle(shuffle[plan.joint :])
    return SampleIndex(documents[None], bounds[None], shuffle[None])


def _cut(lengths: npt.NDArray[np.int32], documents: npt.NDArray[np.int32], seq_length: int, samples: int) -> Index:
    """[samples + 1, 2]: (position in `documents`, offset in that document) of every seq_length-th token.

    A token belongs to the first document that ends behind it, so never to one without tokens; the very first bound is
    position 0 all the same.
    """
    bounds = np.zeros((samples + 1, 2), np.int32 if len(documents) < 2**31 else np.int64)
    tokens, done = 0, 1  # of the documents before these, and bounds that are known
    for place in range(0, len(documents), CUT_AT_ONCE):
        own = lengths[documents[place : place + CUT_AT_ONCE]].astype(np.int64)
        ends = tokens + np.cumsum(own)
        tokens = int(ends[-1])
        begun = min(samples, (tokens - 1) // seq_length)
        starts = np.arange(done, begun + 1, dtype=np.int64) * seq_length
        position = np.searchsorted(ends, starts, side="right")
        bounds[done : begun + 1, 0] = place + position
        bounds[done : begun + 1, 1] = starts - (ends[position] - own[position])
        done = max(done, begun + 1)
    return bounds
