"""A function from a Schedule to a Schedule that inserts the moves of activations to far memory and back.

The idea is Megatron-Kwai's (Yuan et al., USENIX ATC 2024, pipeline-parallel-aware offloading); here it is a pass, and
schedules know nothing of it.

[Note: where a move stands]
What a forward keeps starts to go out before the next computation of its rank, and to come back before the computation that
precedes its backward. Each move so has one computation to hide behind, and on each rank one group goes out and one comes
in at a time. A group that would not be away for one whole computation between is left where it is: moving it would save
nothing.

[Note: moves and messages]
A move stands behind all sends and receives of its place in the list. So a neighbour never waits for a message that is
queued behind a copy: the message is posted first, and what a send reads is only read by the copy too. A move holds up its
rank no more than a send does; it waits for computation of its own rank only, never for another rank, so it adds no way
for ranks to wait in a circle, and the order of transfers stays what `passes` promises.
"""

from __future__ import annotations

import dataclasses

from megatron.schedule.schedule import COMPUTE, GRADIENTS_OF_INPUT, Action, Kind, Schedule

# Computations from a forward to its backward: one for the way out, one away, one for the way back, and the backward.
APART = 4


def with_offload(schedule: Schedule) -> Schedule:
    """Add an OFFLOAD and a RELOAD for each forward whose backward is APART computations behind it or more.

    To be called last: `schedule` holds its transfers. An evaluation, which has no backward, is left as it is.
    """
    return dataclasses.replace(schedule, actions=tuple(map(_moved, schedule.actions)))


def moved_groups(actions: tuple[Action, ...]) -> frozenset[tuple[int, int]]:
    """(stage, microbatch) of what a rank's list moves."""
    return frozenset((action.stage, action.microbatch) for action in actions if action.kind is Kind.OFFLOAD)


def _moved(actions: tuple[Action, ...]) -> tuple[Action, ...]:
    """At one place what goes out stands before what comes in: its memory is given up the sooner."""
    computations = [action for action in actions if action.kind in COMPUTE]
    backward_at = {(a.stage, a.microbatch): i for i, a in enumerate(computations) if a.kind in GRADIENTS_OF_INPUT}
    before: dict[Action, list[Action]] = {}
    for number, action in enumerate(computations):
        back = backward_at.get((action.stage, action.microbatch), 0)
        if action.kind is Kind.FORWARD and back - number >= APART:
            out = Action(Kind.OFFLOAD, action.stage, action.microbatch)
            home = Action(Kind.RELOAD, action.stage, action.microbatch)
            before.setdefault(computations[number + 1], []).insert(0, out)
            before.setdefault(computations[back - 1], []).append(home)
    return tuple(step for action in actions for step in (*before.get(action, ()), action))
