"""Loads the microbatches of one data-parallel rank, in an order that can be continued under any layout."""

from __future__ import annotations

import signal
from collections.abc import Generator, Iterator, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from megatron.base.errors import DataError, UserError
from megatron.core.datasets.megatron_sampler import CyclicSampler
from megatron.core.datasets.sample import SampleDataset

T = TypeVar("T")
GRACE_SECONDS = 60  # torchrun and Slurm kill remaining processes 30 s after SIGTERM


class MicrobatchSampler(Sampler[list[int]]):
    """Yields the sample numbers of each microbatch of one rank.

    Microbatch k after `consumed_samples` covers the samples [consumed + k * m * dp, consumed + (k + 1) * m * dp) with m
    = micro_batch_size; rank r takes the r-th run of m of them. So the samples of a global batch are the same for any dp
    and m, and `consumed_samples` is the complete state. Ends with the last complete microbatch.
    """

    def __init__(
        self, num_samples: int, *, consumed_samples: int, micro_batch_size: int, dp_rank: int, dp_size: int
    ) -> None:
        assert 0 <= dp_rank < dp_size and micro_batch_size > 0 and consumed_samples >= 0
        self.num_samples, self.consumed_samples = num_samples, consumed_samples
        self.micro_batch_size, self.dp_rank, self.dp_size = micro_batch_size, dp_rank, dp_size

    def __len__(self) -> int:
        """Number of microbatches left."""
        return max(0, self.num_samples - self.consumed_samples) // (self.micro_batch_size * self.dp_size)

    def __iter__(self) -> Iterator[list[int]]:
        for microbatch in range(len(self)):
            run = microbatch * self.dp_size + self.dp_rank
            first = self.consumed_samples + run * self.micro_batch_size
            yield list(range(first, first + self.micro_batch_size))


def build_loader(
    dataset: SampleDataset,
    *,
    consumed_samples: int,
    micro_batch_size: int,
    dp_rank: int,
    dp_size: int,
    num_workers: int,
    seed: int,
    cyclic: bool = False,
    sharding: bool = True,
) -> Generator[torch.Tensor, None, None]:
    """Yields token ids, int64 [micro_batch_size, seq_length + 1], starting at sample `consumed_samples`.

    Samples come in the order of their numbers, or with `cyclic` as CyclicSampler draws them, with or without
    `sharding`. `num_workers` processes prepare microbatches ahead until the iterator is closed or freed; with 0 this
    process prepares each microbatch on request. `seed` seeds the workers' generators; without it, starting the workers
    would draw from the caller's random state. No communication. Raises DataError after the last complete microbatch,
    and the dataset's errors for a sample that it cannot return.
    """
    place = {
        "consumed_samples": consumed_samples,
        "micro_batch_size": micro_batch_size,
        "dp_rank": dp_rank,
        "dp_size": dp_size,
    }
    in_order = MicrobatchSampler(len(dataset), **place)
    sampler = CyclicSampler(len(dataset), sharding=sharding, **place) if cyclic else in_order
    loader: DataLoader[npt.NDArray[np.int64] | UserError] = DataLoader(
        _Microbatches(dataset),
        sampler=sampler,
        batch_size=None,
        num_workers=num_workers,
        collate_fn=_as_it_is,
        worker_init_fn=_outlive_sigterm,
        generator=torch.Generator().manual_seed(seed),
    )
    for item in loader:
        if isinstance(item, UserError):
            raise item
        yield torch.from_numpy(item)
    raise DataError(
        f"the dataset's {len(dataset)} samples are used up: {consumed_samples} were consumed before and "
        f"{len(in_order)} microbatches of {micro_batch_size} x {dp_size} replicas read since; lower --train-iters or "
        "--eval-iters, or build the dataset for more samples"
    )


def _outlive_sigterm(worker: int) -> None:
    """Lets a worker survive SIGTERM until the training process ends, or for GRACE_SECONDS.

    A batch system that ends a job signals all its processes. The training process then still reads the data of its last
    step and saves, so its workers must not end before it.
    """
    signal.signal(signal.SIGTERM, lambda number, frame: signal.alarm(GRACE_SECONDS))


def _as_it_is(item: T) -> T:
    return item


class _Microbatches(Dataset["npt.NDArray[np.int64] | UserError"]):
    """Maps sample numbers to a microbatch.

    Returns an array and not a tensor: arrays are sent through a pipe, tensors through files in /dev/shm, which is small
    in containers. When it is full, torch loses the batch in the worker and the training process waits forever. A batch
    is so small (a tenth of a millisecond in a pipe) that shared memory gains nothing.

    A user's error is returned, not raised: a DataLoader would raise it again with the worker's traceback as its
    message.
    """

    def __init__(self, dataset: SampleDataset) -> None:
        self.dataset = dataset

    def __getitem__(self, numbers: Sequence[int]) -> npt.NDArray[np.int64] | UserError:
        try:
            return np.stack([self.dataset[number] for number in numbers])
        except UserError as error:
            return error
