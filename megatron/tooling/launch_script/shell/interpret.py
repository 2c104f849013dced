"""Finds the commands that a script would start, by walking over it. Nothing is run and no file is written."""

from __future__ import annotations

import os.path
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Literal

from megatron.base.errors import ConfigError
from megatron.tooling.launch_script.shell.conditions import matches, test
from megatron.tooling.launch_script.shell.expand import array_of, compute, fields, pattern_of, text_of
from megatron.tooling.launch_script.shell.parser import DECLARERS, parse
from megatron.tooling.launch_script.shell.scope import Array, Scope, scope_of
from megatron.tooling.launch_script.shell.syntax import (
    Arithmetic,
    Arm,
    Case,
    Chain,
    CommandGroup,
    For,
    Function,
    If,
    Not,
    Script,
    Simple,
    Statement,
    Subshell,
    Test,
    While,
    Word,
    ends_script,
    literal,
    name_of,
    sets_something,
    words_of,
)
from megatron.tooling.launch_script.shell.unknown import CLOSE, OPEN, as_if_unset, mark, mark_placeholders

LOCAL = ("local", "declare", "typeset")  # in a function these make variables that end with it
SHELLS = ("bash", "sh", "zsh", "ksh", "dash")
MOST_TURNS = 64  # limit for `while true`, and for a loop that changes nothing
MOST_NESTED = 16  # limit for scripts and functions that start one another
MOST_STEPS = 100_000  # limit for all statements, with loops unrolled
_FOLDER = " folder"  # where `cd` has gone; no script has a variable of this name
_LETTER = " letter"  # the place in a word of options at which getopts goes on; no script has a variable of this name
_TOO_LONG = "the script has too many steps or levels to be read without running it; give the training command itself"
Body = tuple[Statement, ...]
JobVariables = Callable[[str, Sequence[str], Mapping[str, str | Array]], dict[str, str | Array]]


@dataclass(frozen=True)
class Invocation:
    """A command with its arguments, and the variables at that point.

    `launchers` holds the words before each shell through which it is started, the outermost first, as in `srun --nodes
    2 bash -c "torchrun ..."`. `assumed` lists conditions with an unknown result, with the assumption made.
    """

    words: tuple[str, ...]
    variables: Mapping[str, str | Array]
    launchers: tuple[tuple[str, ...], ...]
    assumed: tuple[str, ...]


class _Leave(Exception):
    """Control flow of `break`, `continue`, `return` or `exit`; `status` is whether a function succeeds."""

    def __init__(
        self, kind: Literal["break", "continue", "return", "exit"], levels: int = 1, status: bool | None = True
    ) -> None:
        self.kind = kind
        self.status = status
        self.levels = levels  # how many loops are left


def invocations(
    text: str,
    arguments: tuple[str, ...],
    environment: Mapping[str, str],
    open_file: Callable[[str], str | None],
    script: str = "",
    job: JobVariables = lambda text, options, variables: dict(variables),
) -> list[Invocation]:
    """Returns all commands of a script in the order in which they are reached.

    `open_file` returns the text of another script by the name used to call it, or None. `script` is the path of this
    one. `job` returns the variables of a script that sbatch submits, by its text, the options of sbatch and the
    variables of the caller. Raises ConfigError.
    """
    walker = _Walker(open_file, job)
    try:
        walker.start(text, scope_of(environment, arguments, script))
    except RecursionError:
        raise ConfigError(_TOO_LONG) from None
    return walker.invocations


