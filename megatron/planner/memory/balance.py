"""What each layer keeps, recomputes or offloads: the cheapest choice that fits a budget of activation memory.

Every layer offers options, each with what it then keeps for backward and the time it adds. A choice takes one option a
layer; its bytes and seconds are sums. Of all choices only those matter that no other beats in both: the Pareto front.
Megatron-Kwai (Yuan et al., USENIX ATC 2024) picks between fixed sets by hand; here every layer may differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# Of bytes, within which only the fastest partial choice is kept: the front is exact to this share of its width.
_RESOLUTION = 1 / 1024


@dataclass(frozen=True)
class Option:
    """One way to treat a layer. nbytes: kept for backward of one microbatch; seconds: added to its backward."""

    name: str
    nbytes: int
    seconds: float


@dataclass(frozen=True)
class Choice:
    """An option for each layer, and what they sum to."""

    nbytes: int
    seconds: float
    options: tuple[Option, ...]

    def counts(self) -> dict[str, int]:
        """Option -> how many layers take it, in order of first use."""
        found: dict[str, int] = {}
        for option in self.options:
            found[option.name] = found.get(option.name, 0) + 1
        return found


@dataclass(frozen=True)
class _Partial:
    """A choice for the first layers, as a chain."""

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
    """The Pareto front, from the most bytes and the least time to the least bytes. `layers`: the options of each."""
    widest = sum(max(option.nbytes for option in options) for options in layers)
    narrowest = sum(min(option.nbytes for option in options) for options in layers)
    step = max(1.0, (widest - narrowest) * _RESOLUTION)
    partials = [_Partial(0, 0.0)]
    for options in layers:
        useful = not_beaten(options)
        partials = _thinned([partial.extended(option) for option in useful for partial in partials], step)
    return [Choice(partial.nbytes, partial.seconds, partial.options()) for partial in partials]


def not_beaten(options: Sequence[Option]) -> list[Option]:
    """Those that no other matches in both bytes and time, from the most bytes to the least."""
    kept: list[Option] = []
    for option in sorted(options, key=lambda option: (option.nbytes, option.seconds)):
        if not kept or option.seconds < kept[-1].seconds:
            kept.append(option)
    return kept[::-1]


def cheapest(choices: Sequence[Choice], budget: float) -> Choice | None:
    """The least time within `budget` bytes; None when nothing fits."""
    fitting = [choice for choice in choices if choice.nbytes <= budget]
    return min(fitting, key=lambda choice: (choice.seconds, choice.nbytes)) if fitting else None


def _thinned(partials: list[_Partial], step: float) -> list[_Partial]:
    """Without those that are beaten, and with one for each `step` of bytes; from the most bytes to the least.

    The leanest is always kept: whether a budget can be met at all is exact.
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
