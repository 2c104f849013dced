"""Checks that the value of each field is allowed, independent of other fields. See config/flag.py."""

from __future__ import annotations

from typing import Any

from megatron.config.flag import flag_of
from megatron.config.run import RunConfig, flag_fields, flag_name

_ENDLESS = 10**8  # a loop up to it takes minutes


def numbers_are_in_range(run: RunConfig) -> str | None:
    """Every number lies in the interval of its flag, and none is infinite or NaN."""
    for name, (_, spec) in flag_fields().items():
        properties = flag_of(spec)
        if properties is None or properties.within is None:
            continue
        for value in _values(run.value(name)):
            if not properties.within.holds(value):
                return f"{flag_name(name)} must be {properties.within.words}, got {value}"
    return None


def numbers_are_endless(run: RunConfig) -> bool:
    """Whether a whole number is so large, and out of its range, that counting up to it would take minutes."""
    return any(
        isinstance(value, int) and value > _ENDLESS and not properties.within.holds(value)
        for name, (_, spec) in flag_fields().items()
        if (properties := flag_of(spec)) is not None and properties.within is not None
        for value in _values(run.value(name))
    )


def values_are_known(run: RunConfig) -> str | None:
    """Fields with choices hold one of them, also if the value is from a preset, which no parser checks."""
    for name, (_, spec) in flag_fields().items():
        properties = flag_of(spec)
        if properties is None or properties.choices is None:
            continue
        for value in _values(run.value(name)):
            if value not in properties.choices:
                return f"{flag_name(name)} must be one of {', '.join(map(str, properties.choices))}, got {value}"
    return None


def _values(value: Any) -> tuple[Any, ...]:
    """Returns the value of a field, the elements of a tuple, or nothing if it is not set."""
    if value is None:
        return ()
    return value if isinstance(value, tuple) else (value,)
