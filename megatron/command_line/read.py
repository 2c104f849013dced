"""Converts the words of a command line to a configuration, and records the outcome of every flag. No torch.

Command lines for Megatron-LM or its forks are accepted unchanged: `config/flag_table.csv` determines the outcome of
each flag that is not this program's. Common spellings are accepted: underscores for dashes, `--a=b`, `--disable-x` for
`--no-x`, `true` and `false` after a switch, whole numbers as 2e8. All mistakes are reported at once.
"""

from __future__ import annotations

import functools
import re
import typing
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import Field, dataclass, replace
from difflib import get_close_matches
from typing import Any

from megatron.base.errors import ConfigError
from megatron.command_line.depending_flags import meanings
from megatron.command_line.flag_parser import build_parser, plain_type, spellings_of, value_of
from megatron.command_line.listed_datasets import listed_datasets
from megatron.config.features.feature import Note
from megatron.config.flag import flag_of
from megatron.config.flag_table import ALIAS, NOOP, READ, REFUSE, SAME, find_row, flag_table, is_listed
from megatron.config.presets import PRESETS, preset
from megatron.config.run import PARTS, RunConfig, flag_fields, flag_name

UNKNOWN = "unknown"
_SWITCHED = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}
# The similarity at which an unknown flag is taken for a misspelling of any flag, and for another name of one of ours.
_MISSPELLED, _SIMILAR = 0.9, 0.7
PRESET = "--preset"


@dataclass(frozen=True)
class TypedFlag:
    """A flag as written on the command line, and the words after it."""

    flag: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        return " ".join((self.flag, *self.words))


@dataclass(frozen=True)
class Outcome:
    """The outcome of a flag.

    `kind` is read, same, noop, refuse, alias or unknown. `meant` holds the words of this program for a read flag or an
    alias. `in_effect` is the behaviour in effect instead of a noop. `why` is the reason, or the mistake.
    """

    typed: TypedFlag
    kind: str
    meant: tuple[str, ...] = ()
    in_effect: str = ""
    why: str = ""


@dataclass(frozen=True)
class CommandLine:
    """A parsed command line. `run` holds the valid values; it is complete only if there are no problems."""

    run: RunConfig
    outcomes: tuple[Outcome, ...]
    problems: tuple[str, ...]  # one line per problem

    @property
    def is_whole(self) -> bool:
        """Whether all values could be read, so that the rules can check the run: at most some flags are unavailable."""
        unavailable = {outcome.why for outcome in self.outcomes if outcome.kind in (REFUSE, UNKNOWN)}
        return set(self.problems) <= unavailable | {note.refusal for note in self.run.notes}


def parse(argv: Sequence[str], *, description: str) -> RunConfig:
    """Returns the configuration for `argv` (without the program's name), not yet checked by `config.rules`.

    Raises ConfigError with one line per mistake. `--help` prints and exits.
    """
    help_if_asked(argv, description)
    line = read(argv)
    if line.problems:
        raise ConfigError(*line.problems)
    return line.run


def help_if_asked(argv: Sequence[str], description: str) -> None:
    """Prints every flag, or the version, and exits if the words ask for it."""
    for word in {"-h", "--help", "--version"} & set(argv):
        build_parser(description).parse_args([word])


def read(argv: Sequence[str]) -> CommandLine:
    """Returns every flag of `argv` with its outcome. Raises nothing: mistakes are listed in `problems`."""
    if garbled := [word for word in argv if any("\ud800" <= letter <= "\udfff" for letter in word)]:
        return CommandLine(
            RunConfig(), (), tuple(f"'{word}' is not UTF-8; give it in that encoding" for word in garbled)
        )
    typed, problems = _split(argv)
    typed, notes = _joined(typed)
    flags = {**_given_elsewhere(typed), **{item.flag: item.words for item in typed}}
    datasets, unusable = listed_datasets(flags)
    depending, problems = {**meanings(flags), **datasets}, [*problems, *unusable]
    outcomes = tuple(
        Outcome(item, ALIAS, depending[item.flag]) if item.flag in depending else _judge(item, flags) for item in typed
    )
    problems += [outcome.why for outcome in outcomes if outcome.kind in (REFUSE, UNKNOWN)]
    meant = _Meant()
    notes += _notes(outcomes)
    # A flag overrides the words that an alias of it stands for.
    for kind in (ALIAS, READ):
        for outcome in outcomes:
            if outcome.kind == kind:
                meant.add(outcome, problems)
    notes += meant.notes
    try:
        run = _configure(meant.values, notes, [str(o.typed) for o in outcomes if o.kind == SAME])
    except ConfigError as error:
        problems.append(str(error))
        run = RunConfig()
    if run.logging.strict_flags:
        problems += [note.refusal for note in notes]
    return CommandLine(run, outcomes, tuple(dict.fromkeys(problems)))


