"""Configurations that were stored in files: a field has a value of its type, within its interval, or the file is
refused."""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any, TypeVar

from megatron.config.flag import flag_of

T = TypeVar("T")


def from_json(cls: type[T], values: Any) -> T:
    """Returns the dataclass whose fields a JSON object holds; names that it does not have are left out.

    Raises ValueError naming the first field with a value that it cannot have.
    """
    if not isinstance(values, dict):
        raise ValueError(f"it holds {_shown(values)} where an object is expected")
    names = {field.name for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    # JSON has no tuples.
    held = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items() if name in names}
    try:
        config = cls(**held)
    except TypeError as error:
        raise ValueError(str(error)) from error
    check_fields(config)
    return config


def check_fields(config: Any) -> None:
    """Raises ValueError unless every field has a value of its type, in its interval and among its choices."""
    hints = typing.get_type_hints(type(config))
    for field in dataclasses.fields(config):
        value, flag = getattr(config, field.name), flag_of(field)
        if not _fits(value, hints[field.name]):
            raise ValueError(f"{field.name} is {_shown(value)}, not of type {field.type}")
        for item in value if isinstance(value, tuple) else (value,):
            if item is None or flag is None:
                continue
            if flag.within is not None and not flag.within.holds(item):
                raise ValueError(f"{field.name} is {_shown(item)}; it must be {flag.within.words}")
            if flag.choices is not None and item not in flag.choices:
                raise ValueError(
                    f"{field.name} is {_shown(item)}; it must be one of {', '.join(map(str, flag.choices))}"
                )


def _fits(value: Any, hint: Any) -> bool:
    if isinstance(hint, types.UnionType):
        return any(_fits(value, kind) for kind in typing.get_args(hint))
    if typing.get_origin(hint) is tuple:
        return isinstance(value, tuple) and all(_fits(item, typing.get_args(hint)[0]) for item in value)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(value, hint) and not (hint is int and isinstance(value, bool))


def _shown(value: Any) -> str:
    return repr(value)[:60]
