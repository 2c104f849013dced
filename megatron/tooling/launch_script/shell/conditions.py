"""Evaluates `[ ]` and `[[ ]]`: True, False, or None if the result is unknown without running the script.

An unset variable is empty, as it would be in bash; the result of a command or of a file test is unknown.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable

from megatron.tooling.launch_script.shell.unknown import as_if_unset, is_known

_NUMBERS: dict[str, Callable[[int, int], bool]] = {
    "-eq": lambda a, b: a == b,
    "-ne": lambda a, b: a != b,
    "-lt": lambda a, b: a < b,
    "-le": lambda a, b: a <= b,
    "-gt": lambda a, b: a > b,
    "-ge": lambda a, b: a >= b,
}
_TEXTS = ("=", "==", "!=", "=~", "<", ">")


def test(words: list[str], is_set: Callable[[str], bool], patterns: bool = False) -> bool | None:
    """Evaluates the words between the brackets. `is_set` returns whether a variable is set, for -v.

    `patterns`: whether a text is compared with a pattern, as in `[[ ]]`; `[ ]` compares it with another text.
    """
    return _Reader(list(words), is_set, patterns).either()


def literal_pattern(text: str) -> str:
    """Returns the pattern that matches this text only."""
    return re.sub(r"[*?[]", r"[\g<0>]", text)


def matches(text: str, pattern: str) -> bool | None:
    """Returns whether a text matches a pattern of `case` or `==`; None if that is unknown."""
    plain_text, wanted = as_if_unset(text), as_if_unset(pattern)
    return None if plain_text is None or wanted is None else fnmatch.fnmatchcase(plain_text, wanted)


class _Reader:
    """Takes words from the front of a list."""

    def __init__(self, words: list[str], is_set: Callable[[str], bool], patterns: bool) -> None:
        self._patterns = patterns
        self._words = words
        self._is_set = is_set

    def either(self) -> bool | None:
        """Evaluates `a || b`, or an expression with higher precedence."""
        value = self._both()
        while self._words and self._words[0] in ("||", "-o"):
            self._words.pop(0)
            other = self._both()
            value = True if True in (value, other) else (None if None in (value, other) else False)
        return value

    def _both(self) -> bool | None:
        value = self._one()
        while self._words and self._words[0] in ("&&", "-a"):
            self._words.pop(0)
            other = self._one()
            value = False if False in (value, other) else (None if None in (value, other) else True)
        return value

    def _one(self) -> bool | None:
        if not self._words:
            return False
        word = self._words.pop(0)
        if self._words and (self._words[0] in _TEXTS or self._words[0] in _NUMBERS):
            return self._compare(word, self._words.pop(0), self._words.pop(0) if self._words else "")
        if word == "!":
            value = self._one()
            return None if value is None else not value
        if word == "(":
            value = self.either()
            if self._words[:1] == [")"]:
                self._words.pop(0)
            return value
        if re.fullmatch(r"-[a-zA-Z]", word) and self._words:
            return self._unary(word, self._words.pop(0))
        text = as_if_unset(word)
        return None if text is None else bool(text)

    def _unary(self, operator: str, word: str) -> bool | None:
        if operator == "-v":
            return self._is_set(word) if is_known(word) else None
        if operator not in ("-z", "-n"):
            return None  # a file test
        text = as_if_unset(word)
        return None if text is None else bool(text) == (operator == "-n")

    def _compare(self, left: str, operator: str, right: str) -> bool | None:
        if operator in _NUMBERS:
            sides = [as_if_unset(side) for side in (left, right)]
            numbers = [int(side) for side in sides if side is not None and re.fullmatch(r"\s*-?\d+\s*", side)]
            return _NUMBERS[operator](*numbers) if len(numbers) == len(sides) else None
        if operator in ("=", "==", "!="):
            equal = matches(left, right if self._patterns else literal_pattern(right))
            return None if equal is None else equal == (operator != "!=")
        return None
