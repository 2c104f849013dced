"""Declares the command-line flag of a dataclass field: `command_line/flag_parser.py` generates the parser from it, and
`config/rules` check its values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import Field, dataclass, field
from typing import Any

from megatron.config.interval import Interval


@dataclass(frozen=True)
class Need:
    """A condition without which a flag has no effect.

    `holds` checks the condition for a RunConfig; its argument has the type Any because RunConfig consists of the
    classes that declare the flags. `reason` completes "--x has no effect: ...". `fix` follows "remove it, or ...", or
    stands alone for a flag of the model.
    """

    holds: Callable[[Any], bool]
    reason: str | Callable[[Any], str]
    fix: str

    def reason_in(self, run: Any) -> str:
        """Returns the reason why the flag has no effect in a run."""
        return self.reason if isinstance(self.reason, str) else self.reason(run)


@dataclass(frozen=True, kw_only=True)
class Flag:
    """The properties of a flag that a command line needs in addition to the field's type and default.

    `name` is the spelling if it is not derived from the field (`--no-x` is derived for booleans that default to True).
    `aliases` are other accepted spellings. `choices` are the allowed values. `nargs` is "+", "*" or a count for tuple
    fields. `within` is the interval of allowed numbers, and `off` that of numbers that stand for None, as if the flag
    were not typed. `needs` are conditions without which the flag has no effect; the first that fails is reported.
    """

    help: str
    name: str | None = None
    aliases: tuple[str, ...] = ()
    choices: tuple[Any, ...] | None = None
    nargs: str | int | None = None
    metavar: str | None = None
    within: Interval | None = None
    off: Interval | None = None
    needs: tuple[Need, ...] = ()


def flag(
    default: Any,
    help: str,
    *,
    name: str | None = None,
    aliases: tuple[str, ...] = (),
    choices: tuple[Any, ...] | None = None,
    nargs: str | int | None = None,
    metavar: str | None = None,
    within: Interval | None = None,
    off: Interval | None = None,
    needs: Need | tuple[Need, ...] = (),
) -> Any:
    """Returns a dataclass field that is also a command-line flag."""
    properties = Flag(
        help=help,
        name=name,
        aliases=aliases,
        choices=choices,
        nargs=nargs,
        metavar=metavar,
        within=within,
        off=off,
        needs=(needs,) if isinstance(needs, Need) else needs,
    )
    return field(default=default, metadata={"flag": properties})


def on_by_default(*, when_off: str, name: str | None = None, needs: Need | tuple[Need, ...] = ()) -> Any:
    """Returns a boolean field that is True unless its flag, `--no-x` or `name`, is typed. `when_off` is the help
    text."""
    return flag(True, when_off, name=name, needs=needs)


def spelling(spec: Field[Any]) -> str:
    """Returns the flag as typed: `--a-b` for field `a_b`, `--no-a-b` for a boolean that is on by default, or its own
    name.
    """
    properties = flag_of(spec)
    if properties is not None and properties.name is not None:
        return properties.name
    dashed = spec.name.replace("_", "-")
    return f"--no-{dashed}" if spec.default is True else f"--{dashed}"


def flag_of(spec: Field[Any]) -> Flag | None:
    """Returns the flag of a dataclass field, or None for a field that the program sets."""
    properties = spec.metadata.get("flag")
    return properties if isinstance(properties, Flag) else None
