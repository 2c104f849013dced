"""Chooses the ratio of --pipeline-offload-ratio auto from a schedule and measured times. Pure arithmetic."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.config.activation_offload import RESIDENT_LAYERS
from megatron.schedule.costs import Costs, column
from megatron.schedule.offload_pass import with_offload
from megatron.schedule.schedule import Kind, Schedule
from megatron.schedule.simulate import SimulatedTimeline, simulate

_STEPS = 20  # ratios that `largest_hidden_ratio` tries
_SAME = 1 + 1e-6  # step times that count as one


@dataclass(frozen=True, kw_only=True)
class StageTimes:
    """The times of one microbatch on one stage in seconds, with the bytes that it saves and the number of layers.

    backward: of the whole backward. input_grad: of its first half, or 0 if it is not split.
    """

    forward: float
    backward: float
    input_grad: float
    nbytes: int
    layers: int


def largest_hidden_ratio(schedule: Schedule, stages: Sequence[StageTimes], out: float, back: float) -> float:
    """Returns the largest ratio, in steps of a twentieth, whose copies are fully overlapped with compute.

    schedule: with its transfers. stages: times of each stage. out, back: bytes per second to the host and to the
    device. The schedule is simulated with the copies of each ratio: those of its offload actions must not make the step
    longer. Copies layer by layer must not take longer than the layer that they are overlapped with.
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
    """Returns whether some group has no offload action and more layers than stay resident, so that layers move."""
    counts = Counter(action.kind for actions in schedule.actions for action in actions)
    return counts[Kind.OFFLOAD] < counts[Kind.FORWARD] and any(stage.layers > RESIDENT_LAYERS for stage in stages)


def _play(schedule: Schedule, stages: Sequence[StageTimes], offload: float, reload: float) -> SimulatedTimeline:
    costs = Costs.uniform(len(stages), offload=offload, reload=reload)
    return simulate(
        schedule,
        dataclasses.replace(
            costs,
            forward=column([stage.forward for stage in stages]),
            backward=column([stage.backward for stage in stages]),
            input_grad=column([stage.input_grad for stage in stages]),
            weight_grad=column([stage.backward - stage.input_grad for stage in stages]),
        ),
    )
