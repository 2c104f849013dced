"""The rule by which a number of a step is suspicious, and by which two computations of it agree. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.training.result_state import ResultState

# Megatron-LM's: a number is suspicious from FACTOR times the largest of the first STEPS on.
FACTOR, STEPS = 10, 100
# The relative difference that two computations of a number may have where kernels are not deterministic, or on two
# machines, whose libraries may choose other kernels: Megatron-LM's for gradients. A fault that makes a number FACTOR
# times as large differs by more.
TOLERANCE = 1e-3
# Measured differences count twice, because the next one may be larger.
MARGIN = 2

Results = Sequence[float]  # of a rank, see [Note: local results]


@dataclass(frozen=True)
class Suspect:
    """A suspicious number. kind: which of the local results. why: completes "... is VALUE, which is"."""

    kind: int
    value: float
    rank: int
    why: str


class ResultRule:
    """checked: whether each of the local results is compared with those of the first steps. finite: whether each has to
    be finite."""

    def __init__(self, state: ResultState, checked: Sequence[bool], finite: Sequence[bool], *, exact: bool) -> None:
        """exact: two computations of a step on one machine give the same bits."""
        self._state, self._checked, self._finite, self._exact = state, checked, finite, exact

    def suspects(self, values: Results, ranks: Sequence[float]) -> list[Suspect]:
        """Returns the suspicious ones of the largest numbers of a step, those of `ranks`."""
        suspects = []
        for kind, (value, rank) in enumerate(zip(values, ranks, strict=True)):
            why = self._why(kind, value)
            if why is not None:
                suspects.append(Suspect(kind, value, int(rank), why))
        return suspects

    def learn(self, values: Results) -> None:
        """Takes the largest numbers of a step as usual ones, in the first steps of a run."""
        state = self._state
        if state.steps < STEPS:
            state.steps += 1
            state.largest = tuple(
                max(before, value) if math.isfinite(value) else before
                for before, value in zip(state.largest, values, strict=True)
            )

    def note_noise(self, first: Results, second: Results) -> list[float]:
        """Remembers how much two computations of a step differ, and returns the differences."""
        differences = [difference(a, b) for a, b in zip(first, second, strict=True)]
        self._state.noise = tuple(map(max, self._state.noise, differences))
        return differences

    def differing(self, first: Results, second: Results, *, elsewhere: bool = False) -> list[int]:
        """Returns the kinds of results in which two computations of a step differ by more than the tolerance.
        elsewhere: they are of two machines."""
        pairs = enumerate(zip(first, second, strict=True))
        exact = self._exact and not elsewhere
        return [kind for kind, (a, b) in pairs if difference(a, b) > (0.0 if exact else self._tolerance(kind))]

    def _tolerance(self, kind: int) -> float:
        return max(TOLERANCE, MARGIN * self._state.noise[kind])

    def _why(self, kind: int, value: float) -> str | None:
        state = self._state
        if not math.isfinite(value):
            return "not finite" if self._finite[kind] else None
        if not self._checked[kind] or state.steps < STEPS or not state.largest[kind]:
            return None
        if value < FACTOR * state.largest[kind]:
            return None
        return f"at least {FACTOR} times {state.largest[kind]:.4g}, the largest of the first {STEPS} steps"


def difference(a: float, b: float) -> float:
    """Returns the relative difference; 0 for two equal numbers or two NaN, infinity where one is not finite."""
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    if not (math.isfinite(a) and math.isfinite(b)):
        return math.inf
    return abs(a - b) / max(abs(a), abs(b))
