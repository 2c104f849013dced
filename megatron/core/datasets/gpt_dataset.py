"""Samples of a fixed number of tokens, taken from shuffled documents regardless of where the documents end."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from megatron.base.errors import DataError
from megatron.base.log import get_logger
from megatron.core.datasets.index_cache import cached_arrays, index_inputs
from megatron.core.datasets.indexed import IndexedDataset
from megatron.core.datasets.megatron_index import MegatronEpochs, build_megatron_index
from megatron.core.datasets.sample import Tokens, check_ids, check_number
from megatron.core.datasets.sample_index import Epoch, SampleIndex, build_sample_index

LOGGER = get_logger(__name__)
# This version is part of every cache entry's name: raise it when the meaning of the arrays changes.
INDEX_VERSION = 1


class GPTDataset:
    """Maps a sample number to token ids [seq_length + 1], int64, from the sequences [first, last) of an indexed
    dataset.

    `order` "single" shuffles documents and samples anew in every epoch; "cyclic" repeats the shuffle of the first
    epoch. `num_samples` may span any number of epochs; None is one epoch. Sample n depends only on (seed, n), see
    sample_index.py. `order` "megatron" is Megatron-LM's order, see megatron_index.py: it also depends on `num_samples`,
    and the dataset has all samples of the epochs that this number requires. `cache` is the folder of stored indices;
    None builds them in memory.

    Every sample's ids are checked against `vocab_size` when it is read, which takes a tenth of the reading time. So a
    dataset made with another tokenizer stops the run with a DataError instead of a failing gather on a device.
    """

    def __init__(
        self,
        indexed: IndexedDataset,
        first: int,
        last: int,
        *,
        name: str,
        num_samples: int | None,
        seq_length: int,
        seed: int,
        vocab_size: int,
        order: str = "single",
        cache: Path | None = None,
    ) -> None:
        if not 0 <= first < last <= len(indexed):
            raise DataError(f"documents {first} to {last} of {indexed.prefix}, which has {len(indexed)}")
        if indexed.dtype.kind not in "iu":
            raise DataError(f"{indexed.prefix} holds {indexed.dtype} values, not token ids; use another dataset")
        tokens = int(np.sum(indexed.sequence_lengths[first:last], dtype=np.int64))
        self.indexed, self.name, self.seq_length, self.vocab_size = indexed, name, seq_length, vocab_size
        where = {"first": first, "last": last, "seq_length": seq_length, "seed": seed}
        build: Callable[[], SampleIndex]
        if order == "megatron":
            plan = MegatronEpochs.measure(tokens, seq_length, num_samples)
            self.epoch, self.num_samples = Epoch(1, plan.samples), plan.samples
            label, sizes = f"GPTDataset-megatron-{name}", vars(plan)
            build = partial(build_megatron_index, indexed.sequence_lengths, first, last, seq_length, plan, seed)
        else:
            self.epoch = Epoch.measure(tokens, seq_length)
            self.num_samples = self.epoch.samples if num_samples is None else num_samples
            epochs = 1 if order == "cyclic" else max(1, -(-self.num_samples // self.epoch.samples))
            label, sizes = f"GPTDataset-{name}", {"epochs": epochs}
            build = partial(build_sample_index, indexed.sequence_lengths, first, last, seq_length, epochs, seed)
        if self.epoch.passes > 1:
            LOGGER.info(
                "%s: the %d documents of %s hold %d tokens, less than one sample of %d; each sample reads them %d "
                "times",
                name,
                last - first,
                indexed.prefix,
                tokens,
                seq_length + 1,
                self.epoch.passes,
            )
        arrays = cached_arrays(
            cache,
            label,
            ("documents", "bounds", "shuffle"),
            index_inputs(indexed.idx_path, version=INDEX_VERSION, **where, **sizes),
            lambda: vars(build()),
        )
        self.index = SampleIndex(**arrays)

    def __len__(self) -> int:
        """Number of samples."""
        return self.num_samples

    def __getitem__(self, number: int) -> Tokens:
        """Token ids [seq_length + 1] of one sample."""
        check_number(self, number)
        cycle, place = divmod(number, self.epoch.samples)
        epoch = cycle % len(self.index.documents)
        sample = int(self.index.shuffle[epoch, place])
        (start, offset), (end, end_offset) = self.index.bounds[epoch, sample : sample + 2].tolist()
        documents = self.index.documents[epoch, start : end + 1].tolist()
        parts = []
        for position, document in enumerate(documents):
            begin = offset if position == 0 else 0
            # The sample's last token is the next one's first.
            stop = end_offset + 1 if position == len(documents) - 1 else None
            parts.append(self.indexed.get(document, begin, None if stop is None else stop - begin))
        tokens = np.concatenate(parts).astype(np.int64)
        check_ids(tokens, self.vocab_size, self.indexed.prefix)
        return tokens
