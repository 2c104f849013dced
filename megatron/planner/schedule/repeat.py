"""Finds the block of events that a schedule with many microbatches repeats, from a schedule with few.

The lists of a schedule with `step` more microbatches hold some more actions, at one place of each rank. The head are
the events up to a depth at which each rank has run its list to about this place. The block are the same events of later
microbatches, without those of the head, and the tail are those after two blocks. The second block has to wait for the
same events as the first one, of later microbatches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron.planner.schedule.repeating_graph import RepeatingGraph
from megatron.schedule.events import BEGIN, STOP, Events
from megatron.schedule.graph import Segment, Waits
from megatron.schedule.schedule import Action, Schedule

_Lists = Sequence[Sequence[Action]]
_Places = NDArray[np.intp]
_Mask = NDArray[np.bool_]  # of events
_TRIED = 6  # depths at which the head may end
_NONE = -1


@dataclass(frozen=True)
class Repetition:
    """Head, block and tail of a schedule, which has `few` microbatches without any block, and `step` more with each."""

    few: int
    step: int
    head: Segment
    block: Segment
    tail: Segment

    def graph(self, m: int) -> RepeatingGraph:
        """Returns the graph of m microbatches, `few` and a multiple of `step`."""
        return RepeatingGraph(self.head, self.block, self.tail, (m - self.few) // self.step)


def find_repetition(
    computations: Callable[[int], Schedule],
    whole: Callable[[int], Schedule],
    few: int,
    step: int,
    *,
    num_buckets: int,
    blocking: bool,
    exchanges: int = 0,
) -> Repetition | None:
    """Returns the parts of the schedule with `few` microbatches without blocks, or None if it has no such block.

    computations: from a number of microbatches to the schedule. whole: the same with transfers and copies.
    """
    short, middle, long = (computations(m) for m in (few, few + step, few + 2 * step))
    places = _places(short.actions, middle.actions, long.actions, step)
    if places is None:
        return None
    events = Events(whole(few + 2 * step), num_buckets, blocking, exchanges)
    limits = _depths(events, long.actions, places)
    if limits is None:
        return None
    waits, later = Waits.of(events), _later_events(events, step)
    _, names, counts = np.unique(events.name, return_inverse=True, return_counts=True)
    in_a_block = np.where(counts > 1, step, 0)  # what happens once belongs to the last backward
    for depth in np.unique(np.linspace(*limits, _TRIED).astype(int)):
        head = waits.depth <= depth
        block = _moved(head, later) & ~head
        if not np.array_equal(np.bincount(names[block], minlength=len(counts)), in_a_block):
            continue
        segments = _parts(waits, later, head, block)
        if segments is not None:
            return Repetition(few, step, *segments)
    return None


def _parts(waits: Waits, later: _Places, head: _Mask, first: _Mask) -> tuple[Segment, Segment, Segment] | None:
    """Returns head, block and tail, or None if the second block is not like the first one."""
    second = _moved(first, later)
    block = np.flatnonzero(first)
    next_block = later[block]
    if (
        (second & (head | first)).any()
        or (next_block == _NONE).any()
        or (waits.cost[next_block] != waits.cost[block]).any()
        or (waits.counts[next_block] != waits.counts[block]).any()
        or (waits.events[next_block] != later[waits.events[block]]).any()
    ):
        return None
    borders = _borders(waits, later, (head, first, second))
    if borders is None:
        return None
    begin, tail = np.array([BEGIN]), np.flatnonzero(~(head | first | second))
    return (
        Segment(waits, np.flatnonzero(head)[1:], begin, borders[0]),
        Segment(waits, block, borders[0], borders[1]),
        Segment(waits, tail, borders[2], borders[2]),
    )


def _borders(
    waits: Waits, later: _Places, parts: tuple[_Mask, _Mask, _Mask]
) -> tuple[_Places, _Places, _Places] | None:
    """Returns the events before each of the three ends that are read after it: those of the second and the third are
    the first ones' of later microbatches. None if that is not so."""
    earlier = np.full(len(later), _NONE)
    earlier[later[later != _NONE]] = np.flatnonzero(later != _NONE)
    inside = np.zeros(len(later), dtype=bool)
    border = np.zeros(len(later), dtype=bool)
    for number, part in enumerate(parts):
        inside = inside | part
        after_it = waits.events[~inside]
        read = np.unique(after_it[inside[after_it]])
        for _ in range(number):
            read = earlier[read]
            if (read == _NONE).any():
                return None
        border[read] = True
    first = np.flatnonzero(border)
    second = later[first]
    third = later[second]
    if border[BEGIN] or (second == _NONE).any() or (third == _NONE).any() or not parts[0][first].all():
        return None
    # Each is made in the block before, or kept from the border before.
    if not (parts[1][second] | border[second]).all() or not (parts[2][third] | np.isin(third, second)).all():
        return None
    return first, second, third


def _moved(members: _Mask, later: _Places) -> _Mask:
    """Returns the mask of the events of `members`, of later microbatches."""
    moved = np.zeros(len(members), dtype=bool)
    places = later[members]
    moved[places[places != _NONE]] = True
    return moved


def _later_events(events: Events, step: int) -> _Places:
    """Returns [E] the same event `step` microbatches later, or _NONE."""
    microbatch = np.array(events.microbatch)
    key = np.array(events.name) * (microbatch.max() + step + 1) + microbatch
    key[BEGIN] = -(step + 1)
    order = np.argsort(key)
    matches = np.minimum(np.searchsorted(key, key + step, sorter=order), len(key) - 1)
    places = order[matches]
    later: _Places = np.where(key[places] == key + step, places, _NONE)
    return later


def _places(short: _Lists, middle: _Lists, long: _Lists, step: int) -> list[tuple[int, int]] | None:
    """Returns the first and the last place of each rank's list where blocks may start, or None.

    The middle list of a rank is the short one with one block in it, and the long one has two.
    """
    places = []
    for few, longer, longest in zip(short, middle, long, strict=True):
        size = len(longer) - len(few)
        last = next((place for place, action in enumerate(few) if longer[place] != action), len(few))
        same = 0
        while same < len(few) and _later(few[-1 - same], step) == longer[-1 - same]:
            same += 1
        first = len(few) - same
        end = (_later(action, step) for action in longer[last:])
        if size < 1 or first > last or tuple(longest) != (*longer[: last + size], *end):
            return None
        places.append((first, last))
    return places


def _later(action: Action, step: int) -> Action:
    return Action(action.kind, action.stage, action.microbatch + step)


def _depths(events: Events, actions: _Lists, places: Sequence[tuple[int, int]]) -> tuple[int, int] | None:
    """Returns the least and the greatest depth at which each rank has run its list to one of its places, or None."""
    depth = dict(zip(zip(events.name, events.microbatch, strict=True), events.depth, strict=True))
    least, most = 0, max(events.depth)
    for rank_actions, (first, last) in zip(actions, places, strict=True):
        if first > 0:
            ended = rank_actions[first - 1]
            least = max(least, depth[events.name_of(STOP, ended), ended.microbatch])
        if last < len(rank_actions):
            begun = rank_actions[last]
            most = min(most, depth[events.name_of(STOP, begun), begun.microbatch] - 1)
    return (least, most) if least <= most else None
