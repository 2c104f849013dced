"""Rectangles of a global tensor: intersection, subtraction, overlaps, holes, and the rectangles of a flat slice.

This is pure arithmetic on offsets and shapes, without torch. A scalar has exactly one rectangle, with empty offset and
shape.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Box:
    """The rectangle of elements `offset[d] <= i[d] < offset[d] + shape[d]` of a tensor."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    def end(self, dim: int) -> int:
        """The first index after the rectangle along `dim`."""
        return self.offset[dim] + self.shape[dim]

    def within(self, base: Box) -> Box:
        """Returns the same elements with offsets relative to the start of `base`."""
        return Box(tuple(a - b for a, b in zip(self.offset, base.offset, strict=True)), self.shape)

    def __str__(self) -> str:
        return "[" + ", ".join(f"{o}:{o + n}" for o, n in zip(self.offset, self.shape)) + "]"


def intersect(a: Box, b: Box) -> Box | None:
    """Returns the common elements of two rectangles, or None if there are none."""
    offset = tuple(max(x, y) for x, y in zip(a.offset, b.offset))
    shape = tuple(min(a.end(d), b.end(d)) - start for d, start in enumerate(offset))
    return Box(offset, shape) if all(n > 0 for n in shape) else None


def subtract(a: Box, b: Box) -> list[Box]:
    """Returns rectangles that together hold the elements of `a` that are not in `b`: at most two per dimension."""
    common = intersect(a, b)
    if common is None:
        return [a]
    pieces, core = [], a
    for d in range(len(a.shape)):
        for start, stop in ((core.offset[d], common.offset[d]), (common.end(d), core.end(d))):
            if start < stop:
                pieces.append(_with_range(core, d, start, stop))
        core = _with_range(core, d, common.offset[d], common.end(d))
    return pieces


def first_overlap(boxes: Sequence[Box]) -> Box | None:
    """Returns elements that two of the rectangles share, or None. The search sweeps along the longest dimension."""
    if len(boxes) < 2:
        return None
    if not boxes[0].shape:
        return boxes[0]  # The same scalar is given twice.
    sweep = max(range(len(boxes[0].shape)), key=lambda d: max(box.end(d) for box in boxes))
    active: list[Box] = []  # These rectangles still reach the sweep position.
    for box in sorted(boxes, key=lambda b: b.offset[sweep]):
        active = [other for other in active if other.end(sweep) > box.offset[sweep]]
        for other in active:
            if common := intersect(box, other):
                return common
        active.append(box)
    return None


def first_hole(shape: tuple[int, ...], boxes: Iterable[Box]) -> Box | None:
    """Returns elements of a tensor of `shape` that no rectangle covers, or None.

    This is slow for many rectangles and therefore meant for error messages.
    """
    left = [Box((0,) * len(shape), shape)] if math.prod(shape) else []
    for box in boxes:
        left = [part for piece in left for part in subtract(piece, box)]
    return left[0] if left else None


def flat_boxes(shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    """Returns the rectangles, in order, that cover elements start..stop of the flattened (row-major) tensor of `shape`.

    There are at most 2n - 1 of them for n dimensions: the end of a row, whole rows, the beginning of a row, and so on
    for the inner dimensions.
    """
    if start >= stop:
        return []
    if not shape:
        return [Box((), ())]
    if len(shape) == 1:
        return [Box((start,), (stop - start,))]
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # The whole rows are first..last.
    if first > last:  # The range lies inside one row.
        return _in_row(shape, last, start - last * row, stop - last * row)
    boxes = _in_row(shape, first - 1, start - (first - 1) * row, row) if start < first * row else []
    if first < last:
        boxes.append(Box((first, *(0 for _ in shape[1:])), (last - first, *shape[1:])))
    return boxes + _in_row(shape, last, 0, stop - last * row)


def _in_row(shape: tuple[int, ...], row: int, start: int, stop: int) -> list[Box]:
    return [Box((row, *b.offset), (1, *b.shape)) for b in flat_boxes(shape[1:], start, stop)]


def _with_range(box: Box, dim: int, start: int, stop: int) -> Box:
    offset, shape = list(box.offset), list(box.shape)
    offset[dim], shape[dim] = start, stop - start
    return Box(tuple(offset), tuple(shape))
