"""The known variables of a script at one point of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from megatron.base.errors import ConfigError
from megatron.tooling.launch_script.shell.arithmetic import number_in
from megatron.tooling.launch_script.shell.syntax import Statement
from megatron.tooling.launch_script.shell.unknown import is_known, mark, split

# The system's limits for one argument and for all of a command: a script can double a text a hundred times.
MOST_TEXT, MOST_ELEMENTS = 2**17, 2**21
Array = dict[str, str]  # by index; the indices of an indexed array are numbers as text


@dataclass
class Scope:
    """Variables, arguments and functions.

    `script_names` holds names that the script sets somewhere, possibly on another path.
    """

    variables: dict[str, str | Array] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    script_names: frozenset[str] = frozenset()
    functions: dict[str, Statement] = field(default_factory=dict)
    exported: set[str] = field(default_factory=set)  # names that started scripts see; "*" after `set -a`
    script: str = ""  # the running script, $0, by the name used to open it
    file: str = ""  # the file that is read, BASH_SOURCE: the script or what it sources
    unread_sources: list[str] = field(default_factory=list)  # files that could not be read, and may have set variables

    def separators(self) -> str:
        """Returns the characters at which unquoted values are split."""
        characters = self.variables.get("IFS", " \t\n")
        return characters if isinstance(characters, str) and is_known(characters) else " \t\n"

    def split(self, text: str) -> list[str]:
        """Splits an unquoted value into fields. Raises ConfigError for an IFS that mixes blanks and other
        characters."""
        separators = self.separators()
        if not separators.strip(" \t\n") and set(separators) >= {" ", "\n"}:
            return split(text)
        if not any(char in text for char in {*separators, " ", "\t", "\n"}):
            return split(text)
        if not separators:
            return [text]
        if len(separators) == 1 and not separators.isspace() and text[:1] != separators and is_known(text):
            return text.removesuffix(separators).split(separators)
        raise ConfigError("the script sets IFS and splits values by it; give the training command itself")

    def with_arguments(self, arguments: tuple[str, ...]) -> Scope:
        """Returns the same variables and functions with other arguments, as in the body of a function."""
        return replace(self, arguments=arguments)

    def child(self, arguments: tuple[str, ...]) -> Scope:
        """Returns copies for a started script, whose changes do not affect this scope; it sees exported variables."""
        passed: dict[str, str | Array] = {
            name: value
            for name, value in self.variables.items()
            if isinstance(value, str) and ("*" in self.exported or name in self.exported or name.startswith(" "))
        }
        return replace(self, variables=passed, functions={}, arguments=arguments, exported=set(passed))

    def is_set(self, name: str) -> bool:
        """Returns whether the name has a value, which may be unknown."""
        if name.isdigit() and name != "0":
            return int(name) <= len(self.arguments)
        return name in self.variables or name in ("@", "*", "#", "?", "0")

    def text(self, name: str) -> str:
        """Returns the value of a name: of an array its first element, of an unset name the name itself, marked as
        unknown.

        A name that the script sets on another path is empty. So are missing arguments if some are given.
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
        return (
            ""
            if name in self.script_names
            else mark(f"${{{name}}}" if len(name) > 1 and name.isdigit() else f"${name}")
        )

    def array(self, name: str) -> list[str]:
        """Returns all elements: plain text is one element. An unset name has none, as in bash: arrays are not exported;
        but it is one unknown element behind a file that could not be read.
        """
        if name in ("@", "*"):
            return list(self.arguments)
        value = self.variables.get(name)
        if isinstance(value, dict):
            if all(key.isdigit() for key in value):
                return [value[key] for key in sorted(value, key=int)]
            return list(value.values()) if len(value) == 1 else [mark(f"${{{name}[@]}}")]  # in the order of a hash
        if value is None:
            return [mark(f"${{{name}[@]}}")] if self.unread_sources and name not in self.script_names else []
        return [value]

    def assign(self, name: str, value: str | Array, index: str | None, append: bool) -> None:
        """Assigns `name=value`; `index` sets one element, `append` adds to the existing value.

        Raises ConfigError for a value that is longer than a command may be.
        """
        self._assign(name, value, index, append=append)
        held = self.variables[name]
        size = len(held) if isinstance(held, str) else sum(len(key) + len(text) for key, text in held.items())
        if size > (MOST_TEXT if isinstance(held, str) else MOST_ELEMENTS):
            raise ConfigError(f"the script makes {name} longer than a command may be; give the training command itself")

    def _assign(self, name: str, value: str | Array, index: str | None, *, append: bool) -> None:
        before = self.variables.get(name)
        if index is not None:
            array = before if isinstance(before, dict) else {"0": before} if before else {}
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

    def remove(self, word: str) -> None:
        """Does what `unset` does with a name, or with an element as `name[index]`."""
        name, bracket, index = word.removesuffix("]").partition("[")
        array = self.variables.get(name)
        if not bracket:
            self.variables.pop(name, None)
        elif isinstance(array, dict):
            self.variables[name] = {key: text for key, text in array.items() if key != index}

    def number(self, name: str) -> int | None:
        """Returns a variable's value in arithmetic; an empty one is 0."""
        text = self.text(name).strip()
        if not is_known(text):
            return None
        value = number_in(text.removeprefix("-")) if text else 0
        return -value if value is not None and text.startswith("-") else value


def enumerate_text(texts: list[str]) -> list[tuple[str, str]]:
    """Returns (index, text) of an array's elements."""
    return [(str(index), text) for index, text in enumerate(texts)]


def scope_of(environment: Mapping[str, str], arguments: tuple[str, ...], script: str) -> Scope:
    """Returns the scope at the start of a script."""
    return Scope({"IFS": " \t\n", **environment}, arguments, exported=set(environment), script=script, file=script)
