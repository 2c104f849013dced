"""Instruction data: samples made of whole conversations, of which some tokens are trained on.

A dataset is two `.bin/.idx` pairs: PREFIX with the tokens, int32, and PREFIX_mask with one byte per token, 1 where the
model learns to write it. Sequence i of both is conversation i. `tools/preprocess_sft.py` writes them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.base.errors import DataError
from megatron.base.log import get_logger
from megatron.core.datasets.index_cache import cached_arrays, index_inputs
from megatron.core.datasets.indexed import IndexedDataset
from megatron.core.datasets.packing import best_fit_decreasing
from megatron.core.datasets.sample import Tokens, check_ids, check_number

LOGGER = get_logger(__name__)
TRAINED, PADDING = 1, 2  # marks of a sample's tokens
TOKEN_DTYPE, MASK_DTYPE = np.dtype("<i4"), np.dtype("u1")
# This version is part of every cache entry's name: raise it when the meaning of the arrays changes.
INDEX_VERSION = 1


def mask_prefix(prefix: str | Path) -> str:
    """Returns the prefix of the mask of the dataset at `prefix`."""
    return f"{prefix}_mask"


def template_path(prefix: str | Path) -> Path:
    """Returns the path of the dataset's chat template, which exists if it differs from its tokenizer's."""
    return Path(f"{prefix}.jinja")


def template_of(prefixes: Iterable[str], requested: str | None) -> str | None:
    """Returns the text of the chat template with which all these datasets were made; None for the tokenizer's own.

    `requested` is the text of the template that the run asks for, if any. Raises DataError if they differ.
    """
    sources: dict[str | None, str] = {requested: "--chat-template"} if requested is not None else {}
    for prefix in prefixes:
        path = template_path(prefix)
        try:
            text = path.read_text(encoding="utf-8") if path.exists() else None
        except (OSError, ValueError) as error:
            raise DataError(f"{path} cannot be read as text: {error}; make the dataset again") from error
        if text is not None or requested is None:
            sources.setdefault(text, str(path if text is not None else f"{prefix} (the tokenizer's own)"))
    if len(sources) > 1:
        raise DataError(
            f"conversations in different chat templates: {' and '.join(sources.values())}; a model learns one, so make "
            "the datasets with the same"
        )
    return next(iter(sources), None)


class Conversations:
    """The two pairs of an instruction dataset. Raises DataError if one is missing or does not fit the other."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.tokens = IndexedDataset(prefix)
        if not os.path.isfile(f"{mask_prefix(prefix)}.idx"):
            raise DataError(
                f"{mask_prefix(prefix)}.idx does not exist, so {prefix} is not an instruction dataset; make one with "
                "tools/preprocess_sft.py"
            )
        self.mask = IndexedDataset(mask_prefix(prefix))
        self.sequence_lengths = self.tokens.sequence_lengths
        for part, dtype in ((self.tokens, TOKEN_DTYPE), (self.mask, MASK_DTYPE)):
            if part.dtype != dtype:
                raise DataError(
                    f"{part.prefix} holds {part.dtype} values where an instruction dataset has {dtype}; "
                    "make it again with tools/preprocess_sft.py"
                )
        if not np.array_equal(self.sequence_lengths, self.mask.sequence_lengths):
            raise DataError(
                f"{self.mask.prefix} is not the mask of {prefix}: the conversations have other lengths "
                f"({len(self.mask)} there, {len(self)} here); make both again with tools/preprocess_sft.py"
            )

    def __len__(self) -> int:
        """Number of conversations."""
        return len(self.tokens)

    def marks(self, conversation: int) -> npt.NDArray[np.uint8]:
        """Returns 1 for each token that is trained on and 0 otherwise. Raises DataError for another value."""
        marks: npt.NDArray[np.uint8] = self.mask.get(conversation)
        if marks.size and marks.max() > 1:
            raise DataError(
                f"{self.mask.bin_path} is damaged: conversation {conversation} has mark {marks.max()}, which is "
                "neither 0 nor 1; make the dataset again with tools/preprocess_sft.py"
            )
        return marks


