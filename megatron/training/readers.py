"""Readers of the batches of training, validation and test."""

from __future__ import annotations

import torch

from megatron.config.batch_schedule import BatchSchedule
from megatron.config.data import DataConfig
from megatron.config.run import RunConfig
from megatron.config.train import TrainConfig
from megatron.core.comm.collectives import gather_objects
from megatron.core.datasets.build import build_datasets
from megatron.core.datasets.loader import build_loader
from megatron.core.datasets.sample import SampleDataset, Splits
from megatron.core.groups import Groups
from megatron.training.batch import BatchReader
from megatron.training.data_order import dataset_sizes
from megatron.training.state import TrainState
from megatron.training.together import together


def build_readers(
    run: RunConfig, batches: BatchSchedule, groups: Groups, device: torch.device, state: TrainState, eod: int
) -> Splits[BatchReader | None]:
    """Readers that continue where the state says. Only tp rank 0 of a replica opens data; all ranks get a reader.

    Collective over the world.
    """
    assert run.model.vocab_size
    sizes = dataset_sizes(run.data, run.train, run.eval, batches, state)
    reads = groups.tp.rank == 0
    vocab_size = run.model.vocab_size

    def open_all() -> Splits[SampleDataset | None]:
        if not reads:
            return Splits(None, None, None)
        return build_datasets(run.data, sizes, run.train.seed, vocab_size)

    # One rank builds the index files while the others wait, then the others find them.
    first = together(groups.world, lambda: open_all() if groups.rank == 0 else None)
    datasets = together(groups.world, lambda: first or open_all())
    # Which splits exist is the same everywhere: rank 0 always reads.
    exist = gather_objects([dataset is not None for _, dataset in datasets.items()], groups.world)[0]
    consumed = (state.consumed_samples, 0 if run.train.skip_train else state.consumed_valid_samples, 0)

    def reader(dataset: SampleDataset | None, samples: int, exists: bool) -> BatchReader | None:
        return _reader(run.data, run.train, groups, device, dataset, samples, eod) if exists else None

    train, valid, test = (
        reader(dataset, samples, exists)
        for (_, dataset), samples, exists in zip(datasets.items(), consumed, exist, strict=True)
    )
    return Splits(train, valid, test)


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
            pin_memory=device.type == "cuda",
        )
    return BatchReader(
        loader,
        data,
        eod=eod,
        micro_batch_size=train.micro_batch_size,
        groups=groups,
        device=device,
    )
