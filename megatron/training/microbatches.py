"""The microbatches of a training step, as the parts of the step see them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from megatron.core.groups import Group, Groups
from megatron.training.batch import Batch, part_of, part_of_batch


@dataclass(frozen=True)
class Targets:
    """What the tokens of a microbatch shall predict, all [b, s] or, of a context-parallel rank, [b, s / cp].

    labels: int64. mask: bool, False where a label does not count. weights: of the losses in the objective.
    """

    labels: Tensor
    mask: Tensor
    weights: Tensor

    @classmethod
    def of(cls, batch: Batch) -> Targets:
        """Returns the next tokens, whose losses are only added up."""
        return cls(batch.labels, batch.loss_mask, batch.loss_mask.float())

    def part(self, cp: Group, multiple: int) -> Targets:
        """Returns this context-parallel rank's part; see `part_of`."""
        return Targets(*(part_of(x, cp, multiple) for x in (self.labels, self.mask, self.weights)))


@dataclass(frozen=True)
class Microbatches:
    """The microbatches of a step on this replica, and this context-parallel rank's part of them.

    samples: those that this replica has read. whole: the microbatches with whole sequences: these samples, or under
    --dynamic-context-parallel documents of all replicas. local: the part of each, [b, s / cp]. targets: of each part,
    of the next token and then of each depth of multi-token prediction; their weights are times the loss scale.
    loss_scale: fp64 [].
    """

    samples: Sequence[Batch]
    whole: Sequence[Batch]
    local: Sequence[Batch]
    targets: Sequence[Sequence[Targets]]
    loss_scale: Tensor


def context_of(batch: Batch, groups: Groups) -> Group:
    """Returns the ranks that share the samples of a microbatch."""
    return groups.cp if batch.context is None else groups.contexts[batch.context]


def local_batches(batches: Sequence[Batch], groups: Groups, multiple: int) -> list[Batch]:
    """Returns this context-parallel rank's part of the microbatches.

    multiple: parts into which sequence parallelism divides a sequence.
    """
    return [part_of_batch(batch, context_of(batch, groups), multiple) for batch in batches]


def cut(
    samples: Sequence[Batch],
    whole: Sequence[Batch],
    targets: Sequence[Sequence[Targets]],
    loss_scale: Tensor,
    groups: Groups,
    multiple: int,
) -> Microbatches:
    """Returns the microbatches of a step from whole ones and their targets. The others are as in Microbatches."""
    parts = [
        [depth.part(context_of(batch, groups), multiple) for depth in of_microbatch]
        for batch, of_microbatch in zip(whole, targets, strict=True)
    ]
    return Microbatches(samples, whole, local_batches(whole, groups, multiple), parts, loss_scale)


def one_token_later(batch: Batch) -> Batch:
    """Returns the batch with labels one token later, masked where that token is of another document or does not exist.

    The sequences are whole.
    """
    labels, mask = F.pad(batch.labels[:, 1:], (0, 1)), F.pad(batch.loss_mask[:, 1:], (0, 1))
    if batch.segments is not None:
        ids = batch.segments.ids
        mask = mask & F.pad(ids[:, 1:] == ids[:, :-1], (0, 1))
    return dataclasses.replace(batch, labels=labels, loss_mask=mask)


def tensors_of(batches: Sequence[Batch], targets: Sequence[Sequence[Targets]]) -> Iterator[Tensor]:
    """Yields all tensors of microbatches, with what they shall predict."""
    for of_microbatch in targets:
        for depth in of_microbatch:
            yield from vars(depth).values()
    for batch in batches:
        yield from (value for value in vars(batch).values() if isinstance(value, Tensor))
        if batch.segments is not None:
            yield from batch.segments.tensors
