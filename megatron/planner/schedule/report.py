"""Reports the cost of a simulated pipeline schedule: seconds, bubbles and memory of each rank."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.schedule.simulate import SimulatedTimeline
from megatron.schedule.validate import memory_in_flight


@dataclass(frozen=True)
class RankReport:
    """The figures of one rank.

    busy, exposed: seconds of computation, and of communication that is not overlapped with it. bubble: the idle
    fraction of the step. idle_inside: the idle fraction of the time between the rank's first and last computation.
    chunks: the most (stage, microbatch) pairs whose activations are kept at once. microbatches: the same in
    microbatches of all layers of the rank. awaiting_weight_grad: the most pairs that wait for the second half of a
    split backward.
    """

    rank: int
    stages: tuple[int, ...]
    busy: float
    bubble: float
    idle_inside: float
    exposed: float
    chunks: int
    microbatches: float
    awaiting_weight_grad: int


def report(timeline: SimulatedTimeline) -> list[RankReport]:
    """One row per rank."""
    rows = []
    for rank, in_flight in enumerate(memory_in_flight(timeline.schedule)):
        stages = timeline.schedule.placement.stages_of(rank)
        rows.append(
            RankReport(
                rank,
                stages,
                timeline.busy(rank),
                timeline.bubble(rank),
                timeline.idle_inside(rank),
                timeline.exposed[rank],
                in_flight.activations,
                in_flight.activations / len(stages),
                in_flight.awaiting_weight_grad,
            )
        )
    return rows
