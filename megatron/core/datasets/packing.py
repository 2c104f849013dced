"""Best-fit-decreasing bin packing: conversations into samples of a fixed number of tokens.

Items are placed from the longest to the shortest, each into the bin with the least sufficient space, or into a new one;
D. S. Johnson, "Near-optimal bin packing algorithms", MIT 1973, shows that this takes at most 11/9 of the fewest
possible bins, and with many short items it fills nearly all of them. Items of one length are placed together: the best
bin stays the best until the next item is too long for it, so all bins of equal space get equally many items. The work
grows with the number of different (length, space) pairs that occur, not with items x bins.
"""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np
import numpy.typing as npt


def best_fit_decreasing(lengths: npt.NDArray[np.integer], capacity: int) -> npt.NDArray[np.int64]:
    """Returns the bin of each item, for `lengths` [n] in falling order, each from 1 to `capacity`. Bins count from 0.

    The result depends on the lengths alone and is the same on every machine.
    """
    assert not len(lengths) or (lengths[-1] > 0 and lengths[0] <= capacity and (np.diff(lengths) <= 0).all())
    sizes, counts = np.unique(lengths, return_counts=True)
    packing = _Packing(capacity)
    for size, count in zip(sizes[::-1].tolist(), counts[::-1].tolist()):
        packing.place(size, count)
    return np.array(packing.bins, np.int64)


class _Packing:
    """The state of a packing; `bins` holds the bin of each item placed so far."""

    def __init__(self, capacity: int) -> None:
        self.bins: list[int] = []
        self._capacity, self._opened = capacity, 0
        self._holders: dict[int, list[int]] = {}  # free space -> bins that have it
        self._spaces: list[int] = []  # keys of `_holders`, rising

    def place(self, size: int, count: int) -> None:
        """Places `count` items of one size, which is not larger than any size before."""
        while count and (at := bisect_left(self._spaces, size)) < len(self._spaces):
            space = self._spaces.pop(at)
            holders = self._holders.pop(space)
            count -= self._fill(holders, space, size, count)
            if holders:
                self._keep(holders, space)
        if count:
            new = -(-count // (self._capacity // size))
            holders = list(range(self._opened, self._opened + new))
            self._opened += new
            self._fill(holders, self._capacity, size, count)

    def _fill(self, holders: list[int], space: int, size: int, count: int) -> int:
        """Puts items into bins with `space`, taking bins from `holders`; returns the number of items placed."""
        items_per_bin = space // size
        whole = min(len(holders), count // items_per_bin)
        self._take(holders, whole, space, size, items_per_bin)
        placed = whole * items_per_bin
        if holders and placed < count:  # fewer items are left than one bin could take
            self._take(holders, 1, space, size, count - placed)
            placed = count
        return placed

    def _take(self, holders: list[int], number: int, space: int, size: int, items_per_bin: int) -> None:
        """Puts `each` items into the last `number` bins of `holders` and files these bins under their remaining
        space."""
        if not number:
            return
        taken = holders[-number:]
        del holders[-number:]
        self.bins += taken if items_per_bin == 1 else [bin_ for bin_ in taken for _ in range(items_per_bin)]
        if space > items_per_bin * size:
            self._keep(taken, space - items_per_bin * size)

    def _keep(self, holders: list[int], space: int) -> None:
        if space in self._holders:
            self._holders[space] += holders
        else:
            self._holders[space] = holders
            insort(self._spaces, space)
