"""Whole-number arithmetic as in `$((...))`."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable

_TOKEN = re.compile(r"\s*(\d+#\w+|\d\w*|[A-Za-z_]\w*|\*\*|<<|>>|<=|>=|==|!=|&&|\|\||[-+*/%()<>!~&|^?:])")


class _NotKnown(Exception):
    """The expression has a name without a number, an assignment or no meaning."""


def _divide(left: int, right: int) -> int:
    quotient = abs(left) // abs(right)  # towards zero, as in C
    return quotient if (left < 0) == (right < 0) else -quotient


def _shift(value: int, bits: int) -> int:
    if bits >= 64:
        raise _NotKnown
    return value << bits


_BINARY: tuple[dict[str, Callable[[int, int], int]], ...] = (  # from the loosest to the tightest
    {"||": lambda a, b: int(bool(a or b))},
    {"&&": lambda a, b: int(bool(a and b))},
    {"|": operator.or_},
    {"^": operator.xor},
    {"&": operator.and_},
    {"==": lambda a, b: int(a == b), "!=": lambda a, b: int(a != b)},
    {"<": operator.lt, ">": operator.gt, "<=": operator.le, ">=": operator.ge},
    {"<<": _shift, ">>": operator.rshift},
    {"+": operator.add, "-": operator.sub},
    {"*": operator.mul, "/": _divide, "%": lambda a, b: a - b * _divide(a, b)},
)
_UNARY: dict[str, Callable[[int], int]] = {
    "-": operator.neg,
    "+": operator.pos,
    "!": lambda a: int(not a),
    "~": operator.invert,
}
_MOST = 2**63  # bash's numbers have 64 bits; no size of a model is larger


def evaluate(text: str, number_of: Callable[[str], int | None]) -> int | None:
    """Returns the value of an expression, or None if it is unknown. `number_of` returns a variable's value, or None."""
    tokens: list[str] = []
    at = 0
    text = text.strip()
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            return None
        tokens.append(match[1])
        at = match.end()
    try:
        reader = _Reader(tokens, number_of)
        value = reader.choice()
    except (_NotKnown, ZeroDivisionError, ValueError):
        return None
    return value if not reader.tokens and abs(value) < _MOST else None


def number_in(text: str) -> int | None:
    """Returns the value of a number as bash reads it: 010 is 8, 0x10 is 16 and 2#10 is 2; None if it is not one."""
    base, hash_, digits = text.partition("#")
    try:
        if hash_:
            return int(digits, int(base)) if 2 <= int(base) <= 36 else None
        if text[:2] in ("0x", "0X"):
            return int(text, 16)
        return int(text, 8 if text.startswith("0") else 10) if text.isdecimal() else None
    except ValueError:
        return None


class _Reader:
    """Takes tokens from the front of a list."""

    def __init__(self, tokens: list[str], number_of: Callable[[str], int | None]) -> None:
        self.tokens = tokens
        self._number_of = number_of

    def choice(self) -> int:
        """Evaluates `a ? b : c`, or an expression with higher precedence."""
        value = self._binary(0)
        if not self._take("?"):
            return value
        yes = self.choice()
        self._need(":")
        no = self.choice()
        return yes if value else no

    def _binary(self, level: int) -> int:
        if level == len(_BINARY):
            return self._power()
        value = self._binary(level + 1)
        while self.tokens and self.tokens[0] in _BINARY[level]:
            operate = _BINARY[level][self.tokens.pop(0)]
            value = int(operate(value, self._binary(level + 1)))
            if abs(value) >= _MOST:
                raise _NotKnown
        return value

    def _power(self) -> int:
        base = self._unary()
        if not self._take("**"):
            return base
        exponent = self._power()
        if not 0 <= exponent < 64:
            raise _NotKnown
        return int(base**exponent)

    def _unary(self) -> int:
        if not self.tokens:
            raise _NotKnown
        token = self.tokens.pop(0)
        if token in _UNARY:
            return _UNARY[token](self._unary())
        if token == "(":
            value = self.choice()
            self._need(")")
            return value
        number = number_in(token) if token[0].isdigit() else self._number_of(token)
        if number is None:
            raise _NotKnown
        return number

    def _take(self, token: str) -> bool:
        is_next = bool(self.tokens) and self.tokens[0] == token
        if is_next:
            self.tokens.pop(0)
        return is_next

    def _need(self, token: str) -> None:
        if not self._take(token):
            raise _NotKnown
