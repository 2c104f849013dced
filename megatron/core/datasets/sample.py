"""The interface of every dataset of samples, and the three splits that a run reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from megatron.base.errors import DataError

T = TypeVar("T")
Tokens = npt.NDArray[np.int64]


class SampleDataset(Protocol):
    """Maps a sample number to token ids [seq_length + 1], or int64 [3, seq_length] for instruction data (sft.py).

    A sample depends only on the dataset's seed and the number.
    """

    def __len__(self) -> int:
        """Number of samples."""
        ...

    def __getitem__(self, number: int) -> Tokens:
        """Returns sample `number`, from 0. Raises IndexError past the end and DataError for data that cannot be trained
        on.
        """
        ...


@dataclass(frozen=True)
class Splits(Generic[T]):
    """One value per split."""

    train: T
    valid: T
    test: T

    def items(self) -> list[tuple[str, T]]:
        """Returns (name, value) of each split."""
        return [("train", self.train), ("valid", self.valid), ("test", self.test)]


def check_number(dataset: Any, number: int) -> None:
    """Raises IndexError unless `dataset` has sample `number`."""
    if not 0 <= number < len(dataset):
        raise IndexError(f"sample {number} of a dataset of {len(dataset)}")


def check_ids(tokens: Tokens, vocab_size: int, prefix: str) -> None:
    """Raises DataError unless all ids are below `vocab_size`."""
    # Viewed as unsigned numbers negative ids are huge, so one maximum finds both mistakes.
    if int(tokens.view(np.uint64).max()) >= vocab_size:
        bad = int(tokens[(tokens < 0) | (tokens >= vocab_size)][0])
        raise DataError(
            f"{prefix}.bin holds token id {bad}, outside the vocabulary of {vocab_size}; "
            "it was made with another tokenizer: give that one, or make the dataset again"
        )
