"""The parts of a bash script as data. The parser makes these, the interpreter walks over them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PartKind = Literal["text", "parameter", "command", "arithmetic"]


@dataclass(frozen=True)
class WordPart:
    """A piece of a word: plain text, or the inside of `${...}`, `$(...)` or `$((...))`. Quoted pieces are not split."""

    kind: PartKind
    text: str
    quoted: bool


@dataclass(frozen=True)
class Word:
    """Pieces that follow one another without a blank."""

    parts: tuple[WordPart, ...]


@dataclass(frozen=True)
class Assignment:
    """`name=value`, `name[index]=value`, `name+=value` or `name=(values)`.

    An element of the last is (index or None, word), as in `([key]=value)`.
    """

    name: str
    index: Word | None
    append: bool
    value: Word | tuple[tuple[Word | None, Word], ...]


@dataclass(frozen=True)
class Simple:
    """A command: assignments, then words. Of redirections, which change no argument, only their presence is kept."""

    assignments: tuple[Assignment, ...]
    words: tuple[Word, ...]
    redirected: bool = False


@dataclass(frozen=True)
class Test:
    """`[[ words ]]`."""

    words: tuple[Word, ...]


@dataclass(frozen=True)
class Arithmetic:
    """`(( text ))`."""

    text: str


@dataclass(frozen=True)
class CommandGroup:
    """`{ body }`, or the commands of a pipeline one after the other."""

    body: tuple[Statement, ...]


@dataclass(frozen=True)
class Subshell:
    """`( body )`, a command of a pipeline, or one in the background: what it sets ends with it."""

    body: tuple[Statement, ...]


@dataclass(frozen=True)
class Not:
    """`! body`."""

    body: Statement


@dataclass(frozen=True)
class Chain:
    """`left && right`, or `left || right`."""

    left: Statement
    operator: Literal["&&", "||"]
    right: Statement


@dataclass(frozen=True)
class Arm:
    """`condition` of an if or elif, its source text, and the body that follows."""

    text: str
    condition: tuple[Statement, ...]
    body: tuple[Statement, ...]


@dataclass(frozen=True)
class If:
    """The arms of an if in order; `otherwise` is None without else."""

    arms: tuple[Arm, ...]
    otherwise: tuple[Statement, ...] | None


@dataclass(frozen=True)
class Case:
    """`case word in`: (patterns, body, operator at its end) in order. `text` is the source up to `in`."""

    text: str
    word: Word
    arms: tuple[tuple[tuple[Word, ...], tuple[Statement, ...], str], ...]


@dataclass(frozen=True)
class For:
    """`for name in words`; `words` is None for the script's own arguments."""

    name: str
    words: tuple[Word, ...] | None
    body: tuple[Statement, ...]


@dataclass(frozen=True)
class While:
    """`while condition`, or with `until` as long as it fails. `step` is arithmetic after each turn of `for ((...))`."""

    condition: tuple[Statement, ...]
    body: tuple[Statement, ...]
    until: bool
    step: str | None = None


@dataclass(frozen=True)
class Function:
    """`name() body`."""

    name: str
    body: Statement


Statement = Simple | Test | Arithmetic | CommandGroup | Subshell | Not | Chain | If | Case | For | While | Function


@dataclass(frozen=True)
class Script:
    """A parsed script. `names` are the variables that it assigns, except from their own former value."""

    body: tuple[Statement, ...]
    names: frozenset[str]


def literal(word: Word) -> str:
    """Returns the plain text of a word, without the parts that need expansion."""
    return "".join(part.text for part in word.parts if part.kind == "text")


def name_of(statement: Statement) -> str | None:
    """Returns the first word of a simple command; None for another statement."""
    return literal(statement.words[0]) if isinstance(statement, Simple) and statement.words else None


def ends_script(body: tuple[Statement, ...]) -> bool:
    """Returns whether a body ends the script or function."""
    return any(name_of(statement) in ("exit", "return") for statement in body)


def sets_something(body: tuple[Statement, ...]) -> bool:
    """Returns whether a body can change later results: it has an assignment, or more than simple commands."""
    return any(
        not isinstance(statement, Simple) or bool(statement.assignments) or name_of(statement) == "eval"
        for statement in body
    )


def words_of(statement: Statement) -> tuple[Word, ...]:
    """Returns the words of a test or simple command, also of those under `!`, `&&` or `||`."""
    match statement:
        case Simple() | Test():
            return statement.words
        case Not():
            return words_of(statement.body)
        case Chain():
            return words_of(statement.left) + words_of(statement.right)
        case _:
            return ()