class SFTDataset:
    """Maps a sample number to int64 [3, seq_length], from the conversations [first, last) of a dataset.

    Row 0 holds token ids, 0 in the padding. Row 1 is TRAINED where a token is to be predicted from those before it,
    PADDING in the padding, and 0 elsewhere. Row 2 holds the number of the conversation in the sample; the padding has a
    number of its own.

    An epoch reads every conversation once. With `packing` a sample holds as many conversations as best-fit-decreasing
    places there, otherwise one. Conversations longer than `seq_length` are skipped, which is logged. `order`,
    `num_samples` (None: one epoch) and `cache` are as for GPTDataset, and so is the rule that sample n depends only on
    (seed, n).
    """

    def __init__(
        self,
        conversations: Conversations,
        first: int,
        last: int,
        *,
        name: str,
        num_samples: int | None,
        seq_length: int,
        seed: int,
        vocab_size: int,
        packing: bool,
        order: str = "single",
        cache: Path | None = None,
    ) -> None:
        if not 0 <= first < last <= len(conversations):
            raise DataError(
                f"conversations {first} to {last} of {conversations.prefix}, which has {len(conversations)}"
            )
        self.conversations, self.name, self.seq_length, self.vocab_size = conversations, name, seq_length, vocab_size
        numbers, lengths = _that_fit(conversations, first, last, name, seq_length)
        source, where = conversations.tokens.idx_path, {"first": first, "last": last, "seq_length": seq_length}
        packed = cached_arrays(
            cache,
            f"SFTDataset-{name}-packing",
            ("members", "starts"),
            index_inputs(source, version=INDEX_VERSION, packing=packing, **where),
            lambda: pack(lengths, seq_length, packing),
        )
        self.members, self.starts = packed["members"], packed["starts"]
        samples = self.epoch_samples = len(self.starts) - 1
        self.num_samples = samples if num_samples is None else num_samples
        epochs = 1 if order == "cyclic" else max(1, -(-self.num_samples // samples))
        drawn = cached_arrays(
            cache,
            f"SFTDataset-{name}-order",
            ("order", "shuffle"),
            index_inputs(source, version=INDEX_VERSION, samples=samples, epochs=epochs, seed=seed, **where),
            lambda: draw_epochs(numbers, lengths, samples, epochs, seed),
        )
        self.order, self.shuffle = drawn["order"], drawn["shuffle"]
        tokens = int(lengths.sum())
        self.efficiency = tokens / (samples * seq_length)
        LOGGER.info(
            "%s: an epoch of %s is %d conversations with %d tokens in %d samples of %d; packing efficiency %.2f %%",
            *(name, conversations.prefix, len(numbers), tokens, samples, seq_length, 100 * self.efficiency),
        )

    def __len__(self) -> int:
        """Number of samples."""
        return self.num_samples

    def __getitem__(self, number: int) -> Tokens:
        """One sample, [3, seq_length]."""
        check_number(self, number)
        cycle, place = divmod(number, self.epoch_samples)
        epoch = cycle % len(self.order)
        sample = int(self.shuffle[epoch, place])
        start, stop = self.starts[sample : sample + 2].tolist()
        conversations = self.order[epoch, self.members[start:stop]].tolist()
        rows = np.zeros((3, self.seq_length), np.int64)
        at = 0
        for count, conversation in enumerate(conversations):
            tokens = self.conversations.tokens.get(conversation)
            end = at + len(tokens)
            rows[0, at:end] = tokens
            rows[1, at + 1 : end] = self.conversations.marks(conversation)[1:]
            rows[2, at:end] = count
            at = end
        rows[1, at:], rows[2, at:] = PADDING, len(conversations)
        check_ids(rows[0], self.vocab_size, self.conversations.prefix)
        return rows


def _that_fit(
    conversations: Conversations, first: int, last: int, name: str, seq_length: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Returns numbers and lengths of the conversations [first, last) that have tokens and fit in a sample."""
    lengths = np.asarray(conversations.sequence_lengths[first:last], np.int64)
    fit = np.flatnonzero((lengths > 0) & (lengths <= seq_length))
    if not len(fit):
        raise DataError(
            f"none of the {last - first} conversations of {conversations.prefix} for {name} fits in --seq-length "
            f"{seq_length}: the shortest has {lengths.min()} tokens; raise it, or make the dataset with --truncate"
        )
    if longer := int((lengths > seq_length).sum()):
        LOGGER.info(
            "%s: %d of %d conversations of %s are longer than --seq-length %d and are skipped",
            *(name, longer, last - first, conversations.prefix, seq_length),
        )
    return first + fit, lengths[fit]


def pack(lengths: npt.NDArray[np.int64], seq_length: int, packing: bool) -> dict[str, npt.NDArray[Any]]:
    """Assigns conversations to samples by their lengths; conversations of equal length are interchangeable.

    `members` [n] holds positions in falling order of length, sample by sample; `starts` [samples + 1] says that sample
    j has the members [starts[j], starts[j + 1]).
    """
    bins = best_fit_decreasing(-np.sort(-lengths), seq_length) if packing else np.arange(len(lengths))
    starts = np.concatenate([[0], np.cumsum(np.bincount(bins))])
    return {"members": np.argsort(bins, kind="stable").astype(_index_type(len(bins))), "starts": starts}


def draw_epochs(
    numbers: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64], samples: int, epochs: int, seed: int
) -> dict[str, npt.NDArray[Any]]:
    """Draws the conversations and the sample order of each epoch from (seed, epoch number) alone.

    `order` [epochs, n] holds conversation numbers in falling order of length, with equal lengths shuffled: so
    conversations share samples with others in every epoch, while the number of samples stays. `shuffle` [epochs,
    samples] holds the sample that is read i-th.
    """
    kind = _index_type(int(numbers.max()))
    order, shuffle = np.empty((epochs, len(numbers)), kind), np.empty((epochs, samples), kind)
    for epoch in range(epochs):
        # numpy guarantees that RandomState's streams never change, so an upgrade during a run keeps the order.
        random = np.random.RandomState(np.random.MT19937(np.random.SeedSequence([seed, epoch])))
        drawn = random.permutation(len(numbers))
        order[epoch] = numbers[drawn[np.argsort(-lengths[drawn], kind="stable")]]
        shuffle[epoch] = random.permutation(samples)
    return {"order": order, "shuffle": shuffle}


def _index_type(largest: int) -> type[np.signedinteger[Any]]:
    """Returns int32 if it is wide enough, because it needs half the memory and disk space."""
    return np.int64 if largest >= 2**31 else np.int32
