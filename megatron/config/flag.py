"""How a dataclass field says what its command-line flag is: `command_line/arguments.py` generates the parser from this,
and `config/rules` hold the flag to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import Field, dataclass, field
from typing import Any

from megatron.config.interval import Interval


@dataclass(frozen=True)
class Need:
    """A condition without which a flag has no effect.

    holds: of a RunConfig, whether the condition holds; the type is Any because RunConfig consists of the classes that
    hold the flags. reason: completes "--x has no effect: ...". fix: follows "remove it, or ...".
    """

    holds: Callable[[Any], bool]
    reason: str | Callable[[Any], str]
    fix: str

    def reason_in(self, run: Any) -> str:
        """Why the flag has no effect in a run."""
        return self.reason if isinstance(self.reason, str) else self.reason(run)


@dataclass(frozen=True, kw_only=True)
class Flag:
    """What a command line needs beyond the field's type and default.

    name: spelling when it is not the field's own (`--no-x` is derived for booleans that default to True).
    aliases: other spellings accepted. choices: allowed values. nargs: "+", "*" or a count for tuple fields.
    within: numbers that are allowed. needs: conditions without which the flag has no effect; the first that fails is
    told.
    """

    help: str
    name: str | None = None
    aliases: tuple[str, ...] = ()
    choices: tuple[Any, ...] | None = None
    nargs: str | int | None = None
    metavar: str | None = None
    within: Interval | None = None
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
    needs: Need | tuple[Need, ...] = (),
) -> Any:
    """A dataclass field that is also a command-line flag."""
    found = Flag(
        help=help,
        name=name,
        aliases=aliases,
        choices=choices,
        nargs=nargs,
        metavar=metavar,
        within=within,
        needs=(needs,) if isinstance(needs, Need) else needs,
    )
    return field(default=default, metadata={"flag": found})


def on_by_default(*, when_off: str, name: str | None = None, needs: Need | tuple[Need, ...] = ()) -> Any:
    """A boolean field that is True unless its flag, `--no-x` or `name`, is typed. when_off: what the run then does."""
    return flag(True, when_off, name=name, needs=needs)


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