class _Walker:
    def __init__(self, open_file: Callable[[str], str | None], job: JobVariables) -> None:
        self._job = job
        self.invocations: list[Invocation] = []
        self._open_file = open_file
        self._launchers: tuple[tuple[str, ...], ...] = ()
        self._assumed: dict[str, None] = {}
        self._depth = self._steps = 0
        self._doubts = 0  # conditions around the current statement whose result depends on unknown text
        # for each running function, the former values of its local names
        self._locals: list[dict[str, str | Array | None]] = []

    def run(self, text: str, scope: Scope) -> None:
        """Walks over a script, or text that eval reads, in `scope`."""
        if self._depth == MOST_NESTED:
            return
        script: Script = parse(mark_placeholders(text))
        scope.script_names |= script.names
        self._nested(lambda: self._run_all(script.body, scope))

    def start(self, text: str, scope: Scope) -> None:
        """Walks over a script of a process of its own, which `exit` ends."""
        with suppress(_Leave):
            self.run(text, scope)

    def _nested(self, work: Callable[[], bool | None]) -> bool | None:
        self._depth += 1
        try:
            return work()
        except _Leave as leave:
            if leave.kind == "exit":
                raise
            return leave.status
        finally:
            self._depth -= 1

    def _in_doubt(self, doubtful: bool, work: Callable[[], bool | None]) -> bool | None:
        """Does work that a condition has chosen; where the condition is doubtful, `exit` in it is only a guard."""
        self._doubts += doubtful
        try:
            return work()
        finally:
            self._doubts -= doubtful

    def _run_all(self, body: Body, scope: Scope) -> bool | None:
        status: bool | None = True
        for statement in body:
            status = self._run(statement, scope)
        return status

    def _run(self, statement: Statement, scope: Scope) -> bool | None:
        """Returns whether the statement succeeds; None if that is unknown."""
        self._steps += 1
        if self._steps > MOST_STEPS:
            raise ConfigError(_TOO_LONG)
        match statement:
            case Simple():
                return self._simple(statement, scope)
            case Test():
                return test(_test_words(statement.words, scope), scope.is_set, patterns=True)
            case Arithmetic():
                value = compute(statement.text, scope)
                return None if value is None else value != 0
            case CommandGroup():
                return self._run_all(statement.body, scope)
            case Subshell():
                return self._subshell(statement.body, scope)
            case Not():
                status = self._run(statement.body, scope)
                return None if status is None else not status
            case Chain():
                status = self._run(statement.left, scope)
                wanted = status is not False if statement.operator == "&&" else status is False
                if not wanted:
                    return status
                doubtful = status is None or _asks((statement.left,), scope)
                return self._in_doubt(doubtful, lambda: self._run(statement.right, scope))
            case If():
                return self._if(statement, scope)
            case Case():
                return self._case(statement, scope)
            case For():
                return self._for(statement, scope)
            case While():
                return self._while(statement, scope)
            case Function():
                scope.functions[statement.name] = statement.body
                return True

    def _subshell(self, body: Body, scope: Scope) -> bool | None:
        inside = replace(scope, variables=dict(scope.variables), functions=dict(scope.functions))
        try:
            return self._run_all(body, inside)
        except _Leave:
            return None

    def _if(self, statement: If, scope: Scope) -> bool | None:
        """Runs the chosen arm of an if; of arms with unknown conditions the first that does not end the script."""
        doubtful = False
        for arm in statement.arms:
            outcome = self._run_all(arm.condition, scope)
            doubtful = doubtful or outcome is None or _asks(arm.condition, scope)
            if outcome is None and ends_script(arm.body):
                continue
            if outcome is not False:
                if outcome is None:
                    self._assume(arm, "taken")
                return self._in_doubt(doubtful, partial(self._run_all, arm.body, scope))
        first = statement.arms[0]
        if statement.otherwise is not None and not (doubtful and ends_script(statement.otherwise)):
            return self._in_doubt(doubtful, partial(self._run_all, statement.otherwise, scope))
        if len(statement.arms) > 1 and not ends_script(first.body) and _asks(first.condition, scope):
            self._assume(first, "taken, as no other is")
            return self._run_all(first.body, scope)
        return True

    def _assume(self, arm: Arm, how: str) -> None:
        if sets_something(arm.body):
            self._assumed[f"{' '.join(arm.text.split())}: {how}"] = None

    def _case(self, statement: Case, scope: Scope) -> bool | None:
        text = text_of(statement.word, scope)
        undecided = as_if_unset(text) != text
        status: bool | None = True
        operator = ""
        for patterns, body, after in statement.arms:
            outcomes = [] if operator == ";&" else [matches(text, pattern_of(pattern, scope)) for pattern in patterns]
            if operator == ";&" or ((True in outcomes or None in outcomes) and not (undecided and ends_script(body))):
                status, operator = self._in_doubt(undecided, partial(self._run_all, body, scope)), after
                if operator not in (";&", ";;&"):
                    return status
        if operator:
            return status
        if undecided and statement.arms and not ends_script(statement.arms[0][1]):
            self._assumed[f"{' '.join(statement.text.split())}: first pattern taken"] = None
            return self._run_all(statement.arms[0][1], scope)
        return True

    def _for(self, statement: For, scope: Scope) -> bool | None:
        values = list(scope.arguments) if statement.words is None else fields(statement.words, scope)
        for value in values:
            scope.variables[statement.name] = value
            if not self._turn(statement.body, scope):
                break
        return True

    def _while(self, statement: While, scope: Scope) -> bool | None:
        for turn in count():
            before = dict(scope.variables), scope.arguments
            outcome = self._run_all(statement.condition, scope)
            if outcome is statement.until or not self._turn(statement.body, scope) or outcome is None:
                break
            if statement.step is not None and statement.step.strip():
                compute(statement.step, scope)
            endless = all(name_of(step) in ("true", ":") for step in statement.condition)
            if turn >= MOST_TURNS and (endless or before == (scope.variables, scope.arguments)):
                break
        return True

    def _turn(self, body: Body, scope: Scope) -> bool:
        """Runs one iteration of a loop; returns whether another may follow."""
        try:
            self._run_all(body, scope)
        except _Leave as leave:
            if leave.kind in ("return", "exit"):
                raise
            if leave.levels > 1:
                raise _Leave(leave.kind, leave.levels - 1) from None
            return leave.kind == "continue"
        return True

    def _simple(self, statement: Simple, scope: Scope) -> bool | None:
        words = fields(statement.words, scope)
        passing = words and words[0] not in DECLARERS  # assignments that end with the command
        before = (
            {assignment.name: scope.variables.get(assignment.name) for assignment in statement.assignments}
            if passing
            else {}
        )
        exports: list[str] = []
        for assignment in statement.assignments:
            value = (
                array_of(assignment.value, scope)
                if isinstance(assignment.value, tuple)
                else text_of(assignment.value, scope)
            )
            index = None if assignment.index is None else text_of(assignment.index, scope)
            if words[:1] and words[0] in LOCAL and self._locals:
                self._locals[-1].setdefault(assignment.name, scope.variables.get(assignment.name))
            scope.assign(assignment.name, value, index, assignment.append)
            if passing or (words and (words[0] == "export" or "-x" in words)):
                exports += [assignment.name] if assignment.name not in scope.exported else []
                scope.exported.add(assignment.name)
        if words and words[0] in DECLARERS:
            self._declare(words, scope)
        if not passing:
            return True
        try:
            return self._command(words, scope)
        finally:
            _restore(before, scope)
            scope.exported -= set(exports)

    def _declare(self, words: list[str], scope: Scope) -> None:
        """Declares names that expansion made, as in `declare "$name=1"`, and local names without a value."""
        for word in words[1:]:
            name, equals, value = word.partition("=")
            if not name.isidentifier():
                continue
            if words[0] == "export" or "-x" in words:
                scope.exported.add(name)
            if words[0] in LOCAL and self._locals and name not in self._locals[-1]:
                self._locals[-1][name] = scope.variables.get(name)
                if not equals:
                    scope.variables[name] = ""
            if equals:
                scope.assign(name, value, None, append=False)

    def _command(self, words: list[str], scope: Scope) -> bool | None:
        name = words[0]
        if name in (":", "true", "false"):
            return name != "false"
        if name in ("[", "test"):
            return test(words[1 : len(words) - (name == "[")], scope.is_set)
        number = int(words[1]) if words[1:] and words[1].isdecimal() else None
        if name in ("break", "continue"):
            raise _Leave("break" if name == "break" else "continue", number or 1)
        if name == "return":
            raise _Leave("return", status=None if number is None else number == 0)
        if name == "exit" and number in (None, 0) and not self._doubts:  # another exit is a guard, and is passed over
            raise _Leave("exit")
        if name in scope.functions:
            return self._call(scope.functions[name], scope.with_arguments(tuple(words[1:])))
        if name == "eval":
            self.run(" ".join(words[1:]), scope)
        elif name == "set":
            if any(re.fullmatch("-[a-z]*a[a-z]*|allexport", word) for word in words[1:]):
                scope.exported.add("*")
            at = next((at for at, word in enumerate(words[1:], 1) if word == "--" or word[:1] not in "-+"), None)
            if at is not None and words[at - 1] not in ("-o", "+o") and not words[at - 1].endswith("o"):
                scope.arguments = tuple(words[at + (words[at] == "--") :])
        elif name == "let":
            values = [compute(word, scope) for word in words[1:]]
            return None if None in values else bool(values and values[-1])
        elif name == "getopts" and len(words) > 2:
            return _next_option(words[1], words[2], scope)
        elif name == "env":
            return self._env(words[1:], scope)
        elif name in ("cd", "pushd") and words[1:]:
            scope.variables[_FOLDER] = "" if words[-1] == "-" else _joined(scope, words[-1])
        elif name == "shift":
            first = 1 if number is None else number
            scope.arguments = scope.arguments[first:] if first <= len(scope.arguments) else scope.arguments
        elif name == "unset":
            for variable in words[1:]:
                scope.remove(variable)
        elif name in ("read", "mapfile", "readarray"):
            several = name != "read" or any(re.fullmatch("-[a-zA-Z]*a", word) for word in words)
            scope.variables.update(
                {
                    variable: {"0": mark(f"${{{variable}[@]}}")} if several else mark(f"${variable}")
                    for variable in words[1:]
                    if variable.isidentifier()
                }
            )
        elif name in ("source", "."):
            opened = self._open(words[1], scope) if words[1:] else None
            if opened is None:
                scope.unread_sources.append(words[1] if words[1:] else "")
            else:
                before, scope.file = scope.file, opened[1]
                self.run(opened[0], scope.with_arguments(tuple(words[2:])) if words[2:] else scope)
                scope.file = before
        elif not self._started_script(words, scope):
            self.invocations.append(
                Invocation(tuple(words), dict(scope.variables), self._launchers, tuple(self._assumed))
            )
        if name == "exec" and len(words) > 1 and not self._doubts:
            raise _Leave("exit")
        return None

    def _env(self, words: list[str], scope: Scope) -> bool | None:
        """Runs the command of `env`, with the variables that its options and assignments change."""
        inside = replace(scope, variables=dict(scope.variables), exported=set(scope.exported))
        for at, word in enumerate(words):
            name, equals, value = word.partition("=")
            if word in ("-i", "-", "--ignore-environment"):
                inside.variables, inside.script_names = {}, inside.script_names | scope.variables.keys()
            elif word in ("-u", "--unset") or name == "--unset":
                removed = value if equals else words[at + 1] if words[at + 1 :] else ""
                inside.variables.pop(removed, None)
                inside.script_names |= {removed}
            elif equals and not word.startswith("-"):
                inside.assign(name, value, None, append=False)
                inside.exported.add(name)
            elif not word.startswith("-") and words[at - 1 : at] not in (["-u"], ["--unset"]):
                return self._command(words[at:], inside)
        return None

    def _open(self, name: str, scope: Scope) -> tuple[str, str] | None:
        """Returns the text of a script and the name under which it was opened; None if it cannot be opened."""
        texts = ((self._open_file(place), place) for place in _places(name, scope))
        return next(((text, place) for text, place in texts if text is not None), None)

    def _call(self, body: Statement, scope: Scope) -> bool | None:
        if self._depth == MOST_NESTED:
            return None
        self._locals.append({})
        try:
            return self._nested(lambda: self._run(body, scope))
        finally:
            _restore(self._locals.pop(), scope)

    def _started_script(self, words: list[str], scope: Scope) -> bool:
        """Walks over `bash -c TEXT`, or over a script in a file, at any position in the command."""
        for at, word in enumerate(words):
            if os.path.basename(word) in SHELLS:
                first = next((i for i in range(at + 1, len(words)) if not words[i].startswith("-")), at)
                if first > at + 1 and words[first - 1].endswith("c"):
                    return self._start(words[first], words[:at], scope.child(tuple(words[first + 2 :])))
                return self._started_file(words[first], words[:at], scope.child(tuple(words[first + 1 :])))
            # A command's name without a slash is looked up in PATH.
            if ((at == 0 and "/" in word) or word.endswith(".sh")) and self._started_file(
                word, words[:at], scope.child(tuple(words[at + 1 :]))
            ):
                return True
        return False

    def _started_file(self, name: str, launcher: list[str], scope: Scope) -> bool:
        opened = self._open(name, scope)
        if opened is None:
            return False
        text, place = opened
        submitted = next((at for at, word in enumerate(launcher) if os.path.basename(word) == "sbatch"), None)
        if submitted is not None:
            scope.variables = self._job(text, launcher[submitted + 1 :], scope.variables)
            scope.exported = set(scope.variables)
        return self._start(text, launcher, replace(scope, script=place, file=place))

    def _start(self, text: str, launcher: list[str], scope: Scope) -> bool:
        before = self._launchers
        self._launchers = (*before, tuple(launcher)) if launcher else before
        self.start(text, scope)
        self._launchers = before
        return True


