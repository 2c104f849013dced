"""Passes over a Schedule that insert transfers between the computations.

[Note: order of transfers]
There are two orders, for two kinds of transport; `validate.check` verifies them.

Without overlap, every transfer of the pipeline has a position in one global order: by the time at which its data is
computed when the schedule is simulated with unit costs and, for equal times, alternating pairs of neighbours, so that
pairs transfer at the same time and no chain of ranks forms. Every rank issues its sends and receives in this order.
Each transfer that a rank waits for is then earlier in the order than those that it delays, so no circular wait is
possible, even if a send and a receive both block the rank until the data has moved, and if one queue takes all
transfers of a rank: blocking calls, one NCCL communicator, gloo.

With overlap, receives are posted early, and such an order does not exist: 1F1B's neighbours would each post the receive
from the other before their send to it. Only the order within each direction between two ranks is guaranteed: sends and
receives of one direction have the same order at both ends. So sends must not block their rank, and the transport needs
a queue per direction: with NCCL two communicators, one for transfers to a higher rank and one for those to a lower,
which are made before the step (core/comm/connections.py); with gloo a tag each. Sends and receives must not be batched:
a group ends when its last transfer does.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Sequence
from typing import NamedTuple

from megatron.schedule.events import Events
from megatron.schedule.schedule import COMPUTE, SENDS, Action, Kind, Schedule, other_end

Order = tuple[float, int, int]
_UNIT_COSTS = {"forward": 1.0, "input_grad": 1.0, "weight_grad": 1.0, "backward": 2.0}


class _Insert(NamedTuple):
    """A transfer to be inserted before the computation number `place` of a rank.

    `order` is the time at which its data is computed, the turn of its pair of ranks, and the rank that computes it; a
    send and its receive have the same.
    """

    action: Action
    place: int
    order: Order


def with_transfers(schedule: Schedule, *, overlap: bool) -> Schedule:
    """Adds a send after and a receive before every computation whose result or input crosses ranks.

    With `overlap` a receive is one computation ahead of the one that needs it, also in warm-up and cool-down, so that
    the transfer is overlapped with computation; it is earlier if a later transfer in the same direction is needed
    sooner. Two computations that run together count as one. Otherwise it is directly before that computation, or
    earlier if the global order of all transfers requires it. [Note: order of transfers] states the guarantees.
    `schedule` holds computation only.
    """
    sends, receives = _transfers(schedule, ahead=1 if overlap else 0)
    ranks = []
    for actions, to_all, by_source in zip(schedule.actions, sends, receives, strict=True):
        if overlap:
            inserts = [insert for queue in by_source for insert in _none_after_a_later_one(queue)]
            inserts += sorted(to_all, key=operator.attrgetter("place", "order"))
        else:
            inserts = _none_after_a_later_one([*to_all, *itertools.chain.from_iterable(by_source)])
        ranks.append(_with_inserts(actions, inserts))
    return dataclasses.replace(schedule, actions=tuple(ranks))


def _transfers(schedule: Schedule, *, ahead: int) -> tuple[list[list[_Insert]], list[list[list[_Insert]]]]:
    """Returns of each rank its sends, and its receives by the rank that sends, at unit costs.

    ahead: computations between a receive and the one that needs it.
    """
    ranks, rank_of = range(schedule.placement.num_ranks), schedule.placement.rank_of
    turns = [[_turn(rank, peer, len(ranks)) for peer in ranks] for rank in ranks]
    units = [_bounds(schedule, rank) for rank in ranks]
    sends: list[list[_Insert]] = [[] for _ in ranks]
    receives: list[list[list[_Insert]]] = [[[] for _ in ranks] for _ in ranks]
    place_of: dict[tuple[Kind, int, int], int] = {}
    for actions in schedule.actions:
        place_of.update(zip(actions, range(len(actions)), strict=True))
    events = Events(schedule, num_buckets=0, blocking=False)
    times = events.times(_UNIT_COSTS)
    for rank, actions in enumerate(schedule.actions):
        for number, action in enumerate(actions):
            assert action.kind in COMPUTE, f"{schedule.name} holds {action} already"
            send = schedule.send_after(action)
            if send is None:
                continue
            receive = other_end(send)
            peer = rank_of[receive.stage]
            order = (times[events.done[action]], turns[rank][peer], rank)
            sends[rank].append(_Insert(send, units[rank][number].stop, order))
            needed = place_of.get((action.kind, receive.stage, action.microbatch))
            if needed is not None:  # else `validate.check` will refuse the schedule
                place = needed
                for _ in range(ahead):
                    place = units[peer][max(units[peer][place].start - 1, 0)].start
                receives[peer][rank].append(_Insert(receive, units[peer][place].start, order))
    return sends, receives


def _bounds(schedule: Schedule, rank: int) -> list[range]:
    """Returns for each computation of a rank the numbers of those of its unit, between which nothing is inserted."""
    bounds: list[range] = []
    for unit in schedule.units(rank):
        bounds += [range(len(bounds), len(bounds) + len(unit))] * len(unit)
    return bounds


def _turn(rank: int, peer: int, ranks: int) -> int:
    """Returns a colour of each pair of neighbours on the ring, such that no rank is in two pairs of one colour."""
    low, high = sorted((rank, peer))
    around = high - low > 1  # the last rank and the first
    return 2 if around and ranks % 2 else (high if around else low) % 2


def _none_after_a_later_one(queue: list[_Insert]) -> list[_Insert]:
    """Returns the queue in order, each at its own position or, if that is earlier, that of the next."""
    moved: list[_Insert] = []
    for insert in sorted(queue, key=operator.attrgetter("order"), reverse=True):
        if moved and insert.place > moved[-1].place:
            assert insert.action.kind not in SENDS, f"{insert.action} before its data is made"
            insert = insert._replace(place=moved[-1].place)
        moved.append(insert)
    return moved[::-1]


def _with_inserts(actions: Sequence[Action], inserts: Sequence[_Insert]) -> tuple[Action, ...]:
    """Inserts each transfer; those of one place in the order given."""
    at: dict[int, list[Action]] = {}
    for action, place, _ in inserts:
        at.setdefault(place, []).append(action)
    result: list[Action] = []
    for index, action in enumerate(actions):
        result += at.get(index, ())
        result.append(action)
    return (*result, *at.get(len(actions), ()))
