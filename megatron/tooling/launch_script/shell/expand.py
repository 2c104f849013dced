"""Expands words: values of variables, arithmetic, and splitting at blanks."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable
from typing import TypeVar

from megatron.base.errors import ConfigError
from megatron.tooling.launch_script.shell.arithmetic import evaluate
from megatron.tooling.launch_script.shell.braces import spread
from megatron.tooling.launch_script.shell.conditions import literal_pattern
from megatron.tooling.launch_script.shell.parser import parse, parse_word
from megatron.tooling.launch_script.shell.scope import MOST_ELEMENTS, MOST_TEXT, Array, Scope
from megatron.tooling.launch_script.shell.syntax import Simple, Word, WordPart
from megatron.tooling.launch_script.shell.unknown import is_known, mark

_PARAMETER = re.compile(r"(?P<count>#(?=[\w@*]))?(?P<indirect>!)?(?P<name>\w+|[@*#?$!-])(?:\[(?P<index>[^\]]*)\])?")
Sliced = TypeVar("Sliced", str, list[str])
_TOO_LONG = "the script makes a word longer than a command may have; give the training command itself"
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)\s*([-+*/%]?)=(?!=)\s*(.+)", re.DOTALL)
_STEP = re.compile(r"(?:([A-Za-z_]\w*)(\+\+|--)|(\+\+|--)([A-Za-z_]\w*))")
_CHANGE = re.compile(
    r"([A-Za-z_]\w*)\s*(?:\+\+|--)|(?:\+\+|--)([A-Za-z_]\w*)|([A-Za-z_]\w*)\s*(?:[-+*/%&|^]|<<|>>)?=(?!=)"
)
_DEFAULT = re.compile(r":?[-=+?]")
# `${name/old/new}` from behind the first slash; `place` binds the pattern to the beginning or the end
_REPLACEMENT = re.compile(
    r"""(?P<place>(?!#?$)[#%]?)(?P<old>(?:\\.|'[^']*'|"[^"]*"|[^/\\'"])*)(?:/(?P<new>.*))?""", re.DOTALL
)
# longest match, from the front
_CUT = {"#": (False, True), "##": (True, True), "%": (False, False), "%%": (True, False)}
_CASES: dict[str, Callable[[str], str]] = {
    "^^": str.upper,
    ",,": str.lower,
    "^": lambda text: text[:1].upper() + text[1:],
    ",": lambda text: text[:1].lower() + text[1:],
}


def fields(words: tuple[Word, ...], scope: Scope) -> list[str]:
    """Returns the arguments that words expand to: none, one or more per word."""
    return [field for word in words for alternative in spread(word) for field in _fields(alternative, scope)]


def text_of(word: Word, scope: Scope) -> str:
    """Expands the word without splitting, as in an assignment."""
    text = ""
    for part in _parts(word, scope):
        text = _bounded(text + " ".join(_values(part, scope)))
    return text


def pattern_of(word: Word, scope: Scope) -> str:
    """Expands the word as a pattern, in which quoted text stands for itself."""
    texts = [(part.quoted, " ".join(_values(part, scope))) for part in _parts(word, scope)]
    return "".join(literal_pattern(text) if quoted else text.replace("[^", "[!") for quoted, text in texts)


def calculate(text: str, scope: Scope) -> int | None:
    """Returns the value of an arithmetic expression, or None if it is unknown."""
    expanded = text_of(parse_word(text, quoted=False), scope)
    return evaluate(expanded, scope.number) if is_known(expanded) else None


def compute(text: str, scope: Scope) -> int | None:
    """Returns the value of an expression of `(( ))` or `let`, which may set a variable; None if it is unknown."""
    parts = text.split(",")
    if len(parts) > 1 and "(" not in text:
        return [compute(part, scope) for part in parts][-1]
    step = _STEP.fullmatch(text.strip())
    assignment = _ASSIGNMENT.fullmatch(text.strip())
    if step is not None:
        name, expression = step[1] or step[4], f"{step[1] or step[4]} {(step[2] or step[3])[0]} 1"
    elif assignment is not None:
        name, expression = (
            assignment[1],
            f"({assignment[1]}) {assignment[2]} ({assignment[3]})" if assignment[2] else assignment[3],
        )
    else:
        for change in _CHANGE.finditer(text):  # inside a larger expression: the value is unknown from here on
            name = next(filter(None, change.groups()))
            scope.assign(name, mark(f"${name}"), None, append=False)
        return calculate(text, scope)
    before, value = scope.number(name), calculate(expression, scope)
    scope.assign(name, mark(f"$(({text}))") if value is None else str(value), None, append=False)
    return before if step is not None and step[2] else value  # x++ is x


def _fields(word: Word, scope: Scope) -> list[str]:
    arguments: list[str] = []
    current: str | None = None
    for part in _parts(word, scope):
        if part.kind == "text" or part.quoted:
            values = _values(part, scope)
            for number, value in enumerate(values):
                if number:
                    arguments.append(current or "")
                    current = None
                current = _bounded((current or "") + value)
            continue
        for number, value in enumerate(_values(part, scope)):
            pieces = scope.split(value)
            if current is not None and (number or value[:1].isspace()):
                arguments.append(current)
                current = None
            for position, piece in enumerate(pieces):
                if position:
                    arguments.append(current or "")
                    current = None
                current = _bounded((current or "") + piece)
            if value[-1:].isspace() and current is not None:
                arguments.append(current)
                current = None
    return arguments if current is None else [*arguments, current]


def _bounded(text: str) -> str:
    if len(text) > MOST_TEXT:
        raise ConfigError(_TOO_LONG)
    return text


def _parts(word: Word, scope: Scope) -> list[WordPart]:
    """Returns the word's parts, replacing unset names by their defaults, as in `${name:-text}`."""
    parts: list[WordPart] = []
    for part in word.parts:
        if part is word.parts[0] and _begins_at_home(word):
            parts += [WordPart("parameter", "HOME", True), WordPart("text", part.text[1:], False)]
            continue
        match = _PARAMETER.match(part.text) if part.kind == "parameter" else None
        operation = part.text[match.end() :] if match else ""
        if match is None or match["count"] or match["indirect"] or not _DEFAULT.match(operation):
            parts.append(part)
        else:
            parts += _default(part, match["name"], match["index"], operation, scope)
    return parts


def _begins_at_home(word: Word) -> bool:
    """Returns whether the word begins with a `~` that stands for the user's folder."""
    first = word.parts[0]
    alone = first.text == "~" and len(word.parts) == 1
    return first.kind == "text" and not first.quoted and (alone or first.text.startswith("~/"))


def _values(part: WordPart, scope: Scope) -> list[str]:
    """Returns one text, or several for `${name[@]}`."""
    if part.kind == "text":
        return [part.text]
    if part.kind == "arithmetic":
        value = compute(part.text, scope)
        return [mark(f"$(({part.text}))") if value is None else str(value)]
    if part.kind == "command":
        return [_output(part.text, scope)]
    return _parameter(part, scope)


def _output(text: str, scope: Scope) -> str:
    """Returns the output of a command, which is known only for `expr` and `echo`."""
    unknown = mark(f"$({text})")
    try:
        body = parse(text).body
    except ConfigError:
        return unknown
    if len(body) != 1 or not isinstance(body[0], Simple) or body[0].redirected:
        return unknown
    words = fields(body[0].words, scope)
    if words[:1] == ["expr"] and is_known(" ".join(words)):
        value = evaluate(" ".join(words[1:]), lambda name: None)
        return unknown if value is None else str(value)
    return " ".join(words[1:]) if words[:1] == ["echo"] and words[1:2] not in (["-e"], ["-n"]) else unknown


def _parameter(part: WordPart, scope: Scope) -> list[str]:
    """Expands `${...}` in all its forms; an unsupported form is unknown."""
    unknown = [mark(f"${{{part.text}}}")]
    match = _PARAMETER.match(part.text)
    if match is None:
        return unknown
    name, index, operation = match["name"], match["index"], part.text[match.end() :]
    if match["indirect"] and index in ("@", "*") and not operation:
        array = scope.variables.get(name)
        numbered = isinstance(array, dict) and all(key.isdigit() for key in array)
        return sorted(array, key=int) if numbered and isinstance(array, dict) else unknown
    if match["indirect"]:
        name = scope.text(name)
        if index is not None or not re.fullmatch(r"\w+", name):
            return unknown
    several = index in ("@", "*") or (name in ("@", "*") and index is None)
    if match["count"]:
        elements = scope.array(name) if several else [scope.text(name)]
        return [str(len(elements) if several else len(elements[0]))] if all(map(is_known, elements)) else unknown
    values = scope.array(name) if several else [_element(name, index, scope)]
    if several and operation.startswith(":"):
        cut = _slice([scope.text("0"), *values] if name in ("@", "*") else values, operation, scope)
        values, operation = (unknown, "") if cut is None else (cut, "")
    if operation:
        changed = [_change(value, operation, scope) for value in values]
        values = [mark(part.text and f"${{{part.text}}}") if value is None else value for value in changed]
    joined = several and part.quoted and "*" in (index, name)
    return [scope.separators()[:1].join(values)] if joined else values


def _element(name: str, index: str | None, scope: Scope) -> str:
    array = scope.variables.get(name)
    if index is None:
        return scope.text(name)
    if not isinstance(array, dict):
        return (
            scope.text(name) if name in scope.variables or name in scope.script_names else mark(f"${{{name}[{index}]}}")
        )
    key = text_of(parse_word(index, quoted=True), scope)
    position = calculate(index, scope) if key not in array else None
    if position is not None and position < 0:
        position += 1 + max((int(at) for at in array if at.isdigit()), default=-1)
    return array.get(key, array.get(str(position), "")) if is_known(key) else mark(f"${{{name}[{index}]}}")


def _default(part: WordPart, name: str, index: str | None, operation: str, scope: Scope) -> tuple[WordPart, ...]:
    """Handles `:-`, `:=`, `:+`, `:?` and the forms without a colon, which only test whether the name is set."""
    colon = operation.startswith(":")
    operator, word = operation[colon], parse_word(operation[colon + 1 :], part.quoted)
    value = " ".join(scope.array(name)) if "@" in (index, name) else _element(name, index, scope)
    is_set = scope.is_set(name) and (not colon or value != "")
    nothing = (WordPart("text", "", True),) if part.quoted else ()
    if operator == "+":
        return (tuple(_parts(word, scope)) if is_set else ()) or nothing
    if is_set or operator == "?":
        return (WordPart("parameter", name if index is None else f"{name}[{index}]", part.quoted),)
    if operator == "=":
        scope.assign(name, text_of(word, scope), None, append=False)
    return tuple(_parts(word, scope)) or nothing


def _change(value: str, operation: str, scope: Scope) -> str | None:
    """Applies removals, replacements and case changes to a known value; returns None if the result is unknown."""
    if not is_known(value):
        return None
    if operation in _CASES:
        return _CASES[operation](value)
    cut = re.match(r"##?|%%?", operation)
    if cut:
        pattern = pattern_of(parse_word(operation[cut.end() :], quoted=False), scope)
        return _cut(value, pattern, *_CUT[cut[0]]) if is_known(pattern) else None
    if operation.startswith("/"):
        everywhere = operation.startswith("//")
        both = _REPLACEMENT.fullmatch(operation, 1 + everywhere)
        if both is None:
            return None
        place, new = both["place"], text_of(parse_word(both["new"] or "", quoted=False), scope)
        old = pattern_of(parse_word(both["old"], quoted=False), scope)
        if not (old or place) or not is_known(old) or re.search(r"(?<!\\)&", both["new"] or ""):  # & depends on bash
            return None
        if len(value) * len(new) > MOST_ELEMENTS:
            raise ConfigError(_TOO_LONG)
        begin, end = "^" * (place == "#"), r"\Z" * (place == "%")
        return re.sub(begin + _glob(old) + end, lambda _: new, value, count=0 if everywhere else 1)
    return _slice(value, operation, scope) if operation.startswith(":") else None


def _slice(values: Sliced, operation: str, scope: Scope) -> Sliced | None:
    """`:first` or `:first:count` of a text or of elements; None if a number is unknown."""
    start, _, length = operation[1:].partition(":")
    first, count = calculate(start, scope), calculate(length, scope) if length else len(values)
    if first is None or count is None:
        return None
    first = max(0, first + len(values)) if first < 0 else first
    return values[first : count if count < 0 else first + count]


def _cut(value: str, pattern: str, longest: bool, front: bool) -> str:
    lengths = range(len(value) + 1)
    for length in reversed(lengths) if longest else lengths:
        piece = value[:length] if front else value[len(value) - length :]
        if fnmatch.fnmatchcase(piece, pattern):
            return value[length:] if front else value[: len(value) - length]
    return value


def _glob(pattern: str) -> str:
    pieces = re.findall(r"\[!?\]?[^\]]*\]|.", pattern, re.DOTALL)
    return "".join(
        "[" + re.sub(r"[\\\[]", r"\\\g<0>", piece[1:-1].replace("!", "^", piece.startswith("[!"))) + "]"
        if len(piece) > 1
        else {"*": "(?s:.*)", "?": "(?s:.)"}.get(piece, re.escape(piece))
        for piece in pieces
    )


def array_of(elements: tuple[tuple[Word | None, Word], ...], scope: Scope) -> Array:
    """Returns the value of `( ... )`."""
    array: Array = {}
    for key, word in elements:
        if key is not None:
            array[text_of(key, scope)] = text_of(word, scope)
            continue
        start = 1 + max((int(index) for index in array if index.isdigit()), default=-1)
        array.update({str(start + number): text for number, text in enumerate(fields((word,), scope))})
    return array
