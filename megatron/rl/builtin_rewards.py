"""The reward functions that need no file: `exact`, `regex`, `number` and `length`. They read the last answer
of a conversation. No torch."""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction

from megatron.base.errors import shown
from megatron.rl.rewards import NAME_FLAG, RewardSource
from megatron.rl.user_functions import AnsweredPrompt, FunctionError

_MARK = "####"  # before the answer in GSM8K (https://github.com/openai/grade-school-math)
_BOXED = re.compile(r"\\(?:boxed|fbox)\s*\{")
_FRACTION = re.compile(r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}")
_TEXT = re.compile(r"\\(?:text|mathrm|mbox)\s*\{[^{}]*\}|\\[!,;: ]|\\\$|\\%|[$%]")
_NUMBER = re.compile(r"([+-]?)(\d+|\d{1,3}(?:,\d{3})+)?(\.\d+)?", re.ASCII)
_DIGITS = 200  # of a number that is compared


def built_in_function(source: RewardSource) -> Callable[[AnsweredPrompt], float]:
    """Returns the function of a name in BUILT_IN. Raises FunctionError for an argument that it does not take."""
    if source.built_in == "exact":
        return _exact
    if source.built_in == "number":
        return _number
    if source.built_in == "regex":
        try:
            pattern = None if source.argument is None else re.compile(source.argument)
        except re.error as error:
            raise FunctionError(f"{source} has the pattern {shown(source.argument)}, which is none: {error}") from error
        return lambda answer: _regex(answer, pattern)
    assert source.built_in == "length", f"{NAME_FLAG} {source.built_in} is refused before"
    argument = source.argument
    if argument is not None and not (argument.isdecimal() and int(argument) > 0):
        raise FunctionError(f"{source} has the argument {shown(argument)}; give a number of characters, at least 1")
    return lambda answer: _length(answer, answer.label if argument is None else argument)


def _exact(answer: AnsweredPrompt) -> float:
    """Returns 1 if the answer is the label, apart from white space around both."""
    return float(answer.last_answer.strip() == _label(answer).strip())


def _regex(answer: AnsweredPrompt, pattern: re.Pattern[str] | None) -> float:
    """Returns 1 if the pattern, or else the label, matches a part of the answer."""
    return float(re.search(_label(answer) if pattern is None else pattern, answer.last_answer) is not None)


def _length(answer: AnsweredPrompt, target: object) -> float:
    """Returns 1 for an answer of as many characters as the target, and less for others: 0 at twice as many."""
    wanted = int(str(target))
    if wanted < 1:
        raise ValueError(f"the label is {wanted}, not a number of characters of at least 1")
    return max(0.0, 1.0 - abs(len(answer.last_answer) - wanted) / wanted)


def _number(answer: AnsweredPrompt) -> float:
    """Returns 1 if the answer states the number of the label. The label may be a solution that ends in it."""
    label = number_in(_label(answer))
    if label is None:
        raise ValueError(f"the label {shown(answer.label)} has no number")
    return float(number_in(answer.last_answer) == label)


def number_in(text: str) -> Fraction | None:
    r"""Returns the number that a text states, or None.

    It stands behind the last `####` or in the last `\boxed{}`, whichever comes later. A text without either is a number
    as a whole, or states none: otherwise an answer that lists many numbers would be right by chance.
    """
    boxes = list(_BOXED.finditer(text))
    mark = text.rfind(_MARK)
    if boxes and boxes[-1].end() > mark:
        content = _in_braces(text, boxes[-1].end())
        return None if content is None else parse_number(content)
    if mark >= 0:
        content = text[mark + len(_MARK) :].strip().partition("\n")[0]
        return parse_number(content)
    return parse_number(text)


def parse_number(text: str) -> Fraction | None:
    r"""Returns the value of a number with a sign, thousands commas and decimals, or of a fraction `a/b` or
    `\frac{a}{b}` of two such numbers. Dollar and percent signs and LaTeX texts are ignored. None for anything else.
    """
    plain = _TEXT.sub("", _FRACTION.sub(r"\1/\2", text)).strip().rstrip(".").strip()
    if len(plain) > _DIGITS:
        return None
    above, slash, below = plain.partition("/")
    numerator, denominator = _decimal(above.strip()), _decimal(below.strip()) if slash else Fraction(1)
    if numerator is None or not denominator:
        return None
    return numerator / denominator


def _decimal(text: str) -> Fraction | None:
    match = _NUMBER.fullmatch(text.replace("\N{MINUS SIGN}", "-"))
    if match is None or not (match[2] or match[3]):
        return None
    value = Fraction((match[2] or "0").replace(",", "") + (match[3] or ""))
    return -value if match[1] == "-" else value


def _in_braces(text: str, start: int) -> str | None:
    """Returns the text from `start` to the brace that closes the one before it, or None if none does."""
    depth = 1
    for position in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[start:position]
    return None


def _label(answer: AnsweredPrompt) -> str:
    if answer.label is None:
        raise ValueError("the prompt has no label; name its key with --label-key")
    return str(answer.label)
