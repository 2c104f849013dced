"""The microbatches of a training step, as the parts of the step see them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from megatron.core.groups import Group
from megatron.training.batch import Batch, part_of, part_of_batch


@dataclass(frozen=True)
class Microbatches:
    """The microbatches of a step on this replica, and this context-parallel rank's part of them.

    whole: with whole sequences. local: the part of each, [b, s / cp].
    weights: of the tokens of each part in the objective,
    [b, s / cp], times the loss scale. loss_scale: fp64 [].
    """

    whole: Sequence[Batch]
    local: Sequence[Batch]
    weights: Sequence[Tensor]
    loss_scale: Tensor


def local_parts(
    batches: Sequence[Batch], weights: Sequence[Tensor], cp: Group, multiple: int
) -> tuple[list[Batch], list[Tensor]]:
    """Returns this context-parallel rank's part of the microbatches and of the weights of their tokens [b, s].

    multiple: parts into which sequence parallelism divides a sequence.
    """
    return (
        [part_of_batch(batch, cp, multiple) for batch in batches],
        [part_of(of_batch, cp, multiple) for of_batch in weights],
    )


def tensors_of(batches: Sequence[Batch], weights: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yields all tensors of microbatches, with the weights of their tokens."""
    yield from weights
    for batch in batches:
        yield from (value for value in vars(batch).values() if isinstance(value, Tensor))
        if batch.segments is not None:
            yield from batch.segments.tensors