def words_without(argv: Sequence[str], fields: Collection[str]) -> list[str]:
    """Returns the words of the command line, as typed, but for flags that set any of these fields.

    Of a flag that stands for others, those that set other fields are written out.
    """
    words: list[str] = []
    for chunk, outcome in zip(by_flag(argv), read(argv).outcomes, strict=True):
        meant = _split(outcome.meant)[0]
        remaining = [item for item in meant if item.flag == PRESET or _fields()[item.flag][0].name not in fields]
        words += (
            chunk if len(remaining) == len(meant) else [word for item in remaining for word in (item.flag, *item.words)]
        )
    return words


def by_flag(argv: Sequence[str]) -> list[list[str]]:
    """Divides a command line before each flag; words before the first one are a part of their own."""
    chunks: list[list[str]] = []
    for word in argv:
        if not chunks or (word.startswith("--") and len(word) > 2):
            chunks.append([])
        chunks[-1].append(word)
    return chunks


def canonical(flag: str) -> str:
    """Returns the spelling of a flag that this program or the table uses."""
    for name in (flag, dashed := "--" + flag[2:].replace("_", "-"), dashed.replace("--disable-", "--no-", 1)):
        if name in _fields() or name == PRESET or is_listed(name):
            return name
    return dashed


def _split(argv: Sequence[str]) -> tuple[list[TypedFlag], list[str]]:
    """Returns the flags with the words after them, and the problems of words without a flag."""
    typed: list[TypedFlag] = []
    problems = []
    for word in argv:
        if word.startswith("--") and len(word) > 2:
            flag, equals, value = word.partition("=")
            typed.append(TypedFlag(canonical(flag), (value,) if equals else ()))
        elif re.fullmatch(r"-[a-zA-Z][\w-]*", word):
            problems.append(f"{word} {_closest('-' + word)}")
        elif typed:
            typed[-1] = replace(typed[-1], words=(*typed[-1].words, word))
        else:
            problems.append(_stray((word,)))
    return typed, problems


def _given_elsewhere(typed: Sequence[TypedFlag]) -> dict[str, tuple[str, ...]]:
    """Returns flags that count as typed in the table of flags: those of a preset, and --num-experts where the shape
    comes from a file. A flag about experts, refused in a model without any, can be removed; ignored, it would change
    results.
    """
    flags: dict[str, tuple[str, ...]] = {}
    for item in typed:
        if item.flag == PRESET and set(item.words) <= set(PRESETS):
            flags |= {flag_name(name): (str(value),) for word in item.words for name, value in PRESETS[word].items()}
        elif item.flag in ("--load-hf", "--use-checkpoint-args"):
            flags["--num-experts"] = ()
    return flags


def _joined(typed: Iterable[TypedFlag]) -> tuple[list[TypedFlag], list[Note]]:
    """Joins several words after a flag that takes one text, as they come from a shell variable without quotes."""
    joined, notes = [], []
    for item in typed:
        spec, kind = _fields().get(item.flag, (None, None))
        if (
            len(item.words) > 1
            and spec is not None
            and kind is str
            and (of := flag_of(spec)) is not None
            and not of.choices
        ):
            text = " ".join(item.words)
            notes.append(Note(item.flag, text, f"'{text}'", "words without quotes are taken as one value"))
            item = replace(item, words=(text,))
        joined.append(item)
    return joined, notes


def _judge(item: TypedFlag, flags: dict[str, tuple[str, ...]]) -> Outcome:
    row = find_row(item.flag, item.words, flags)
    if item.flag == PRESET or (item.flag in _fields() and (row is None or not row.values)):
        return Outcome(item, READ, (item.flag, *item.words))
    if row is None:
        problem = "is not known with this value; see --print-flags" if is_listed(item.flag) else _closest(item.flag)
        return Outcome(item, UNKNOWN, why=f"{item} {problem}")
    if row.arity.isdecimal() and len(item.words) > int(row.arity) > 0:
        return Outcome(item, UNKNOWN, why=f"{item.flag}: {_stray(item.words[int(row.arity) :])}")
    if row.arity == "0" and item.words:
        state = _switched(item.words)
        if state is None:
            return Outcome(item, UNKNOWN, why=f"{item.flag}: {_stray(item.words)}")
        if not state:
            return Outcome(item, SAME, why="off, as without it")
    if row.outcome == ALIAS:
        return Outcome(item, ALIAS, tuple(_written_out(row.instead, item, flags)))
    if row.outcome == REFUSE:
        return Outcome(item, REFUSE, why=f"{item} is not available here ({row.text}); {row.instead}")
    return Outcome(item, row.outcome, in_effect=row.instead, why=row.text)


def _written_out(text: str, item: TypedFlag, flags: dict[str, tuple[str, ...]]) -> Iterator[str]:
    """Yields the words of an alias: `{}` is the value, `{-1}` the value minus one, `{--x}` the value of another
    flag."""
    values = {"{}": item.words} | {f"{{{flag}}}": words for flag, words in flags.items()}
    for part in text.split():
        if "{-1}" in part and len(item.words) == 1 and item.words[0].isdecimal():
            yield part.replace("{-1}", str(int(item.words[0]) - 1))
        else:
            yield from values.get(part, (part,))


