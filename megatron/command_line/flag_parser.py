"""Flags generated from the configuration's dataclasses: their help, values, start-up listing, and parsers for tools.

Naming follows Megatron-LM: field `a_b` is `--a-b`. A boolean that is off by default is switched on by its bare flag,
and one that is on by default is switched off by `--no-a-b`. Tuples take several values.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.metadata
import platform
import re
import sys
import types
import typing
from collections.abc import Callable, Collection, Sequence
from dataclasses import Field
from typing import Any, NoReturn

from megatron.base.errors import ConfigError
from megatron.base.version import VERSION
from megatron.config.flag import flag_of, spelling
from megatron.config.interval import Interval, between
from megatron.config.presets import PRESETS
from megatron.config.run import PARTS, RunConfig, flag_fields

GROUP_TITLES = {
    "model": "model",
    "moe": "training of experts",
    "fp8": "FP8",
    "parallel": "parallelism and communication",
    "optimizer": "optimizer",
    "optimizer_offload": "optimizer offload",
    "activation_offload": "activation offload",
    "recompute": "activation recompute",
    "schedule": "learning-rate schedule",
    "data": "data",
    "tokenizer": "tokenizer",
    "train": "training",
    "rl": "reinforcement learning",
    "eval": "evaluation",
    "logging": "logging",
    "checkpoint": "checkpoints",
    "dry_run": "dry run",
}
_INT64, _FINITE = between(-(2**63), 2**63 - 1), Interval("finite", lambda x: True)
_METAVARS = {int: "N", float: "X", str: "TEXT"}


def build_parser(description: str) -> FlagParser:
    """Returns a parser whose namespace holds only explicitly given fields, without defaults."""
    parser = FlagParser(
        description=description,
        usage="%(prog)s [--preset NAME] [flags]",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=functools.partial(argparse.HelpFormatter, max_help_position=36),
    )
    parser.add_argument(
        "--preset",
        metavar="NAME",
        help="take a published model's shape, with the vocabulary of the run's own tokenizer; other flags win over it: "
        + ", ".join(PRESETS),
    )
    for part, cls in PARTS.items():
        group = parser.add_argument_group(GROUP_TITLES[part])
        hints = typing.get_type_hints(cls)
        for holder, spec in flag_fields().values():
            if holder == part:
                group.add_argument(*spellings_of(spec), **_argument(spec, hints[spec.name]))
    return parser


def add_config(parser: argparse.ArgumentParser, cls: type[Any]) -> None:
    """Adds the flags of one configuration class, with its defaults, to the parser of a tool."""
    hints = typing.get_type_hints(cls)
    for spec in dataclasses.fields(cls):
        words, properties = _argument(spec, hints[spec.name]), flag_of(spec)
        if properties is not None and properties.within is not None:
            words["type"] = within(plain_type(hints[spec.name]), properties.within)
        parser.add_argument(*spellings_of(spec), default=spec.default, **words)


def print_arguments(run: RunConfig) -> str:
    """Returns Megatron-LM's start-up listing of every argument, sorted case-insensitively."""
    lines = [f"  {name} {'.' * (48 - len(name))} {run.value(name)}" for name in sorted(flag_fields(), key=str.lower)]
    start = "------------------------ arguments ------------------------"
    end = "-------------------- end of arguments ---------------------"
    return "\n".join([start, *lines, end])


def spellings_of(spec: Field[Any]) -> tuple[str, ...]:
    """Returns every spelling of the flag of a field, its own first."""
    properties = flag_of(spec)
    return (spelling(spec), *(properties.aliases if properties else ()))


class FlagParser(argparse.ArgumentParser):
    """A parser that raises ConfigError where argparse would print its usage and exit.

    A tool's flag with `type=int` takes 64 bits; one with an Interval is declared with `type=within(int, interval)`, and
    one that names a file or folder with `type=path_word`.
    """

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self.add_argument(
            "--version", action=_PrintVersion, nargs=0, default=argparse.SUPPRESS, help="print the version and exit"
        )
        self.register("type", int, within(int, _INT64))
        self.register("type", float, within(float, _FINITE))

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parses like argparse after checking that the words can be printed and stored. Raises ConfigError."""
        words = sys.argv[1:] if args is None else list(args)
        for word in words:
            if any("\ud800" <= letter <= "\udfff" for letter in word):
                raise ConfigError(f"'{word}' is not UTF-8; give it in that encoding")
        return super().parse_known_args(words, namespace)

    def error(self, message: str) -> NoReturn:
        """Raises ConfigError with one line, instead of printing argparse's usage and message."""
        message = message.removeprefix("argument ")
        raise ConfigError(re.sub(r"expected (.+) argument(s?)$", r"needs \1 value\2 after it", message))

    @property
    def spellings(self) -> list[str]:
        """Returns every flag that this parser knows."""
        return list(self._option_string_actions)


