"""What is known of a script's variables at one place of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from megatron.command_line.shell.syntax import Statement
from megatron.command_line.shell.unknown import is_known, mark

Array = dict[str, str]  # by index, which of a plain array are numbers as text


@dataclass
class Scope:
    """Variables, arguments and functions. `own`: names that the script sets somewhere, if perhaps not on this path."""

    variables: dict[str, str | Array] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    own: frozenset[str] = frozenset()
    functions: dict[str, Statement] = field(default_factory=dict)

    def with_arguments(self, arguments: tuple[str, ...]) -> Scope:
        """The same variables and functions under other arguments, as in the body of a function."""
        return replace(self, arguments=arguments)

    def child(self, arguments: tuple[str, ...]) -> Scope:
        """Copies for a script that is started: what it sets stays there."""
        return replace(self, variables=dict(self.variables), functions={}, arguments=arguments)

    def is_set(self, name: str) -> bool:
        """Whether the name has a value, be it unknown."""
        if name.isdigit() and name != "0":
            return int(name) <= len(self.arguments)
        return name in self.variables or name in ("@", "*", "#", "?", "0")

    def text(self, name: str) -> str:
        """The value of a name: of an array its first element, of a name that nobody set the name itself, as unknown.

        A name that the script sets on another path is empty. So are missing arguments when some are given.
        """
        if name == "#":
            return str(len(self.arguments))
        if name in ("@", "*"):
            return " ".join(self.arguments)
        if name == "?":
            return "0"
        if name.isdigit() and name != "0" and self.arguments:
            return self.arguments[int(name) - 1] if self.is_set(name) else ""
        value = self.variables.get(name)
        if isinstance(value, dict):
            return value.get("0", "")
        if value is not None:
            return value
        return "" if name in self.own else mark(f"${{{name}}}" if len(name) > 1 and name.isdigit() else f"${name}")

    def array(self, name: str) -> list[str]:
        """All elements: of plain text one, of a name that nobody set itself as unknown."""
        if name in ("@", "*"):
            return list(self.arguments)
        value = self.variables.get(name)
        if isinstance(value, dict):
            return list(value.values())
        if value is None:
            return [] if name in self.own else [mark(f"${{{name}[@]}}")]
        return [value]

    def assign(self, name: str, value: str | Array, index: str | None, append: bool) -> None:
        """`name=value`, with an index of one element, with `append` behind what is there."""
        before = self.variables.get(name)
        if index is not None:
            array = before if isinstance(before, dict) else {}
            former = array.get(index, "") if append else ""
            self.variables[name] = {**array, index: former + value} if isinstance(value, str) else array
        elif not append:
            self.variables[name] = value
        elif isinstance(value, dict):
            array = before if isinstance(before, dict) else dict(enumerate_text([self.text(name)] if before else []))
            start = 1 + max((int(key) for key in array if key.isdigit()), default=-1)
            moved = {str(start + int(key)) if key.isdigit() else key: text for key, text in value.items()}
            self.variables[name] = {**array, **moved}
        elif isinstance(before, dict):
            self.variables[name] = {**before, "0": before.get("0", "") + value}
        else:
            self.variables[name] = self.text(name) + value

    def number(self, name: str) -> int | None:
        """A variable's value in arithmetic: that of an empty one is 0."""
        text = self.text(name).strip()
        if not is_known(text):
            return None
        digits = text.removeprefix("-")
        return int(text) if digits.isdecimal() else (0 if not text else None)


def enumerate_text(texts: list[str]) -> list[tuple[str, str]]:
    """(index, text) of an array's elements."""
    return [(str(index), text) for index, text in enumerate(texts)]


def scope_of(environment: Mapping[str, str], arguments: tuple[str, ...]) -> Scope:
    """At the start of a script."""
    return Scope(dict(environment), arguments)
