"""Pipeline schedules as data: the actions of one stage in order. Pure; the engine runs the list."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """What an action does with its microbatch."""

    FORWARD = "F"
    BACKWARD = "B"


@dataclass(frozen=True)
class Action:
    """One unit of work of a stage."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind.value}{self.microbatch}"


def one_forward_one_backward(stage: int, num_stages: int, num_microbatches: int) -> list[Action]:
    """1F1B (Narayanan et al., arXiv 2104.04473): warm-up forwards until a backward can come back, then alternate.

    With one stage this is forward, backward, forward, backward: one microbatch's activations alive at a time.
    """
    warm_up = min(num_stages - stage - 1, num_microbatches)
    forwards = [Action(Kind.FORWARD, stage, m) for m in range(num_microbatches)]
    backwards = [Action(Kind.BACKWARD, stage, m) for m in range(num_microbatches)]
    actions = forwards[:warm_up]
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        actions += [forward, backward]
    return actions + backwards[num_microbatches - warm_up :]


def forward_only(stage: int, num_microbatches: int) -> list[Action]:
    """Every forward, no backward: evaluation."""
    return [Action(Kind.FORWARD, stage, m) for m in range(num_microbatches)]
