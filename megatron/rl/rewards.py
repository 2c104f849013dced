"""The values that pass between training and the processes that compute rewards. No torch: they import this, too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron.base.errors import ConfigError
from megatron.rl.user_functions import file_and_function

BUILT_IN = ("exact", "regex", "number", "length")
DEFAULT_FUNCTION = "reward"
FILE_FLAG, NAME_FLAG = "--custom-rm-path", "--rm-type"


@dataclass(frozen=True, kw_only=True)
class RewardSource:
    """The function that computes rewards: a built-in one by its name, or `function` of the Python file `path`.

    `argument` belongs to built-in functions: the pattern of `regex` or the number of characters of `length`, which is
    otherwise the label of the prompt. `settings` are what functions of slime's form read from `args`.
    """

    built_in: str | None = None
    path: str | None = None
    function: str = DEFAULT_FUNCTION
    argument: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        """Returns the flag that names the function, with its value."""
        if self.built_in is not None:
            return f"{NAME_FLAG} {self.built_in}"
        return f"{FILE_FLAG} {self.path}:{self.function}"

    @property
    def needs_label(self) -> bool:
        """Whether every prompt must have a label."""
        return self.built_in is not None and self.argument is None


def built_in_source(name: str, argument: str | None = None) -> RewardSource:
    """Returns the built-in function of a name. Raises ConfigError for another name."""
    if name not in BUILT_IN:
        raise ConfigError(f"{NAME_FLAG} is {name}, which is none of {', '.join(BUILT_IN)}; give {FILE_FLAG} for a file")
    return RewardSource(built_in=name, argument=argument)


def file_source(text: str, settings: Mapping[str, Any] | None = None) -> RewardSource:
    """Returns the function that `file.py` or `file.py:function` names. Raises ConfigError for a file that does not
    exist.
    """
    path, function = file_and_function(FILE_FLAG, text, DEFAULT_FUNCTION)
    return RewardSource(path=path, function=function, settings=dict(settings or {}))


@dataclass(frozen=True)
class Reward:
    """The reward of one answer. `figures` are further numbers for the log.

    `failure` is the reason if the function failed, and `score` is then the number that replaces it.
    """

    score: float
    figures: Mapping[str, float] = field(default_factory=dict)
    failure: str | None = None


@dataclass(frozen=True)
class RewardBatch:
    """The rewards of a call, in the order of its answers."""

    rewards: tuple[Reward, ...]

    @property
    def scores(self) -> list[float]:
        """The score of every answer."""
        return [reward.score for reward in self.rewards]

    @property
    def failures(self) -> int:
        """The number of answers for which the function failed."""
        return sum(reward.failure is not None for reward in self.rewards)

    def mean_figures(self) -> dict[str, float]:
        """Returns the mean of every figure, over the answers that have it, by name."""
        values: dict[str, list[float]] = {}
        for reward in self.rewards:
            for name, value in reward.figures.items():
                values.setdefault(name, []).append(value)
        return {name: _mean(numbers) for name, numbers in sorted(values.items())}


def _mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers)
