"""How a dataclass field says what its command-line flag is. `command_line/arguments.py` generates the parser from this."""

from __future__ import annotations

from dataclasses import Field, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Flag:
    """What argparse needs beyond the field's type and default.

    name: spelling when it is not the field's own (`--no-x` is derived for booleans that default to True).
    aliases: other spellings accepted. choices: allowed values. nargs: "+", "*" or a count for tuple fields.
    """

    help: str
    name: str | None = None
    aliases: tuple[str, ...] = ()
    choices: tuple[Any, ...] | None = None
    nargs: str | int | None = None
    metavar: str | None = None


def flag(
    default: Any,
    help: str,
    *,
    name: str | None = None,
    aliases: tuple[str, ...] = (),
    choices: tuple[Any, ...] | None = None,
    nargs: str | int | None = None,
    metavar: str | None = None,
) -> Any:
    """A dataclass field that is also a command-line flag."""
    return field(default=default, metadata={"flag": Flag(help, name, aliases, choices, nargs, metavar)})


def spelling(spec: Field[Any]) -> str:
    """The flag as it is typed: `--a-b` for field `a_b`, `--no-a-b` for a boolean that is on by default, or its own."""
    found = flag_of(spec)
    if found is not None and found.name is not None:
        return found.name
    dashed = spec.name.replace("_", "-")
    return f"--no-{dashed}" if spec.default is True else f"--{dashed}"


def flag_of(spec: Field[Any]) -> Flag | None:
    """The flag of a dataclass field, or None for a field that is set by the program."""
    found = spec.metadata.get("flag")
    return found if isinstance(found, Flag) else None
