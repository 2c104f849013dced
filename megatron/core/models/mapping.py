"""Which elements of which tensor of another format are which elements of ours: one table for reading and writing.

[Note: parts] Both sides are cut into rectangles that hold the same elements in the same row-major order. A rectangle of
ours may have more dimensions, of size 1: our fused weights have a dim for the key/value group, for gate and up, for the
expert. So any rectangle of one side (a rank's shard, a block of rows) is found in the other by moving its offset, and
reading it is slicing.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import add, sub

import torch
from torch import Tensor

from megatron.base.box import Box, first_hole, first_overlap, intersect
from megatron.core.dist_checkpointing.tensor_file import narrow

Read = Callable[[str, Box], Tensor]  # elements of the tensor of that name


@dataclass(frozen=True)
class Part:
    """Elements `their_box` of their tensor, which are elements `our_box` of ours.

    extra: the first dim of ours that theirs lacks; as many as it has fewer lie there.
    """

    ours: str
    our_box: Box
    theirs: str
    their_box: Box
    extra: int = 0

    def to_theirs(self, box: Box) -> Box:
        """Where elements of `our_box` are in their tensor."""
        offset = tuple(map(sub, box.offset, self.our_box.offset))
        return Box(tuple(map(add, self._without(offset), self.their_box.offset)), self._without(box.shape))

    def to_ours(self, box: Box) -> Box:
        """Where elements of `their_box` are in our tensor."""
        count = len(self.our_box.shape) - len(box.shape)
        offset, shape = list(map(sub, box.offset, self.their_box.offset)), list(box.shape)
        offset[self.extra : self.extra] = [0] * count
        shape[self.extra : self.extra] = [1] * count
        return Box(tuple(map(add, offset, self.our_box.offset)), tuple(shape))

    def _without(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        count = len(sizes) - len(self.their_box.shape)
        return sizes[: self.extra] + sizes[self.extra + count :]


@dataclass(frozen=True)
class Stack:
    """Their tensors `names`, each of `shape`, which are one behind the other all elements of ours.

    dims: the first dims of ours, whose product is the number of names; the others are those of `shape`. One object for
    all experts of a layer: thousands of Parts would take longer than reading small tensors.
    """

    ours: str
    names: Sequence[str]
    dims: tuple[int, ...]
    shape: tuple[int, ...]

    def run(self, box: Box) -> StoredRun:
        """Elements `box` of ours."""
        numbers = [0]
        for start, count, size in zip(box.offset, box.shape, self.dims):
            numbers = [before * size + index for before in numbers for index in range(start, start + count)]
        front = len(self.dims)
        return StoredRun(box, [self.names[number] for number in numbers], Box(box.offset[front:], box.shape[front:]))

    def to_ours(self, name: str, box: Box) -> Box:
        """Where elements of their tensor `name` are in ours."""
        number, place = self._numbers[name], list[int]()
        for size in reversed(self.dims):
            number, index = divmod(number, size)
            place.insert(0, index)
        return Box((*place, *box.offset), (*(1 for _ in place), *box.shape))

    @functools.cached_property
    def _numbers(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self.names)}


@dataclass(frozen=True)
class StoredRun:
    """Elements `box` of our tensor: elements `their_box` of each of their tensors `names`, one behind the other."""

    box: Box
    names: Sequence[str]
    their_box: Box


@dataclass(frozen=True)
class Mapping:
    """One of our parameters: its global shape, and the parts it is made of.

    What no part holds is the padding of the vocabulary: zero. copies: further tensors of the other format that hold the
    same elements, as those of replicated parameters on its ranks; they are written, and not read.
    """

    ours: str
    shape: tuple[int, ...]
    parts: Sequence[Part] | Stack
    copies: Sequence[Part] = ()


class Table:
    """All mappings of a model. `own`: name -> our global shape; `theirs`: name -> their shape."""

    def __init__(self, mappings: Sequence[Mapping], loose: dict[str, tuple[int, ...]] | None = None) -> None:
        """Asserts that the parts hold every element of their tensors exactly once.

        loose: shapes of those of their tensors for which this need not hold. Elements that no part holds are written as
        zeros, and are not read. A table in which several parts hold an element can only be read.
        """
        loose = loose or {}
        self.ours = {mapping.ours: mapping.shape for mapping in mappings}
        self._by_ours = {mapping.ours: mapping.parts for mapping in mappings}
        self._by_theirs: dict[str, list[Part]] = {}
        self._stacked: dict[str, Stack] = {}
        self.theirs: dict[str, tuple[int, ...]] = {}  # in the order of ours
        count = 0
        for mapping in mappings:
            parts = mapping.parts
            if isinstance(parts, Stack):
                self.theirs |= dict.fromkeys(parts.names, parts.shape)
                self._stacked |= dict.fromkeys(parts.names, parts)
                count += len(parts.names)
                continue
            for part in (*parts, *mapping.copies):
                self._by_theirs.setdefault(part.theirs, []).append(part)
                self.theirs[part.theirs] = ()
        assert len(self._stacked) == count and not self._stacked.keys() & self._by_theirs.keys(), (
            "a tensor is read twice"
        )
        for name, held in self._by_theirs.items():
            boxes = [part.their_box for part in held]
            shape = self.theirs[name] = loose.get(name) or _extent(boxes)
            if name in loose:
                assert all(end <= size for end, size in zip(_extent(boxes), shape, strict=True)), f"{name} is too small"
                continue
            assert first_overlap(boxes) is None, f"{name} is read twice"
            assert sum(box.numel for box in boxes) == math.prod(shape), f"{name}: {first_hole(shape, boxes)} is left"

    def runs(self, name: str, box: Box) -> list[StoredRun]:
        """Elements `box` of our tensor, in as few pieces as possible."""
        parts = self._by_ours[name]
        if isinstance(parts, Stack):
            return [parts.run(box)]
        overlaps = [(part, intersect(part.our_box, box)) for part in parts]
        return [StoredRun(common, (part.theirs,), part.to_theirs(common)) for part, common in overlaps if common]

    def of_ours(self, name: str, box: Box) -> list[tuple[Box, str, Box]]:
        """Elements `box` of our tensor: (which of them, their tensor, which of its elements)."""
        return [piece for run in self.runs(name, box) for piece in _pieces(run)]

    def of_theirs(self, name: str, box: Box) -> list[tuple[Box, str, Box]]:
        """Elements `box` of their tensor: (which of them, our tensor, which of its elements)."""
        if name in self._stacked:
            stack = self._stacked[name]
            return [(box, stack.ours, stack.to_ours(name, box))]
        overlaps = [(part, intersect(part.their_box, box)) for part in self._by_theirs[name]]
        return [(common, part.ours, part.to_ours(common)) for part, common in overlaps if common]


def _pieces(run: StoredRun) -> Iterator[tuple[Box, str, Box]]:
    if len(run.names) == 1:
        yield run.box, run.names[0], run.their_box
        return
    count = len(run.box.shape) - len(run.their_box.shape)
    front, ones = Box(run.box.offset[:count], run.box.shape[:count]), (1,) * count
    places = itertools.product(*(range(start, front.end(dim)) for dim, start in enumerate(front.offset)))
    for name, place in zip(run.names, places, strict=True):
        yield Box((*place, *run.their_box.offset), (*ones, *run.their_box.shape)), name, run.their_box


def gather(pieces: Iterable[tuple[Box, str, Box]], box: Box, dtype: torch.dtype, read: Read) -> Tensor:
    """Elements `box` of a tensor from the pieces that `of_ours` or `of_theirs` names; zero where there is none."""
    out = torch.zeros(box.shape, dtype=dtype)
    for common, name, source_box in pieces:
        narrow(out, common.within(box)).copy_(read(name, source_box).view(common.shape))
    return out


def _extent(boxes: Iterable[Box]) -> tuple[int, ...]:
    ends = [tuple(box.end(dim) for dim in range(len(box.shape))) for box in boxes]
    return tuple(max(column) for column in zip(*ends, strict=True))
