"""The built-in reward functions."""

from fractions import Fraction

import pytest

from megatron.base.errors import ConfigError
from megatron.rl.builtin_rewards import built_in_function, number_in, parse_number
from megatron.rl.rewards import built_in_source
from megatron.rl.user_functions import AnsweredPrompt, FunctionError


def score(name, completion, label=None, argument=None):
    return built_in_function(built_in_source(name, argument))(AnsweredPrompt("p", completion, label, {}))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("42", 42),
        (" -7 ", -7),
        ("+3.50", Fraction(7, 2)),
        ("\N{MINUS SIGN}2", -2),
        (".5", Fraction(1, 2)),
        ("1,234,567", 1234567),
        ("$1,000.", 1000),
        ("12%", 12),
        ("3/4", Fraction(3, 4)),
        ("-3/ 4", Fraction(-3, 4)),
        (r"\frac{1}{3}", Fraction(1, 3)),
        (r"-\dfrac{1}{3}", Fraction(-1, 3)),
        (r"10\text{ cm}", 10),
        (r"\$5", 5),
        ("1,23", None),
        ("12,34,567", None),
        ("1/0", None),
        ("1/2/3", None),
        ("1e5", None),
        ("\N{ARABIC-INDIC DIGIT THREE}", None),
        ("forty", None),
        ("4 2", None),
        (".", None),
        ("", None),
        ("9" * 5000, None),
    ],
)
def test_numbers(text, value):
    assert parse_number(text) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("So 3 + 4 = 7\n#### 7", 7),
        ("#### 1\nno, better:\n#### 1,250\nDone.", 1250),
        (r"The answer is \boxed{42}.", 42),
        (r"\boxed{1} and then \boxed{\frac{1}{2}}", Fraction(1, 2)),
        (r"#### 5 is wrong: \boxed{6}", 6),
        (r"\boxed{6} is wrong" + "\n#### 5", 5),
        ("12", 12),
        ("It is 12", None),
        ("#### many", None),
        (r"\boxed{6", None),
    ],
)
def test_the_number_that_a_text_states(text, value):
    assert number_in(text) == value


class TestFunctions:
    def test_exact(self):
        assert score("exact", " 3 2 1\n", "3 2 1") == 1.0
        assert score("exact", "3 2 1 0", "3 2 1") == 0.0
        assert score("exact", "7", 7) == 1.0

    def test_number(self):
        assert score("number", "so\n#### 72", "Half of 144.\n#### 72") == 1.0
        assert score("number", r"\boxed{0.5}", "1/2") == 1.0
        assert score("number", "71, 72 or 73", 72) == 0.0
        with pytest.raises(ValueError, match="the label 'many' has no number"):
            score("number", "1", "many")

    def test_regex(self):
        assert score("regex", "it is 12.", r"\b12\b") == 1.0
        assert score("regex", "it is 120", r"\b12\b") == 0.0
        assert score("regex", "<a>x</a>", None, r"^<a>.*</a>$") == 1.0
        with pytest.raises(FunctionError, match=r"--rm-type regex has the pattern '\(', which is none"):
            score("regex", "a", None, "(")

    def test_length(self):
        assert score("length", "abcd", 4) == 1.0
        assert score("length", "abc", "4") == 0.75
        assert score("length", "abcdefghi", None, "4") == 0.0
        for label in (0, "many"):
            with pytest.raises(ValueError):
                score("length", "a", label)
        with pytest.raises(FunctionError, match="--rm-type length has the argument '-1'; give a number of characters"):
            score("length", "a", None, "-1")

    @pytest.mark.parametrize("name", ["exact", "regex", "number"])
    def test_a_prompt_without_a_label(self, name):
        assert built_in_source(name).needs_label
        with pytest.raises(ValueError, match="no label; name its key with --label-key"):
            score(name, "a")

    def test_an_unknown_name(self):
        with pytest.raises(ConfigError, match="--rm-type is judge, which is none of exact, regex, number, length"):
            built_in_source("judge")
