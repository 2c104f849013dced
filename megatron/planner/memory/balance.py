"""Chooses what each layer keeps, recomputes or offloads: the fastest choice within a budget of activation memory.

Every layer has options: each says how many bytes the layer then keeps for backward, and how many seconds it adds. A
choice takes one option per layer, and its bytes and seconds are the sums over the layers. Only the Pareto front of all
choices matters: those that no other choice beats in both bytes and seconds. Megatron-Kwai (Yuan et al., USENIX ATC
2024) picks between fixed sets by hand; here every layer may differ.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

# Fraction of the range of bytes within which only the fastest partial choice is kept: the front is exact up to it.
_RESOLUTION = 1 / 1024


@dataclass(frozen=True)
class Option:
    """One way to treat a layer. nbytes: kept for the backward of one microbatch. seconds: added to this backward."""

    name: str
    nbytes: int
    seconds: float

    def held(self, times: float) -> Option:
        """Returns the option with its bytes for all microbatches that a rank holds at once."""
        return dataclasses.replace(self, nbytes=int(self.nbytes * times))


@dataclass(frozen=True)
class Choice:
    """An option for each layer, and the sums of their bytes and seconds."""

    nbytes: int
    seconds: float
    options: tuple[Option, ...]

    def counts(self) -> dict[str, int]:
        """Returns option -> number of layers that take it, in the order of first use."""
        found: dict[str, int] = {}
        for option in self.options:
            found[option.name] = found.get(option.name, 0) + 1
        return found


@dataclass(frozen=True)
class _Partial:
    """A choice for the first layers: an option for the last of them, and the partial choice for those before."""

    nbytes: int
    seconds: float
    option: Option | None = None
    before: _Partial | None = None

    def extended(self, option: Option) -> _Partial:
        return _Partial(self.nbytes + option.nbytes, self.seconds + option.seconds, option, self)

    def options(self) -> tuple[Option, ...]:
        found = []
        partial: _Partial | None = self
        while partial is not None and partial.option is not None:
            found.append(partial.option)
            partial = partial.before
        return tuple(reversed(found))


def front(layers: Sequence[Sequence[Option]]) -> list[Choice]:
    """Returns the Pareto front, from the most bytes and the least time to the fewest bytes.

    layers: the options of each layer.
    """
    widest = sum(max(option.nbytes for option in options) for options in layers)
    narrowest = sum(min(option.nbytes for option in options) for options in layers)
    step = max(1.0, (widest - narrowest) * _RESOLUTION)
    partials = [_Partial(0, 0.0)]
    for options in layers:
        useful = not_beaten(options)
        partials = _thinned([partial.extended(option) for option in useful for partial in partials], step)
    return [Choice(partial.nbytes, partial.seconds, partial.options()) for partial in partials]


def not_beaten(options: Sequence[Option]) -> list[Option]:
    """Returns the options that no other option beats in both bytes and time, from the most bytes to the fewest."""
    kept: list[Option] = []
    for option in sorted(options, key=lambda option: (option.nbytes, option.seconds)):
        if not kept or option.seconds < kept[-1].seconds:
            kept.append(option)
    return kept[::-1]


def cheapest(choices: Sequence[Choice], budget: float) -> Choice | None:
    """Returns the choice with the least time within `budget` bytes; None if no choice fits."""
    fitting = [choice for choice in choices if choice.nbytes <= budget]
    return min(fitting, key=lambda choice: (choice.seconds, choice.nbytes)) if fitting else None


def _thinned(partials: list[_Partial], step: float) -> list[_Partial]:
    """Returns the partial choices that none beats, at most one per `step` of bytes, from the most bytes to the fewest.

    The one with the fewest bytes is always kept, so whether a budget can be met at all is exact.
    """
    kept: list[_Partial] = []
    for partial in sorted(partials, key=lambda partial: (partial.nbytes, partial.seconds)):
        if kept and partial.seconds >= kept[-1].seconds:
            continue
        same_step = len(kept) > 1 and int(partial.nbytes / step) == int(kept[-1].nbytes / step)
        if same_step:
            kept.pop()
        kept.append(partial)
    return kept[::-1]