def _places(name: str, scope: Scope) -> Iterator[str]:
    """Yields the names under which a script may be opened: from the folder of the script that names it, if `name`
    begins with that, or from the folder where `cd` has gone; then as it stands.
    """
    folder, full = _joined(scope, ""), _joined(scope, name)
    unknown, mark_, relative = full.rpartition(CLOSE)
    if mark_ and ".." not in unknown:
        base = scope.file if "BASH_SOURCE" in unknown else scope.script if re.search(r"\$\{?0\b", unknown) else ""
        if base:
            yield os.path.normpath(os.path.join(os.path.dirname(base), relative.lstrip("/")))
    elif folder and not mark_:
        yield os.path.normpath(full)
    yield name


def _joined(scope: Scope, path: str) -> str:
    folder = scope.text(_FOLDER) if scope.is_set(_FOLDER) else ""
    return path if path.startswith(OPEN) else os.path.join(folder, path)


def _asks(condition: Body, scope: Scope) -> bool:
    """Returns whether a condition asks for an unset variable."""
    names = [word for test_ in condition for word in words_of(test_)]
    return any(as_if_unset(text) != text for text in (text_of(word, scope) for word in names))


def _restore(former: Mapping[str, str | Array | None], scope: Scope) -> None:
    for name, value in former.items():
        if value is None:
            scope.variables.pop(name, None)
        else:
            scope.variables[name] = value


