"""Readers of the batches of training, validation and test."""

from __future__ import annotations

import torch

from megatron.config.data import DataConfig
from megatron.config.train import TrainConfig
from megatron.core.comm.collectives import gather_objects
from megatron.core.datasets.build import build_datasets
from megatron.core.datasets.loader import build_loader
from megatron.core.datasets.sample import SampleDataset, Splits
from megatron.core.groups import Groups
from megatron.training.batch import BatchReader, BatchSource
from megatron.training.state import TrainState
from megatron.training.together import together


def build_readers(
    data: DataConfig,
    train: TrainConfig,
    sizes: Splits[int | None],
    groups: Groups,
    device: torch.device,
    state: TrainState,
    *,
    vocab_size: int,
    eod: int,
) -> Splits[BatchSource | None]:
    """Returns readers that continue where `state` says. Only tp rank 0 of a replica opens data; all ranks get a reader.

    sizes: samples of each dataset, see `dataset_sizes`. vocab_size: of the model, for --mock-data. eod: the id that
    ends a document. Collective over the world.
    """
    reads = groups.tp.rank == 0

    def open_all() -> Splits[SampleDataset | None]:
        if not reads:
            return Splits(None, None, None)
        return build_datasets(data, sizes, train.seed, vocab_size)

    # One rank builds the index files while the others wait, then the others find them.
    first = together(groups.world, lambda: open_all() if groups.rank == 0 else None)
    datasets = together(groups.world, lambda: first or open_all())
    # Which splits exist is the same everywhere: rank 0 always reads.
    exist = gather_objects([dataset is not None for _, dataset in datasets.items()], groups.world)[0]
    consumed = (state.consumed_samples, 0 if train.skip_train else state.consumed_valid_samples, 0)

    def reader(dataset: SampleDataset | None, samples: int, exists: bool) -> BatchReader | None:
        return _reader(data, train, groups, device, dataset, samples, eod) if exists else None

    readers = (
        reader(dataset, samples, exists)
        for (_, dataset), samples, exists in zip(datasets.items(), consumed, exist, strict=True)
    )
    return Splits(*readers)


def _reader(
    data: DataConfig,
    train: TrainConfig,
    groups: Groups,
    device: torch.device,
    dataset: SampleDataset | None,
    consumed: int,
    eod: int,
) -> BatchReader:
    assert train.micro_batch_size
    loader = None
    if dataset is not None:
        loader = build_loader(
            dataset,
            consumed_samples=consumed,
            micro_batch_size=train.micro_batch_size,
            dp_rank=groups.dp.rank,
            dp_size=groups.mesh.dp,
            num_workers=data.num_workers,
            seed=train.seed,
            cyclic=data.data_order == "megatron" and data.dataloader_type == "cyclic",
            sharding=data.data_sharding,
        )
    return BatchReader(
        loader,
        data,
        eod=eod,
        micro_batch_size=train.micro_batch_size,
        groups=groups,
        device=device,
    )
