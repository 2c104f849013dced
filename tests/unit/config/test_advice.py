"""Advice that a message prints as flags and values can be typed: its rule is content then, and no other complains about
it.

Of alternatives the first is typed. Advice in other words ("lower it", "start a multiple of 8") is left to the tests of
its rule.
"""

import dataclasses
import re
import typing

import pytest

from megatron.base.errors import ConfigError
from megatron.command_line.flag_parser import plain_type, spellings_of, value_of
from megatron.config.rules import check as rules
from megatron.config.run import PARTS, flag_fields, flag_name
from tests.unit.config.runs import make_run
from tests.unit.config.test_rules import CASES

_TAKE_AWAY = re.compile(r"(?:remove|leave out|instead of) (--[a-z0-9-]+(?: and --[a-z0-9-]+)*)")
_GIVE = re.compile(r"^(?:give|add|raise|set) (--.*)")
_END = re.compile(r" (?:or|and|instead|to|with|for|too)\b|[:;(]|, |$")


def fields_by_flag():
    """Flag -> (field, type)."""
    hints = {part: typing.get_type_hints(cls) for part, cls in PARTS.items()}
    fields = flag_fields().values()
    return {flag: (spec, plain_type(hints[part][spec.name])) for part, spec in fields for flag in spellings_of(spec)}


FIELDS = fields_by_flag()


def advised(message):
    """The changes of fields that a message asks for, or None if its advice is not flags and values."""
    _, _, advice = message.rpartition("; ")
    first = re.split(r", or | or (?=remove|leave|give|--)", advice)[0]
    taken = [flag for flags in _TAKE_AWAY.findall(first) for flag in flags.split(" and ")]
    changes = {FIELDS[flag][0].name: FIELDS[flag][0].default for flag in taken if flag in FIELDS}
    if match := _GIVE.match(first):
        typed = match[1][: _END.search(match[1]).start()]
        for words in (part.split() for part in re.findall(r"--\S+(?: (?!--)\S+)*", typed)):
            if words[0] not in FIELDS:
                return None
            spec, kind = FIELDS[words[0]]
            if kind is bool:
                changes[spec.name] = not spec.default
                continue
            if len(words) == 1:  # any value of the user's
                return None
            try:
                changes[spec.name] = value_of(spec, kind, words[0], words[1:])
            except ConfigError:  # such as a word for any value
                return None
    return changes or None


def followed():
    """What is typed, and the message and the changes of the first problem with it."""
    for rule, broken, _, world, _ in CASES:
        message, *_ = rules.problems(make_run(given=tuple(broken), **broken), world)
        if (changes := advised(message)) is not None:
            yield pytest.param(broken, world, message, changes, id=f"{rule.__name__}: {message[-60:]}")


FOLLOWED = list(followed())


def test_much_advice_can_be_typed():
    assert len(FOLLOWED) > 30


@pytest.mark.parametrize(("broken", "world", "message", "changes"), FOLLOWED)
def test_what_is_advised_is_accepted(broken, world, message, changes):
    defaults = {spec.name: spec.default for _, spec in flag_fields().values()}
    fields = broken | changes
    typed = [name for name in fields if name not in changes or fields[name] != defaults[name]]
    run = dataclasses.replace(make_run(**fields), given=frozenset(typed))
    left = rules.problems(run, world)
    assert message not in left
    assert not [problem for problem in left if any(flag_name(name) in problem for name in changes)]
