"""Builds the datasets of training, validation and test from the data flags."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from pathlib import Path

import numpy as np

from megatron.base.errors import ConfigError, DataError
from megatron.base.log import get_logger
from megatron.config.data import DEFAULT_SPLIT, DataConfig, split_shares
from megatron.core.datasets.blend import Blend, BlendedDataset, parse_blend
from megatron.core.datasets.gpt_dataset import GPTDataset
from megatron.core.datasets.index_cache import cached_arrays
from megatron.core.datasets.indexed import IndexedDataset
from megatron.core.datasets.megatron_blend import FurthestBehind, blend_sizes, furthest_behind, normalize
from megatron.core.datasets.mock import MockDataset
from megatron.core.datasets.sample import SampleDataset, Splits
from megatron.core.datasets.sft import Conversations, SFTDataset

# This version is part of every stored blend's name: raise it when the meaning of its arrays changes.
MEGATRON_BLEND_VERSION = 1
LOGGER = get_logger(__name__)


@dataclass(frozen=True)
class SplitSource:
    """The source of a split's documents: the words of a flag, and the part [low, high) of each dataset's documents."""

    flag: str
    words: tuple[str, ...]
    low: float = 0.0
    high: float = 1.0


@dataclass(frozen=True)
class BlendPart:
    """The sequences [first, last) of one dataset and their weight in the split's blend; None weighs by size in
    tokens."""

    data: IndexedDataset | Conversations
    first: int
    last: int
    tokens: int
    weight: Fraction | None


def build_datasets(
    config: DataConfig, sizes: Splits[int | None], seed: int, vocab_size: int
) -> Splits[SampleDataset | None]:
    """Builds the datasets that the flags ask for, with the number of samples in `sizes` (at least, in Megatron-LM's
    order).

    A split is None if its size is None or 0, if no flag names data for it, or if it gets no documents (logged). Any
    number of processes may call this at once; if one calls it before the others, only that one builds the sample
    indices. Raises ConfigError for flags that exclude each other and DataError for data that cannot be read.
    """
    seq_length = check_flags(config)
    if config.mock_data:
        # The splits of one run have consecutive seeds, which do not overlap with the seeds of other runs.
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
        build = partial(_build_part, config=config, name=name, seq_length=seq_length, seed=seed, vocab_size=vocab_size)
        if config.data_order == "megatron":
            direct = len(parts) == 1 and (parts[0].weight is None or config.data_path is None)
            built.append(build(parts[0], size) if direct else _megatron_blend(parts, size, config, name, build))
            continue
        blend = Blend.create([part.weight or Fraction(part.tokens) for part in parts], size)
        counts = blend.counts(size) if len(parts) > 1 else [size]
        datasets = [build(part, count) for part, count in zip(parts, counts, strict=True)]
        built.append(BlendedDataset(datasets, blend, size) if len(parts) > 1 else datasets[0])
    return Splits(*built)


def check_flags(config: DataConfig) -> int:
    """Returns the sequence length after checking that exactly one kind of data is named. Raises ConfigError."""
    per_split = (config.train_data_path, config.valid_data_path, config.test_data_path)
    if config.mock_data and config.data_path is not None:
        raise ConfigError("--mock-data and --data-path are given together; give one of them")
    if not config.mock_data and config.data_path is None and all(words is None for words in per_split):
        raise ConfigError("no data is given; give --data-path, --train-data-path or --mock-data")
    if config.seq_length is None or config.seq_length < 1:
        raise ConfigError(f"--seq-length is {config.seq_length}; give the number of tokens in a sample, at least 1")
    return config.seq_length


def find_sources(config: DataConfig) -> Splits[SplitSource | None]:
    """Returns the source of each split: a range of --data-path's documents, or the split's own data path."""
    if config.data_path is None:
        flags = Splits(config.train_data_path, config.valid_data_path, config.test_data_path).items()
        return Splits(
            *(SplitSource(f"--{name}-data-path", words) if words is not None else None for name, words in flags)
        )
    bounds = np.concatenate([[0.0], np.cumsum(split_shares(config.split or DEFAULT_SPLIT))]).tolist()
    return Splits(*(SplitSource("--data-path", config.data_path, bounds[i], bounds[i + 1]) for i in range(3)))


def _megatron_blend(
    parts: list[BlendPart],
    size: int,
    config: DataConfig,
    name: str,
    build: Callable[[BlendPart, int | None], SampleDataset],
) -> SampleDataset:
    """Returns at least `size` samples in Megatron-LM's order; without weights at most as many as the datasets hold.

    This is also used for a single dataset that --data-path gives a weight: Megatron-LM then requests more samples from
    it, which changes their order.
    """
    weights = [float(part.weight) for part in parts if part.weight is not None]
    if weights:
        shares = normalize(weights)
        num_samples, counts = blend_sizes(shares, size)
        datasets = [build(part, count) for part, count in zip(parts, counts, strict=True)]
    else:
        datasets = [build(part, None) for part in parts]
        shares = [float(len(dataset)) for dataset in datasets]
        num_samples = min(size, int(sum(shares)))
        if num_samples < size:
            LOGGER.warning(
                "--data-order megatron reads a blend without weights once: the %s split has %d samples and the run "
                "asks for %d; give weights to read it again",
                *(name, num_samples, size),
            )
    shares = normalize(shares)
    arrays = cached_arrays(
        _cache_folder(config, parts[0]),
        f"Blend-megatron-{name}",
        ("datasets", "samples"),
        {"version": MEGATRON_BLEND_VERSION, "shares": shares, "samples": num_samples},
        lambda: furthest_behind(shares, num_samples),
    )
    blend = FurthestBehind(len(parts), **arrays)
    for part, dataset, count in zip(parts, datasets, blend.counts(num_samples), strict=True):
        if len(dataset) < count:
            raise DataError(
                f"--data-order megatron reads {count} samples of {part.data.prefix} for the {name} split, which is "
                f"built for {len(dataset)}: Megatron-LM stops here, too; leave out datasets of nearly no weight, or "
                "give --data-order stable"
            )
    return BlendedDataset(datasets, blend, num_samples)


def _cache_folder(config: DataConfig, part: BlendPart) -> Path:
    return Path(config.data_cache_path or Path(part.data.prefix).parent / "cache")


def _build_part(
    part: BlendPart, num_samples: int | None, config: DataConfig, name: str, seq_length: int, seed: int, vocab_size: int
) -> SampleDataset:
    cache = _cache_folder(config, part)
    if isinstance(part.data, Conversations):
        assert num_samples is not None
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
        order="megatron" if config.data_order == "megatron" else config.dataloader_type,
        cache=cache,
    )


def _open_parts(
    source: SplitSource, name: str, config: DataConfig, opened: dict[str, IndexedDataset | Conversations]
) -> list[BlendPart]:
    """Opens the datasets that hold tokens for a split. An empty part is an error in training and ignored elsewhere."""
    prefixes, weights = parse_blend(source.words, source.flag)
    parts: list[BlendPart] = []
    for number, prefix in enumerate(prefixes):
        if prefix not in opened:
            opened[prefix] = (Conversations if config.sft else IndexedDataset)(prefix)
        data = opened[prefix]
        first, last = round(source.low * len(data)), round(source.high * len(data))
        tokens = int(np.sum(data.sequence_lengths[first:last], dtype=np.int64))
        if tokens:
            parts.append(BlendPart(data, first, last, tokens, weights[number] if weights else None))
        elif name == "train" or source.high > source.low:
            problem = (
                f"the {name} split gets documents {first} to {last} of the {len(data)} of {prefix}, with no tokens"
            )
            if name == "train":
                raise DataError(f"{problem}; use a larger dataset or another --split")
            LOGGER.warning("%s: it is skipped", problem)
    return parts
