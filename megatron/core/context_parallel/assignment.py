"""Which ranks compute which documents of a global batch: long ones by groups of ranks, short ones packed. Pure
arithmetic, so every rank computes the same assignment from the lengths.

[Note: balanced documents]
The ranks are those of dp x cp, in the order of `groups.dp_cp`. A group is an aligned run of 2^k neighbours among them.
In a slot, which is a microbatch of every rank, each rank is in one group, and the group computes one sequence. A
document that one of the smallest groups cannot hold, or that is too much work for it, is alone in its sequence, so that
the balanced layout (see `layout`) shares it equally. All other documents are packed for the smallest groups.

Documents are placed from the widest group to the narrowest, in each width from the most work to the least, each where
the work so far is least (R. L. Graham, "Bounds on multiprocessing timing anomalies", 1969). As wider groups come first,
the ranks of a group have had the same work before it: no rank of a group waits for another, and the last rank is ready
as soon as the busiest one. A document may get twice the ranks that its length needs: of the assignments in which no
document is more work for a rank than `threshold`, which is halved until the result is balanced, the first that is
within _TOLERANCE of the mean is taken, or else the best one.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from megatron.config.context_parallel import GroupSizes

_TOLERANCE = 1.05  # work of the busiest rank, in units of the mean


class Share(NamedTuple):
    """What a group of `size` ranks from `first` on computes in a slot: one sequence of documents, by their numbers."""

    first: int
    size: int
    documents: tuple[int, ...]


Slot = list[Share]  # covers every rank once, in their order


def assign(lengths: Sequence[int], sizes: GroupSizes, work: Callable[[int], float]) -> list[Slot]:
    """Returns the slots of a step, at least one. `work`: of a document by its length, in any unit.

    A document of `sizes.longest` tokens at most can be placed.
    """
    cost = {length: work(length) for length in set(lengths)}
    works = [cost[length] for length in lengths]
    mean = sum(works) / sizes.ranks
    best, least, threshold = None, math.inf, math.inf
    for _ in sizes.all:
        placement = _Placement(lengths, works, sizes, threshold)
        if placement.busiest < least:
            best, least = placement, placement.busiest
        if least <= _TOLERANCE * mean:
            break
        threshold = min(mean, threshold / 2)
    return [] if best is None else best.slots()


def of_rank(slots: Sequence[Slot], rank: int) -> list[Share]:
    """Returns what one of the ranks computes in each slot."""
    return [share for slot in slots for share in slot if share.first <= rank < share.first + share.size]


class _Placement:
    """Documents on groups, each with at most `threshold` work per rank if the largest group allows it.

    Ranks are counted in units of the smallest group. busiest: the most work of a rank.
    """

    def __init__(self, lengths: Sequence[int], works: Sequence[float], sizes: GroupSizes, threshold: float) -> None:
        self._lengths, self._works, self._sizes, self._threshold = lengths, works, sizes, threshold
        units = sizes.ranks // sizes.smallest
        self._loads = [0.0] * units
        self._alone: list[list[Share]] = [[] for _ in range(units)]  # by slot; a wide one at each of its units
        self._packed: list[list[int]] = [[] for _ in range(units)]
        widths = [self._width(length, work) for length, work in zip(lengths, works, strict=True)]
        order = sorted(range(len(lengths)), key=lambda number: (-widths[number], -works[number], number))
        narrow = [number for number in order if widths[number] == 1]
        for number in order[: len(order) - len(narrow)]:
            self._place_alone(number, widths[number])
        self._place_packed(narrow)
        self.busiest = max(self._loads)

    def slots(self) -> list[Slot]:
        """Returns the assignment. Groups without documents left are idle, with an empty sequence."""
        fewest = [first_fit(self._numbered(packed), self._capacity) for packed in self._packed]
        count = max(1, *(len(a) + len(b) for a, b in zip(self._alone, fewest, strict=True)))
        shares = []
        for unit, (alone, sequences) in enumerate(zip(self._alone, fewest, strict=True)):
            wanted = count - len(alone)
            items = [(number, self._lengths[number], self._works[number]) for number in self._packed[unit]]
            filled = even_fit(items, wanted, self._capacity) or sequences + [[]] * (wanted - len(sequences))
            first, size = unit * self._sizes.smallest, self._sizes.smallest
            shares.append(alone + [Share(first, size, tuple(sequence)) for sequence in filled])
        return [list(dict.fromkeys(slot)) for slot in zip(*shares, strict=True)]

    @property
    def _capacity(self) -> int:
        return self._sizes.tokens * self._sizes.smallest

    def _numbered(self, documents: Sequence[int]) -> list[tuple[int, int]]:
        return [(number, self._lengths[number]) for number in documents]

    def _width(self, length: int, work: float) -> int:
        """The units of the group of a document."""
        size = self._sizes.smallest
        while size < self._sizes.largest and (length > self._sizes.tokens * size or work > self._threshold * size):
            size *= 2
        assert length <= self._sizes.tokens * size, f"{length} tokens on {size} ranks of {self._sizes.tokens}"
        return size // self._sizes.smallest

    def _place_alone(self, number: int, width: int) -> None:
        starts = range(0, len(self._loads), width)
        at = min(starts, key=lambda start: (self._loads[start], len(self._alone[start]), start))
        share = Share(at * self._sizes.smallest, width * self._sizes.smallest, (number,))
        for unit in range(at, at + width):
            self._loads[unit] += self._works[number] / share.size
            self._alone[unit].append(share)

    def _place_packed(self, documents: Sequence[int]) -> None:
        heap = [(load, unit) for unit, load in enumerate(self._loads)]
        heapq.heapify(heap)
        for number in documents:
            load, unit = heap[0]
            self._packed[unit].append(number)
            self._loads[unit] = load + self._works[number] / self._sizes.smallest
            heapq.heapreplace(heap, (self._loads[unit], unit))


def first_fit(documents: Sequence[tuple[int, int]], capacity: int) -> list[list[int]]:
    """Returns sequences of (number, length), each put into the first sequence of `capacity` tokens that has room."""
    sequences: list[list[int]] = []
    spaces: list[int] = []
    for number, length in documents:
        place = next((place for place, space in enumerate(spaces) if space >= length), len(spaces))
        if place == len(spaces):
            sequences.append([])
            spaces.append(capacity)
        sequences[place].append(number)
        spaces[place] -= length
    return sequences


def even_fit(documents: Sequence[tuple[int, int, float]], count: int, capacity: int) -> list[list[int]] | None:
    """Returns `count` sequences of (number, length, work) in falling order of work, each put where the work is least;
    None if a document has no room left."""
    sequences: list[list[int]] = [[] for _ in range(count)]
    spaces, loads = [capacity] * count, [0.0] * count
    for number, length, work in documents:
        places = [place for place in range(count) if spaces[place] >= length]
        if not places:
            return None
        place = min(places, key=lambda place: (loads[place], place))
        sequences[place].append(number)
        spaces[place] -= length
        loads[place] += work
    return sequences
