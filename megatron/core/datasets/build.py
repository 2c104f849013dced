"""From data flags to the datasets of training, validation and test."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np

from megatron.config.data import DataConfig
from megatron.config.split import DEFAULT_SPLIT, split_shares
from megatron.core.datasets.blend import Blend, BlendedDataset, parse_blend
from megatron.core.datasets.gpt import GPTDataset
from megatron.core.datasets.indexed import IndexedDataset
from megatron.core.datasets.mock import MockDataset
from megatron.core.datasets.sample import SampleDataset, Splits
from megatron.core.datasets.sft import Conversations, SFTDataset
from megatron.core.errors import ConfigError, DataError
from megatron.core.log import get_logger

LOGGER = get_logger(__name__)


@dataclass(frozen=True)
class Source:
    """Where a split's documents come from: the words of a flag, and the part [low, high) of each dataset's documents."""

    flag: str
    words: tuple[str, ...]
    low: float = 0.0
    high: float = 1.0


@dataclass(frozen=True)
class Part:
    """The sequences [first, last) of one dataset and their weight in the split's blend."""

    data: IndexedDataset | Conversations
    first: int
    last: int
    weight: Fraction


def build_datasets(
    config: DataConfig, sizes: Splits[int | None], seed: int, vocab_size: int
) -> Splits[SampleDataset | None]:
    """The datasets that the flags ask for, each of the number of samples in `sizes`.

    A split is None when its size is None or 0, when no flag names data for it, or when it gets no documents (logged).
    Any number of processes may call this at once; where one calls it before the others, only that one builds the sample
    indices. Raises ConfigError for flags that do not go together and DataError for data that cannot be read.
    """
    seq_length = check_flags(config)
    if config.mock_data:
        # Consecutive seeds of the splits of one run; other runs' seeds do not meet them.
        mocks = [
            MockDataset(size, seq_length, vocab_size, 3 * seed + number) if size else None
            for number, (_, size) in enumerate(sizes.items())
        ]
        return Splits(*mocks)
    opened: dict[str, IndexedDataset | Conversations] = {}
    built: list[SampleDataset | None] = []
    for (name, source), (_, size) in zip(find_sources(config).items(), sizes.items(), strict=True):
        parts = _open_parts(source, name, config, opened) if source and size else []
        if not size or not parts:
            built.append(None)
            continue
        blend = Blend.create([part.weight for part in parts], size)
        counts = blend.counts(size) if len(parts) > 1 else [size]
        datasets = [
            _build_part(part, config, name, count, seq_length, seed, vocab_size)
            for part, count in zip(parts, counts, strict=True)
        ]
        built.append(BlendedDataset(datasets, blend, size) if len(parts) > 1 else datasets[0])
    return Splits(*built)


def check_flags(config: DataConfig) -> int:
    """The sequence length, after checking that exactly one kind of data is named. Raises ConfigError."""
    per_split = (config.train_data_path, config.valid_data_path, config.test_data_path)
    if config.mock_data and config.data_path is not None:
        raise ConfigError("--mock-data and --data-path are given together; give one of them")
    if not config.mock_data and config.data_path is None and all(words is None for words in per_split):
        raise ConfigError("no data is given; give --data-path, --train-data-path or --mock-data")
    if config.seq_length is None or config.seq_length < 1:
        raise ConfigError(f"--seq-length is {config.seq_length}; give the number of tokens in a sample, at least 1")
    return config.seq_length


def find_sources(config: DataConfig) -> Splits[Source | None]:
    """What each split reads: ranges of --data-path's documents, or its own data path."""
    if config.data_path is None:
        flags = Splits(config.train_data_path, config.valid_data_path, config.test_data_path).items()
        return Splits(*(Source(f"--{name}-data-path", words) if words is not None else None for name, words in flags))
    bounds = np.concatenate([[0.0], np.cumsum(split_shares(config.split or DEFAULT_SPLIT))]).tolist()
    return Splits(*(Source("--data-path", config.data_path, bounds[i], bounds[i + 1]) for i in range(3)))


def _build_part(
    part: Part, config: DataConfig, name: str, num_samples: int, seq_length: int, seed: int, vocab_size: int
) -> SampleDataset:
    cache = Path(config.data_cache_path or Path(part.data.prefix).parent / "cache")
    if isinstance(part.data, Conversations):
        return SFTDataset(
            part.data,
            part.first,
            part.last,
            name=name,
            num_samples=num_samples,
            seq_length=seq_length,
            seed=seed,
            vocab_size=vocab_size,
            packing=config.sft_packing,
            order=config.dataloader_type,
            cache=cache,
        )
    return GPTDataset(
        part.data,
        part.first,
        part.last,
        name=name,
        num_samples=num_samples,
        seq_length=seq_length,
        seed=seed,
        vocab_size=vocab_size,
        order=config.dataloader_type,
        cache=cache,
    )


def _open_parts(
    source: Source, name: str, config: DataConfig, opened: dict[str, IndexedDataset | Conversations]
) -> list[Part]:
    """The datasets of a split that hold tokens for it. An empty part is an error in training and left out elsewhere."""
    prefixes, weights = parse_blend(source.words, source.flag)
    parts: list[Part] = []
    for number, prefix in enumerate(prefixes):
        if prefix not in opened:
            opened[prefix] = (Conversations if config.sft else IndexedDataset)(prefix)
        data = opened[prefix]
        first, last = round(source.low * len(data)), round(source.high * len(data))
        tokens = int(np.sum(data.sequence_lengths[first:last], dtype=np.int64))
        if tokens:
            parts.append(Part(data, first, last, weights[number] if weights else Fraction(tokens)))
        elif name == "train" or source.high > source.low:
            problem = (
                f"the {name} split gets documents {first} to {last} of the {len(data)} of {prefix}, with no tokens"
            )
            if name == "train":
                raise DataError(f"{problem}; use a larger dataset or another --split")
            LOGGER.warning("%s: it is left out", problem)
    return parts
