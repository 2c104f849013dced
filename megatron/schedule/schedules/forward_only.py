"""All forwards without backwards, for evaluation."""

from __future__ import annotations

import dataclasses

from megatron.schedule.schedule import Kind, Schedule


def forward_only(schedule: Schedule) -> Schedule:
    """Returns the forwards of a training schedule, in its order. `schedule` holds computation only.

    With forwards of one unit and v stages per rank, round robin takes v m + p - 1 units if m >= p, and the V 2 m + 2 p
    - 2, there and back: the minimum.
    """
    ranks = (tuple(action for action in actions if action.kind is Kind.FORWARD) for actions in schedule.actions)
    return dataclasses.replace(schedule, name=f"{schedule.name}, forward only", actions=tuple(ranks))
