"""The step time of a schedule that repeats a block of events, for many costs at once.

[Note: schedules that repeat themselves] With many microbatches a schedule is a head, a block of events that is
repeated, and a tail. A block reads the times of a few events before it, the border, and gives the times of the border
of the next block. Maxima and sums commute with a constant that is added to all times. So if a whole border is later
than one some blocks before by the same number of seconds for each of its events, it will be so after every further
block, and the remaining blocks need not be played. If this never happens, all of them are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron.schedule.costs import Costs
from megatron.schedule.graph import Segment

_Array = NDArray[np.float64]
# Borders are compared with so many earlier ones, after the 3rd block, the 4th, the 6th, the 9th, and so on.
_EARLIER = 16
_GROWTH = 1.4
# Of a time: the rounding of some hundred sums. Extended over a thousand blocks it is below 1e-10.
_ROUNDING = 1e-13


@dataclass(frozen=True)
class RepeatingGraph:
    """A schedule whose block is played `count` times. See [Note: schedules that repeat themselves]."""

    head: Segment
    block: Segment
    tail: Segment
    count: int

    def makespans(self, costs: Costs) -> _Array:
        """Returns [K] seconds until the last action has ended and the last bucket has been reduced."""
        rows = costs.rows()
        begin = np.zeros_like(rows[:1])
        border = self.head.border_after(self.head.times(begin, self.head.costs(rows)))
        border = self._after_blocks(border, self.block.costs(rows))
        last: _Array = self.tail.times(border, self.tail.costs(rows)).max(axis=0)
        return last

    def _after_blocks(self, border: _Array, costs: _Array) -> _Array:
        """Returns the border after the last block; columns of costs that repeat themselves are not played any
        further."""
        final = np.empty_like(border)
        left = np.arange(border.shape[1])  # columns whose blocks are still played
        earlier = [border]
        check = 3
        for played in range(1, self.count + 1):
            border = self.block.border_after(self.block.times(border, costs))
            if played == check and played < self.count:
                check = max(played + 1, int(_GROWTH * played))
                extended = self._extended(earlier, border, played)
                done = ~np.isnan(extended[0])
                final[:, left[done]] = extended[:, done]
                if done.all():
                    return final
                if done.any():
                    left, border, costs = left[~done], border[:, ~done], costs[:, ~done]
                    earlier = [times[:, ~done] for times in earlier]
            earlier = [*earlier[-_EARLIER + 1 :], border]
        final[:, left] = border
        return final

    def _extended(self, earlier: Sequence[_Array], border: _Array, played: int) -> _Array:
        """Returns the border after the last block, and nan in the columns that do not repeat themselves so far.

        earlier: the borders before `border`, the last one before it at the end.
        """
        final = np.full_like(border, np.nan)
        allowed = _ROUNDING * border.max(axis=0)
        for apart in range(1, len(earlier) + 1):
            later = border - earlier[-apart]
            alike = np.isnan(final[0]) & (later.max(axis=0) - later.min(axis=0) <= allowed)
            if alike.any():
                # The last border is so many times `apart` blocks later than one of those that were played.
                times = -(-(self.count - played) // apart)
                start = played + apart * times - self.count
                like = earlier[-start] if start else border
                final[:, alike] = like[:, alike] + times * later[:, alike].mean(axis=0)
        return final