class _Meant:
    """Collects the values of flags by field; a later flag overrides an earlier one."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.notes: list[Note] = []
        self._origins: dict[str, TypedFlag] = {}

    def add(self, outcome: Outcome, problems: list[str]) -> None:
        """Adds the values of `outcome`, with a note if one replaces another value."""
        for item in _split(outcome.meant)[0]:
            try:
                name, value = _value(item)
            except ConfigError as error:
                problems.append(str(error))
                continue
            if name in self.values and self.values[name] != value:
                earlier = self._origins[name]
                why = "given again" if earlier.flag == item.flag else "the flag itself overrides its alias"
                self.notes.append(Note(earlier.flag, _asked(earlier), str(item), why))
            self.values.pop(name, None)
            if value is not None:
                self.values[name] = value
                self._origins[name] = outcome.typed


def _value(item: TypedFlag) -> tuple[str, Any]:
    """Returns (field, value) of a flag of this program; a switch that is switched off is None. Raises ConfigError."""
    if item.flag == PRESET:
        if len(item.words) != 1:
            raise ConfigError(f"{PRESET}: needs one value after it")
        return "preset", preset(item.words[0]) and item.words[0]
    spec, kind = _fields()[item.flag]
    if kind is bool:
        state = _switched(item.words) if item.words else True
        if state is None:
            raise ConfigError(f"{item.flag}: {_stray(item.words)}")
        return spec.name, (not spec.default) if state else None
    return spec.name, value_of(spec, kind, item.flag, item.words)


def _notes(outcomes: Iterable[Outcome]) -> list[Note]:
    return [
        Note(outcome.typed.flag, _asked(outcome.typed), outcome.in_effect, outcome.why)
        for outcome in outcomes
        if outcome.kind == NOOP
    ]


def _asked(item: TypedFlag) -> str:
    return " ".join(item.words) or "on"


def _switched(words: Sequence[str]) -> bool | None:
    """Returns the meaning of a word after a switch; None if it has none."""
    return _SWITCHED.get(words[0].lower()) if len(words) == 1 else None


def _configure(values: dict[str, Any], notes: Sequence[Note], already: Sequence[str]) -> RunConfig:
    """Builds the configuration. Raises ConfigError for a preset together with another source of the model's shape."""
    settings = dict(values)
    shape = preset(settings.pop("preset")) if "preset" in settings else {}
    for other, origin in (("use_checkpoint_args", "the checkpoint"), ("load_hf", "its config.json")):
        if shape and settings.get(other):
            flag = other.replace("_", "-")
            raise ConfigError(f"--preset has no effect: --{flag} takes the shape from {origin}; remove one")
    if settings.get("tokenizer_type", "NullTokenizer") != "NullTokenizer":
        # A run uses its own tokenizer's vocabulary; that of the preset belongs to the published model's tokenizer.
        shape.pop("vocab_size", None)
    model = {**shape, **settings}
    if "expert_tensor_parallel_size" in settings and "num_layers" in model and "num_experts" not in model:
        # As in Megatron-LM, whose scripts give it to every model.
        size = str(settings.pop("expert_tensor_parallel_size"))
        notes = [*notes, Note("--expert-tensor-parallel-size", size, "unused", "the model has no experts")]
    parts: dict[str, dict[str, Any]] = {part: {} for part in PARTS}
    for name, value in {**shape, **settings}.items():
        parts[flag_fields()[name][0]][name] = value
    built = {part: cls(**parts[part]) for part, cls in PARTS.items()}
    built["tokenizer"] = built["tokenizer"].with_type_of_files()
    return RunConfig(**built, given=frozenset(settings), notes=tuple(notes), already=tuple(dict.fromkeys(already)))


@functools.cache
def _fields() -> dict[str, tuple[Field[Any], Any]]:
    """Returns every spelling of this program's flags -> (field, type)."""
    hints = {part: typing.get_type_hints(cls) for part, cls in PARTS.items()}
    return {
        flag: (spec, plain_type(hints[part][spec.name]))
        for part, spec in flag_fields().values()
        for flag in spellings_of(spec)
    }


def _stray(words: Sequence[str]) -> str:
    return f"'{' '.join(words)}' belongs to no flag; remove it, or quote a value that has spaces"


def _closest(flag: str) -> str:
    ours = [*_fields(), PRESET]
    names = [*ours, *(row.flag for row in flag_table())]
    near = get_close_matches(flag, names, 1, _MISSPELLED) or get_close_matches(flag, ours, 1, _SIMILAR)
    return f"is not a known flag; did you mean {near[0]}?" if near else "is not a known flag; --help lists all of them"
