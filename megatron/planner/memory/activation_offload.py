"""What activation offload saves and what it may cost, from a schedule and measured times. Pure arithmetic."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.config.activation_offload import RESIDENT_LAYERS
from megatron.schedule.offload_pass import with_offload
from megatron.schedule.schedule import Kind, Schedule
from megatron.schedule.simulate import Costs, SimulatedTimeline, simulate

_STEPS = 20  # ratios that `largest_hidden_ratio` tries
_SAME = 1 + 1e-6  # step times that count as one


@dataclass(frozen=True, kw_only=True)
class StageTimes:
    """The times of one microbatch on one stage: seconds, bytes saved for backward, and layers that move one by one."""

    forward: float
    backward: float  # all of it
    input_grad: float  # its first half, where it is split
    nbytes: int
    layers: int


def largest_hidden_ratio(schedule: Schedule, stages: Sequence[StageTimes], out: float, back: float) -> float:
    """The largest ratio, in steps of a twentieth, whose copies cost no time. `out`, `back`: bytes per second.

    The schedule, with its transfers, is played with the copies of each ratio: what the schedule moves must not make the
    step longer. What moves layer by layer must not take longer than the layer that overlaps it.
    """
    base = _play(schedule, stages, 0.0, 0.0).makespan
    with_moves = with_offload(schedule)
    largest = max(stage.nbytes for stage in stages)
    by_layer = min(
        min(out * stage.forward, back * (stage.input_grad or stage.backward)) / stage.nbytes
        for stage in stages
        if stage.nbytes
    )
    for step in range(_STEPS, 0, -1):
        ratio = step / _STEPS
        if ratio > by_layer and _moves_layers(with_moves, stages):
            continue
        seconds = ratio * largest / out, ratio * largest / back
        if _play(with_moves, stages, *seconds).makespan <= base * _SAME:
            return ratio
    return 0.0


def _moves_layers(schedule: Schedule, stages: Sequence[StageTimes]) -> bool:
    """Whether some group is moved by no action, and has layers to move."""
    counts = Counter(action.kind for actions in schedule.actions for action in actions)
    return counts[Kind.OFFLOAD] < counts[Kind.FORWARD] and any(stage.layers > RESIDENT_LAYERS for stage in stages)


def _play(schedule: Schedule, stages: Sequence[StageTimes], offload: float, reload: float) -> SimulatedTimeline:
    costs = Costs.uniform(len(stages), offload=offload, reload=reload)
    return simulate(
        schedule,
        dataclasses.replace(
            costs,
            forward=tuple(stage.forward for stage in stages),
            backward=tuple(stage.backward for stage in stages),
            input_grad=tuple(stage.input_grad for stage in stages),
            weight_grad=tuple(stage.backward - stage.input_grad for stage in stages),
        ),
    )