class _PrintVersion(argparse.Action):
    """Prints the versions of this package, of Python and of the libraries that decide about numbers, and exits."""

    def __call__(self, parser: argparse.ArgumentParser, *args: Any, **keywords: Any) -> None:
        libraries = [f"{name} {importlib.metadata.version(name)}" for name in ("torch", "transformers", "numpy")]
        print(f"Megatron-Patched {VERSION} (Python {platform.python_version()}, {', '.join(libraries)})")
        parser.exit()


def _argument(spec: Field[Any], hint: Any) -> dict[str, Any]:
    """Returns the keywords of `add_argument` for a field of type `hint`."""
    properties = flag_of(spec)
    assert properties is not None
    words: dict[str, Any] = {"dest": spec.name, "help": _help(spec, properties.help)}
    kind = plain_type(hint)
    if kind is bool:
        return {**words, "action": "store_false" if spec.default is True else "store_true"}
    if typing.get_origin(kind) is tuple:
        kind = typing.get_args(kind)[0]
        words["nargs"] = properties.nargs or "+"
    listed = ",".join(map(str, properties.choices or ()))
    words["metavar"] = properties.metavar or (f"{{{listed}}}" if listed else _METAVARS[kind])
    words["type"] = _converter(kind, properties.choices)
    return words


def plain_type(hint: Any) -> Any:
    """Returns T for `T | None`, and any other type unchanged."""
    if isinstance(hint, types.UnionType):
        return next(kind for kind in typing.get_args(hint) if kind is not types.NoneType)
    return hint


def within(kind: type, interval: Interval) -> Callable[[str], Any]:
    """Returns the `type` of a tool's flag that takes numbers in `interval`."""
    convert = _converter(kind, None)

    def check(word: str) -> Any:
        value = convert(word)
        if not interval.holds(value):
            raise argparse.ArgumentTypeError(f"must be {interval.words}, got {word}")
        return value

    return check


def path_word(word: str) -> str:
    """The `type` of a tool's flag that names a file or folder. An empty word, which would mean the current one, is an
    error.
    """
    return str(_converter(str, None)(word))


def value_of(spec: Field[Any], kind: Any, flag: str, words: Sequence[str]) -> Any:
    """Returns the value of a field of type `kind` (see plain_type) from the words after its flag. Raises
    ConfigError."""
    properties = flag_of(spec)
    assert properties is not None
    several = typing.get_origin(kind) is tuple
    exact = properties.nargs if isinstance(properties.nargs, int) else None
    fewest = exact or (0 if properties.nargs == "*" else 1)
    if len(words) < fewest or (exact and len(words) > exact):
        count = f"{exact} values" if exact else "at least one value" if several else "one value"
        raise ConfigError(f"{flag}: needs {count} after it")
    if not several and len(words) > 1:
        extra = " ".join(words[1:])
        raise ConfigError(f"{flag}: '{extra}' belongs to no flag; remove it, or quote a value that has spaces")
    convert = _converter(typing.get_args(kind)[0] if several else kind, properties.choices)
    try:
        values = tuple(convert(word) for word in words)
    except argparse.ArgumentTypeError as error:
        raise ConfigError(f"{flag}: {error}") from None
    if properties.off is not None and properties.off.holds(values[0]):
        return None
    return values if several else values[0]


def _converter(kind: type, choices: Collection[Any] | None) -> Callable[[str], Any]:
    """Returns a converter from a word of the command line to a value. Its error quotes the word; argparse adds the
    flag.
    """
    wanted = {int: "a whole number", float: "a number", str: "text"}[kind]

    def convert(word: str) -> Any:
        try:
            value = _whole(word) if kind is int else kind(word)
        except ValueError:
            raise argparse.ArgumentTypeError(f"needs {wanted}, got '{word}'") from None
        if value == "":
            raise argparse.ArgumentTypeError("is empty; give it a value, or leave it out")
        if choices and value not in choices:
            alike = [choice for choice in choices if str(choice).lower() == word.lower()]
            if alike:
                return alike[0]
            listed = ", ".join(map(str, choices))
            raise argparse.ArgumentTypeError(f"'{word}' is not known; choose one of {listed}")
        return value

    return convert


def _whole(word: str) -> int:
    """Returns a whole number, which may be written as 2e8. Raises ValueError."""
    try:
        return int(word)
    except ValueError:
        value = float(word)
        if not value.is_integer():
            raise ValueError(word) from None
        return int(value)


def _help(spec: Field[Any], text: str) -> str:
    """Returns the field's help and its default; fields that default to None describe the default in their help text."""
    default = " ".join(map(str, spec.default)) if isinstance(spec.default, tuple) else spec.default
    shown = "" if default is None or isinstance(default, bool) else f" (default: {default})"
    return (text + shown).replace("%", "%%")
