"""Parses --space: the values that a search tries on some axes, as in "tp=1,2,4 pp=4 recompute=none,full:8"."""

from __future__ import annotations

import re
from typing import Any

from megatron.base.errors import ConfigError
from megatron.config.recompute import FULL, RECOMPUTE_MODULES
from megatron.planner.search.axis import KEEP_ALL
from megatron.planner.search.layout import AXES

_SWITCHES = {"on": True, "off": False}
_PARTIAL = re.compile(rf"{FULL}[:/][1-9]\d{{0,3}}")
_NUMBER = re.compile(r"\d{1,6}")


def parse_space(text: str) -> dict[str, tuple[Any, ...]]:
    """Returns the axes of the text with their values. Raises ConfigError with what is known."""
    choices: dict[str, tuple[Any, ...]] = {}
    for word in text.split():
        axis, equals, values = word.partition("=")
        axis = axis.replace("-", "_")
        if axis not in AXES:
            raise ConfigError(f"--space {word}: '{axis}' is no axis; it knows {', '.join(AXES)}")
        if axis in choices:
            raise ConfigError(f"--space {word}: {axis} is given twice; join its values with commas")
        if not equals or not values:
            raise ConfigError(f"--space {word}: {axis} has no values; give {axis}={_known(axis)}")
        choices[axis] = tuple(dict.fromkeys(_value(axis, value) for value in values.split(",")))
    return choices


def _value(axis: str, word: str) -> Any:
    neutral, names = AXES[axis].neutral, AXES[axis].names
    if isinstance(neutral, bool):
        if word in _SWITCHES:
            return _SWITCHES[word]
    elif isinstance(neutral, int):
        if _NUMBER.fullmatch(word) and int(word) >= neutral:
            return int(word)
    elif isinstance(neutral, float):
        try:
            if 0.0 <= float(word) <= 1.0:
                return float(word)
        except ValueError:
            pass
    elif names:
        if word in names:
            return word
    elif word in (KEEP_ALL, FULL) or _PARTIAL.fullmatch(word):
        return FULL if word == f"{FULL}/1" else word
    elif set(parts := word.split("+")) <= set(RECOMPUTE_MODULES):
        return "+".join(name for name in RECOMPUTE_MODULES if name in parts)
    raise ConfigError(f"--space {axis}={word}: '{word}' is no value of {axis}; give {_known(axis)}")


def _known(axis: str) -> str:
    """What the values of an axis may be, for messages."""
    neutral, names = AXES[axis].neutral, AXES[axis].names
    if isinstance(neutral, bool):
        return " or ".join(_SWITCHES)
    if isinstance(neutral, int):
        return f"whole numbers from {neutral} on"
    if isinstance(neutral, float):
        return "numbers from 0 to 1"
    if names:
        return ", ".join(names)
    return f"{KEEP_ALL}, {FULL}, {FULL}:N, {FULL}/N, or parts joined by +: {', '.join(RECOMPUTE_MODULES)}"
