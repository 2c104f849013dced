"""The cost of a pipeline schedule that was simulated: seconds, bubbles and memory of each rank."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.schedule.simulate import SimulatedTimeline
from megatron.schedule.validate import memory_in_flight


@dataclass(frozen=True)
class RankReport:
    """One rank. Shares are of 1. bubble: of the step; idle_inside: between its first computation and its last.

    chunks: most (stage, microbatch) pairs whose activations are kept; microbatches: the same in microbatches of all the
    rank's layers; awaiting_weight_grad: the most pairs that wait for the second half of a split backward.
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
