"""Megatron-LM's cyclic data loader: samples in an order that is new in every epoch and depends on the layout."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils.data import Sampler

from megatron.base.errors import DataError


class CyclicSampler(Sampler[list[int]]):
    """Yields the sample numbers of each microbatch of one rank, without end.

    An epoch is the largest part of the `num_samples` samples that whole microbatches of all dp replicas hold; epoch e
    is drawn from torch's generator with seed e, independently of the run's seed. With `sharding` each replica owns an
    equal range of samples and all draw the same permutation of their ranges; without it, they take turns in one
    permutation of all samples. Described from the behaviour of MegatronPretrainingRandomSampler,
    megatron/training/datasets/data_samplers.py.

    Raises DataError for fewer samples than one microbatch per replica, and if `consumed_samples` is not a boundary
    between microbatches of this layout.
    """

    def __init__(
        self,
        num_samples: int,
        *,
        consumed_samples: int,
        micro_batch_size: int,
        dp_rank: int,
        dp_size: int,
        sharding: bool,
    ) -> None:
        assert 0 <= dp_rank < dp_size and micro_batch_size > 0 and consumed_samples >= 0
        self.num_samples, self.consumed_samples, self.sharding = num_samples, consumed_samples, sharding
        self.micro_batch_size, self.dp_rank, self.dp_size = micro_batch_size, dp_rank, dp_size
        self._unit = micro_batch_size * dp_size
        self._epoch = num_samples - num_samples % self._unit
        if not self._epoch:
            raise DataError(
                f"--dataloader-type cyclic has {num_samples} samples, fewer than --micro-batch-size {micro_batch_size} "
                f"x {dp_size} replicas; use a larger dataset, or --dataloader-type single"
            )
        if consumed_samples % self._epoch % self._unit:
            raise DataError(
                f"--dataloader-type cyclic continues after a whole number of microbatches of {micro_batch_size} x "
                f"{dp_size} replicas, and {consumed_samples} samples were consumed of epochs of {self._epoch}; use the "
                "--micro-batch-size and the number of replicas that they were read with"
            )

    def __iter__(self) -> Iterator[list[int]]:
        consumed = self.consumed_samples
        while True:
            epoch, begun = divmod(consumed, self._epoch)
            order = self._rest_of(epoch, begun)
            for first in range(0, len(order) - self.micro_batch_size + 1, self.micro_batch_size):
                yield order[first : first + self.micro_batch_size].tolist()
                consumed += self._unit

    def _rest_of(self, epoch: int, begun: int) -> Tensor:
        """Returns the samples that this rank reads in an epoch after its first `begun` samples."""
        random = torch.Generator().manual_seed(epoch)
        if self.sharding:
            share = self._epoch // self.dp_size
            return self.dp_rank * share + torch.randperm(share, generator=random)[begun // self.dp_size :]
        # The permutation also has the samples of the last, incomplete round of microbatches.
        whole = self.num_samples - self.num_samples % self.micro_batch_size
        return torch.randperm(whole, generator=random)[begun + self.dp_rank :: self.dp_size]
