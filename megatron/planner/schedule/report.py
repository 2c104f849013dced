"""What a pipeline schedule comes to: seconds, bubbles and memory, beside what its paper promises."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.schedule.simulate import Timeline
from megatron.schedule.validate import memory_in_flight


@dataclass(frozen=True)
class RankReport:
    """One rank. Shares are of 1. bubble: of the step; idle_inside: between its first computation and its last.

    chunks: most (stage, microbatch) pairs whose activations are kept; microbatches: the same in microbatches of all the
    rank's layers; awaiting_weight_grad: most pairs that wait for the second half of a split backward.
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


def report(timeline: Timeline) -> list[RankReport]:
    """A row a rank."""
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


@dataclass(frozen=True)
class Formula:
    """The bubble's share of a step, as text and as a number."""

    text: str
    value: float


def bubble_formula(
    name: str, p: int, v: int, m: int, *, forward: float, input_grad: float, weight_grad: float
) -> Formula | None:
    """The published bubble of a schedule whose stages all take equally long, without communication; None without one.

    forward, input_grad, weight_grad: times of a rank's layers. For zb-v it is that of the whole step, with no rank idle
    between its first and last action: the last rank cannot begin before p - 1 chunks have been computed.
    """
    if name in ("gpipe", "1f1b"):
        return Formula("(p - 1) / (m + p - 1)", (p - 1) / (m + p - 1))
    if m < p:
        return None
    if name == "interleaved":
        return Formula("(p - 1) / (v m + p - 1)", (p - 1) / (v * m + p - 1))
    if name == "zb-h1" and weight_grad <= input_grad and weight_grad <= forward:
        idle = (p - 1) * (forward + input_grad - weight_grad)
        text = "(p - 1)(F + I - W) / (m (F + I + W) + (p - 1)(F + I - W))"
        return Formula(text, idle / (m * (forward + input_grad + weight_grad) + idle))
    if name == "zb-v" and forward == input_grad == weight_grad and m >= 2 * p - 1:
        return Formula("(p - 1) / (6 m + p - 1), 0 inside a rank", (p - 1) / (6 * m + p - 1))
    return None
