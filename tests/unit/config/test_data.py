"""How --split is written."""

import pytest

from megatron.base.errors import ConfigError
from megatron.config.data import split_shares

THREE = (0.969, 0.03, 0.001)


@pytest.mark.parametrize(
    "text, shares",
    [
        ("1", (1, 0, 0)),
        ("2,1,1", (0.5, 0.25, 0.25)),
        ("99, 1", (0.99, 0.01, 0)),
        ("100,0,0", (1, 0, 0)),
        (".5,.25,.25", (0.5, 0.25, 0.25)),
        # What real scripts pass: the default of Megatron-LM, quotes inside quotes, and other separators.
        ("969, 30, 1", THREE),
        ("'969,30,1'", THREE),
        ('"969, 30, 1" ', THREE),
        ("969 30 1", THREE),
        ("[969,30,1]", THREE),
    ],
)
def test_shares(text, shares):
    assert split_shares(text) == pytest.approx(shares)


@pytest.mark.parametrize(
    "text", ["", "''", "a,b", "1,2,3,4", "0,0,0", "-1,2", "nan,1", "inf,1", "1e3,1", "1_0,1", "1..2,1"]
)
def test_what_is_not_three_shares(text):
    with pytest.raises(ConfigError, match=f"--split '{text}' must be up to three decimal numbers"):
        split_shares(text)
