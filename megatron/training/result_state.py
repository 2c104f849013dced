"""The knowledge of a run about the numbers of its earlier steps. Saved in every checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from megatron.config.stored import from_json


@dataclass(frozen=True)
class UnresolvedStep:
    """A step with a suspicious number that no second machine has computed yet.

    layout: the sizes of the mesh, as text. rank: whose number it is. place: the host and device of the rank. results:
    its local results as hexadecimal text, because JSON has no infinity.
    """

    iteration: int
    layout: str
    rank: int
    place: str
    results: tuple[str, ...]

    @property
    def numbers(self) -> list[float]:
        """The results as numbers. Raises ValueError."""
        return [float.fromhex(text) for text in self.results]


@dataclass
class ResultState:
    """largest: of each local result in the first steps, of which `steps` have been seen. noise: the largest relative
    difference of each between two computations of a step, 0 before any was measured. left_out: iterations whose data
    was read and not trained on, or shall be. unresolved: a step that the next start of the run computes again."""

    steps: int = 0
    largest: tuple[float, ...] = (0.0, 0.0, 0.0)
    noise: tuple[float, ...] = (0.0, 0.0, 0.0)
    left_out: tuple[int, ...] = ()
    unresolved: UnresolvedStep | None = None

    @classmethod
    def of(cls, values: Any) -> ResultState:
        """Returns the state that a JSON object holds. Raises ValueError."""
        values = {} if values is None else values
        if not isinstance(values, dict):
            raise ValueError("the results are no object")
        state = from_json(cls, {**values, "unresolved": None})
        if not len(state.largest) == len(state.noise) == len(cls().largest):
            raise ValueError("the results of a step are not three numbers")
        if values.get("unresolved") is not None:
            state.unresolved = from_json(UnresolvedStep, values["unresolved"])
            if len(state.unresolved.numbers) != len(state.largest):
                raise ValueError("the results of a step are not three numbers")
        return state

    def to_dict(self) -> dict[str, Any]:
        """Returns the JSON object."""
        return dataclasses.asdict(self)

    def leave_out(self, iterations: Iterable[int]) -> None:
        """Adds iterations that are left out."""
        self.left_out = tuple(sorted({*self.left_out, *iterations}))

    def plan(self, iterations: Iterable[int] | None, done: int) -> None:
        """Takes the iterations of --iterations-to-skip for those behind the first `done`; None keeps those known."""
        if iterations is not None:
            self.left_out = tuple(iteration for iteration in self.left_out if iteration <= done)
            self.leave_out(iterations)
