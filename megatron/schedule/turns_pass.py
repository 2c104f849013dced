"""A pass over a Schedule that lets backwards run together with forwards, so that each hides the exchanges of the other.

DeepSeek-V3's DualPipe (arXiv 2412.19437, section 3.2.1) and Megatron-LM overlap the exchange of tokens between experts
in this way. There a layer is cut into parts by hand, and the order of the parts of two layers is fixed. Here a pair is
two neighbouring actions of a list, for which the engine takes turns at every exchange (core/streams/turns.py), so any
layer and any schedule with neighbouring forwards and backwards can have it.
"""

from __future__ import annotations

import dataclasses
import itertools

from megatron.schedule.schedule import Action, Kind, Schedule, can_run_together
from megatron.schedule.validate import stuck_at


def in_pairs(schedule: Schedule) -> Schedule:
    """Lets each backward run together with the forward behind it, if that is of another microbatch.

    Of a split backward it is the gradient of the input, and gradients of weights between the two come behind both. The
    two begin when both have their inputs, so with few microbatches ranks might wait for each other in a circle; then
    the backward of such a pair runs alone. `schedule` holds computation only.
    """
    schedule = dataclasses.replace(schedule, actions=tuple(map(_neighbours, schedule.actions)))
    firsts = {
        first
        for actions in schedule.actions
        for first, second in itertools.pairwise(actions)
        if can_run_together(first, second)
    }
    while True:
        paired = dataclasses.replace(schedule, with_next=frozenset(firsts))
        waiting = [action for action, _ in stuck_at(paired).values() if action in firsts]
        if not waiting:
            return paired
        firsts.remove(min(waiting, key=lambda action: (action.microbatch, action.stage)))


def _neighbours(actions: tuple[Action, ...]) -> tuple[Action, ...]:
    """Moves gradients of weights between a gradient of the input and a forward behind the forward."""
    result: list[Action] = []
    weight_grads: list[Action] = []  # since the last gradient of the input
    for action in actions:
        if action.kind is Kind.WEIGHT_GRAD and result and result[-1].kind is Kind.INPUT_GRAD:
            weight_grads.append(action)
        elif weight_grads and not can_run_together(result[-1], action):
            result += (*weight_grads, action)
            weight_grads = []
        else:
            result += (action, *weight_grads)
            weight_grads = []
    return (*result, *weight_grads)
