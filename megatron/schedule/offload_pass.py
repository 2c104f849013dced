"""A pass over a Schedule that inserts the offload of activations to host memory and their reload.

The idea is Megatron-Kwai's (Yuan et al., USENIX ATC 2024, pipeline-parallel-aware offloading); here it is a pass, and
schedules are independent of it.

[Note: position of a copy]
A forward's saved activations start to be offloaded before the next computation of their rank, and to be reloaded before
the computation that precedes their backward. So each copy is overlapped with one computation, and on each rank one
group is offloaded and one reloaded at a time. A group that would not be offloaded for one whole computation stays on
the device: offloading it would save nothing.

[Note: copies and messages]
A copy is placed after all sends and receives of its position in the list. So a neighbour never waits for a message that
is queued after a copy: the message is posted first, and a tensor that a send reads is only read by the copy, too. A
copy blocks its rank no more than a send does; it waits only for computation of its own rank, never for another rank, so
it adds no circular waits between ranks, and the order of transfers stays as `passes` guarantees.
"""

from __future__ import annotations

import dataclasses

from megatron.schedule.schedule import GRADIENTS_OF_INPUT, Action, Kind, Schedule

# The computations from a forward to its backward: one for the offload, one in between, one for the reload, and the
# backward. Two that run together count as one.
APART = 4


def with_offload(schedule: Schedule) -> Schedule:
    """Adds an OFFLOAD and a RELOAD for each forward whose backward is at least APART computations later.

    Call it last: `schedule` includes its transfers. An evaluation, which has no backward, is unchanged.
    """
    ranks = range(schedule.placement.num_ranks)
    return dataclasses.replace(
        schedule, actions=tuple(_moved(schedule.actions[rank], schedule.units(rank)) for rank in ranks)
    )


def moved_groups(actions: tuple[Action, ...]) -> frozenset[tuple[int, int]]:
    """Returns (stage, microbatch) of the groups that a rank's list offloads."""
    return frozenset((action.stage, action.microbatch) for action in actions if action.kind is Kind.OFFLOAD)


def _moved(actions: tuple[Action, ...], units: list[tuple[Action, ...]]) -> tuple[Action, ...]:
    """Inserts the copies of one rank. At one position offloads come before reloads, to free their memory sooner."""
    numbered = [(number, action) for number, unit in enumerate(units) for action in unit]
    backward_at = {(a.stage, a.microbatch): number for number, a in numbered if a.kind in GRADIENTS_OF_INPUT}
    before: dict[Action, list[Action]] = {}
    for number, action in numbered:
        back = backward_at.get((action.stage, action.microbatch), 0)
        if action.kind is Kind.FORWARD and back - number >= APART:
            out = Action(Kind.OFFLOAD, action.stage, action.microbatch)
            home = Action(Kind.RELOAD, action.stage, action.microbatch)
            before.setdefault(units[number + 1][0], []).insert(0, out)
            before.setdefault(units[back - 1][0], []).append(home)
    return tuple(step for action in actions for step in (*before.get(action, ()), action))
