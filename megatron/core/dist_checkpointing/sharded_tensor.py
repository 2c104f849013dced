"""A local piece of a global tensor, and the check that all ranks' pieces form it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from megatron.base.box import Box, first_hole, first_overlap, flat_boxes
from megatron.base.errors import CheckpointError


@dataclass(frozen=True, eq=False)
class ShardedTensor:
    """`data` is the part of global tensor `name` that begins at `offset`. A rank may hold several pieces of one name.

    `writer` means that this rank saves the piece; exactly one of the ranks that hold the same elements is the writer.
    Loading fills `data` in place on all of them. rounded_from: name of a tensor of the same shape and of more precision
    that is saved, too, and of which this one is the rounded value; then nobody writes this one.
    """

    name: str
    data: Tensor
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    writer: bool
    rounded_from: str | None = None

    def __post_init__(self) -> None:
        fits = len(self.data.shape) == len(self.offset) == len(self.global_shape) and all(
            start >= 0 and start + n <= total
            for start, n, total in zip(self.offset, self.data.shape, self.global_shape)
        )
        assert fits, f"{self.name}: piece {list(self.data.shape)} at {self.offset} is not inside {self.global_shape}"

    @property
    def box(self) -> Box:
        """The rectangle of the global tensor that `data` covers."""
        return Box(self.offset, tuple(self.data.shape))

    @property
    def is_written(self) -> bool:
        """Whether this rank writes elements of the piece to its files."""
        return self.writer and self.rounded_from is None and self.data.numel() > 0


def flat_slice(
    name: str,
    data: Tensor,
    *,
    start: int,
    shape: tuple[int, ...],
    global_shape: tuple[int, ...],
    offset: tuple[int, ...],
    writer: bool,
) -> list[ShardedTensor]:
    """Returns pieces for `data` [n], which is elements start..start+n of the flattened local shard of a tensor.

    The local shard has `shape` and begins at `offset` of the global tensor. The pieces are views of `data`.
    """
    pieces, done = [], 0
    for box in flat_boxes(shape, start, start + data.numel()):
        view = data[done : done + box.numel].view(box.shape)
        position = tuple(a + b for a, b in zip(offset, box.offset))
        pieces.append(ShardedTensor(name, view, global_shape, position, writer))
        done += box.numel
    return pieces


def check_tiling(name: str, shape: tuple[int, ...], boxes: Sequence[Box]) -> None:
    """Raises CheckpointError with the range unless the rectangles cover every element of the tensor exactly once."""
    if common := first_overlap(boxes):
        raise CheckpointError(
            f"{name} {list(shape)}: elements {common} would be written twice; one writer each is needed"
        )
    if sum(box.numel for box in boxes) != math.prod(shape):
        raise CheckpointError(f"{name} {list(shape)}: no rank writes elements {first_hole(shape, boxes)}")