def _test_words(words: tuple[Word, ...], scope: Scope) -> list[str]:
    """Expands the words of `[[ ]]`, of which those behind == and != are patterns."""
    befores = ["", *(literal(word) for word in words)]
    return [
        pattern_of(word, scope) if before in ("=", "==", "!=") else text_of(word, scope)
        for before, word in zip(befores, words, strict=False)
    ]


def _next_option(options: str, name: str, scope: Scope) -> bool | None:
    """Does what `getopts` does with the next option, which may be one of several letters in one word, as in `-ab`."""
    place = scope.number("OPTIND") or 1 if scope.is_set("OPTIND") else 1
    word = scope.arguments[place - 1] if place <= len(scope.arguments) else ""
    scope.variables["OPTIND"] = str(place + (word == "--"))
    if not word.startswith("-") or word in ("-", "--"):
        scope.variables[name] = "?"
        return False
    at = scope.number(_LETTER) or 1 if scope.is_set(_LETTER) else 1
    letter, attached = word[at : at + 1], word[at + 1 :]
    takes_value = f"{letter}:" in options
    scope.variables.pop(_LETTER, None)
    scope.variables[name] = letter if letter in options.replace(":", "") else "?"
    if takes_value and not attached:
        place += 1
        attached = scope.arguments[place - 1] if place <= len(scope.arguments) else ""
    scope.variables["OPTARG"] = attached if takes_value else ""
    if attached and not takes_value:
        scope.variables[_LETTER] = str(at + 1)
        return True
    scope.variables["OPTIND"] = str(place + 1)
    return True
